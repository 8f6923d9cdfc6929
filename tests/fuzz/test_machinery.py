"""The fuzzer itself: it detects differences, classifies them correctly, and shrinks programs."""

import ast
import collections
import functools
import os
import subprocess
import sys
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tests.fuzz.compare import Difference, compare
from tests.fuzz.oracle import check
from tests.fuzz.shrink import shrink
from tests.fuzz.steps import generate


def test_a_program_is_a_function_of_its_seed():
    here = [generate(seed) for seed in range(20)]
    code = "from tests.fuzz.steps import generate; import sys; sys.stdout.write(''.join(map(generate, range(20))))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    elsewhere = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "".join(here) == elsewhere.stdout
    assert len(set(here)) == len(here)


def test_programs_are_valid_python():
    for seed in range(100):
        ast.parse(generate(seed))


class Box:
    def __init__(self, **kept):
        self.__dict__.update(kept)


class Slots:
    __slots__ = ("h",)

    def __init__(self, h):
        self.h = h


def alias(same):
    t = torch.ones(4)
    return {"t": t, "u": t if same else t.clone()}


def view(same):
    t = torch.ones(4)
    return {"t": t, "u": t[1:] if same else t[1:].clone()}


def shared_list(same):
    one = [1]
    return {"a": one, "b": one if same else [1]}


def numpys(same):
    t = torch.ones(4)
    return {"t": t, "a": t.numpy() if same else t.numpy().copy()}


def cell(value):
    return lambda: value


def generating(value):
    def numbers():
        k = value
        while True:
            yield k

    result = numbers()
    next(result)
    return result


def hooked(count):
    module = nn.Linear(2, 2)
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    for _ in range(count):
        module.register_forward_hook(print)
    return module


def with_gradient(value):
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), value)
    return p


def optimized(lr):
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=lr)


def watched(alive):
    box = Box()
    return [weakref.ref(box), box if alive else None]


# Two results from the first argument are the same; one from the second differs from one from the first.
HELD = {
    "tensor": (torch.tensor, 1.0, 1.5),
    "dtype": (lambda t: torch.ones(2, dtype=t), torch.float32, torch.float64),
    "number": (int, 1, 2),
    "nan": (float, "nan", "0"),
    "list": (list, [1, 2], [1, 3]),
    "longer list": (list, [1, 2], [1, 2, 3]),
    "tuple in dict": (lambda v: {"a": (1, {"b": torch.tensor(v)})}, 1.0, 2.0),
    "dict's order": (lambda v: dict.fromkeys(v, 0), "ab", "ba"),
    "ordered dict's order": (lambda v: collections.OrderedDict.fromkeys(v, 0), "ab", "ba"),
    "set": (set, "ab", "abc"),
    "deque": (lambda v: collections.deque(v, maxlen=3), [1], [2]),
    "chain map's depth": (lambda v: collections.ChainMap({"k": 1}) if v else collections.ChainMap({}, {"k": 1}), 0, 1),
    "attribute": (lambda v: Box(h=v), 1, 2),
    "attribute's name": (lambda v: Box(**{v: 1}), "h", "k"),
    "slot": (Slots, 1, 2),
    "cell": (cell, 1, 2),
    "defaults": (lambda v: types.FunctionType((lambda a: a).__code__, {"__name__": __name__}, argdefs=(v,)), 1, 2),
    "partial": (lambda v: functools.partial(print, k=v), 1, 2),
    "method's self": (lambda v: Box(h=v, of=functools.partial(Box(h=v).__init__)), 1, 2),
    "generator": (generating, 1, 2),
    "iterator": (lambda v: iter(range(v, 9)), 1, 2),
    "weakref": (watched, True, False),
    "array": (np.array, [1.0], [2.0]),
    "same object": (shared_list, True, False),
    "same tensor": (alias, True, False),
    "same memory": (view, True, False),
    "same memory as an array": (numpys, True, False),
    "hooks": (hooked, 1, 2),
    "gradient": (with_gradient, 1.0, 2.0),
    "parameter": (lambda v: nn.Parameter(torch.ones(2)) if v else torch.ones(2), True, False),
    "learning rate": (optimized, 0.1, 0.2),
}


@pytest.mark.parametrize("name", HELD)
def test_differences_are_found(name):
    make, one, other = HELD[name]
    compare({"held": make(one)}, {"held": make(one)}, __name__)
    with pytest.raises(Difference) as raised:
        compare({"held": make(one)}, {"held": make(other)}, __name__)
    assert str(raised.value).startswith("held")


PROGRAM = """
import torch
import firstloss as fl

def program(b):
    losses = []
    {before}
    for i in range(3):
        {line}
    return locals()
"""


@pytest.mark.parametrize(
    ("line", "kind", "what"),
    [
        ("losses.append(torch.ones(2) * i)", "same", ""),
        ("losses.append(torch.ones(2) * (i + b.is_xla))", "differs", "losses[0]: eager [0, 0], traced [1, 1]"),
        ("losses += [i] * (1 + b.is_xla)", "differs", "losses: eager has 3 items, traced 6"),
        ("losses[7 if b.is_xla else slice(0)]", "foreign", "IndexError: list index out of range"),
        ("losses[7]", "discarded", "IndexError: list index out of range"),
        ("losses.append((w.sum(1) - 1e-16 * b.is_xla).sign())", "discarded", "it amplifies rounding errors"),
    ],
)
def test_outcomes_are_classified(line, kind, what):
    before = "w = torch.tensor([[0.1, 0.2, -0.3]] * 20, dtype=torch.float64)"
    outcome = check(PROGRAM.format(line=line, before=before))
    assert (outcome.kind, outcome.what) == (kind, what)


def test_a_refusal_names_its_line():
    step = 'step = fl.trace(lambda x: float(x.sum()) and x, reads="refuse")'
    outcome = check(PROGRAM.format(line="losses.append(step(torch.ones(2)))", before=step))
    assert (outcome.kind, outcome.where) == ("refused", f"line 7: {step}")


def test_failing_programs_are_shrunk():
    source = PROGRAM.format(line="if i > 0:\n            losses.append(1)\n        losses.append(2)", before="x = 1")
    small = shrink(source, lambda text: "losses.append(1)" in text and "for i" in text)
    assert (
        ast.unparse(ast.parse(small))
        == "def program(b):\n    for i in range(1):\n        losses.append(1)\n    return locals()"
    )
