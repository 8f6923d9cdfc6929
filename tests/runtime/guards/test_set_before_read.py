"""Attributes that a step sets before it reads them are not guarded: `self.losses = []` at the start of a forward pass
does not have it traced at each call. All ways of reading them before that are found, as generated programs show."""

import contextlib
import random

import pytest
import torch
from torch import nn

import firstloss as fl
from tests import scale

# How a forward pass keeps values for the loss: an object, how it is set, added to and read.
KEPT = {
    "a list": ("h.aux = []", "h.aux.append(v)", "sum(t.square().mean() for t in h.aux)"),
    "a dict": ("h.aux = {}", "h.aux[len(h.aux)] = v", "sum(t.square().mean() for t in h.aux.values())"),
    "a tuple": ("h.aux = ()", "h.aux += (v,)", "sum(t.square().mean() for t in h.aux)"),
    "a tensor": ("h.aux = None", "h.aux = v if h.aux is None else h.aux + v", "h.aux.square().mean()"),
    "a number": ("h.aux = 0", "h.aux += 1; h.last = v", "h.last.mean() * h.aux"),
    "what is popped": ("h.aux = []", "h.aux.append(v)", "sum(h.aux.pop().mean() for _ in range(2))"),
    "by name": ("setattr(h, 'aux', [])", "getattr(h, 'aux').append(v)", "sum(t.mean() for t in getattr(h, 'aux'))"),
}
OBJECTS = {
    "an object": "class H: pass\nh = H()",
    "a model": "h = module",
    "another module": "h = nn.Module()",
    "a dataclass": "@dataclasses.dataclass\nclass H: aux: list = dataclasses.field(default_factory=list)\nh = H()",
    "slots": "class H: __slots__ = ('aux', 'last')\nh = H()",
}


def scope_for(backend):
    scope = {"fl": fl, "nn": nn, "torch": torch, "backend": backend, "__name__": "generated"}
    exec("import copy, dataclasses, random", scope)
    return scope


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("of", OBJECTS)
def test_what_is_set_before_it_is_read_is_not_guarded(of, kept, tmp_path, traced, recwarn):
    set_, add, read = KEPT[kept]
    text = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
    def forward(self, x):
        {set_}
        for _ in range(2):
            x = v = torch.tanh(self.body(x))
            {add}
        return x
torch.manual_seed(0)
module = Model()
{OBJECTS[of]}
model = fl.compile(module, backend)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
@fl.trace
def step(x):
    loss = model(x).square().mean() + {read}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
losses = [step(torch.full((3, 4), 0.1 * i)).item() for i in range(5)]
"""
    expected, actual = scope_for(fl.backend("CPU")), scope_for(fl.backend("XLA", artifact_dir=tmp_path))
    fl.backend("CPU")
    exec(text, expected)
    traced.clear()
    actual["backend"] = fl.backend("XLA", artifact_dir=tmp_path)
    exec(text, actual)
    torch.testing.assert_close(actual["losses"], expected["losses"])
    assert len(traced) <= 3 and not [w for w in recwarn if "firstloss" in type(w.message).__module__]


# What a step may do with the attributes of two objects, `v` being a tensor and `total` the result.
OPERATIONS = (
    "{o}.{a} = []",
    "{o}.{a} = [v, v]",
    "{o}.{a} = {o}.{b}",
    "{o}.{a} = {p}.{a}",
    "{o}.{a}.append(v)",
    "{o}.{a}.clear()",
    "total = total + len({o}.{a})",
    "total = total + 2 * len(getattr({o}, '{a}'))",
    "total = total + 3 * hasattr({o}, '{a}')",
    "total = total + 5 * len(vars({o}).get('{a}', ())) if hasattr({o}, '__dict__') else total",
    "total = total + 7 * len({o}.__dict__['{a}']) if '{a}' in getattr({o}, '__dict__', ()) else total",
    "twin = copy.copy({o}); total = total + 11 * len(twin.{a})",
    "twin = copy.deepcopy({o}); total = total + 13 * len(twin.{a})",
    "total = total + 17 * len(object.__getattribute__({o}, '{a}'))",
    "del {o}.{a}; {o}.{a} = [v]",
    "{o}.both = 2",
    "total = total + 19 * {o}.both",
    "{o}.reset('{a}')",
    "total = total + 23 * {o}.count()",
    "{o}.a, {o}.b = {o}.b, {o}.a",
    "try: {o}.{a} = refused\n    except ValueError: pass",
    "if hasattr({o}, '{a}'): del {o}.{a}",
)
CLASSES = {
    "plain": "class Held:",
    "module": "class Held(nn.Module):",
    "slots": "class Held:\n    __slots__ = ('a', 'b')",
    "custom": """class Held:
    def __setattr__(self, name, value):
        if value is refused: raise ValueError
        object.__setattr__(self, name, value if value is not self.__dict__.get(name) else list(value))""",
    "refusing": """class Held:
    def __setattr__(self, name, value):
        if value is refused: raise ValueError
        super().__setattr__(name, value)""",
}
METHODS = """
    @property
    def both(self): return len(self.a) + len(self.b)
    @both.setter
    def both(self, n): self.a, self.b = [0] * n, self.a
    def reset(self, name): setattr(self, name, [])
    def count(self): return sum(len(getattr(self, name)) for name in ('a', 'b'))
"""
# What the caller does between two calls.
BETWEEN = (
    "{o}.{a} = [1.0, 2.0]",
    "{o}.{a}.append(4.0)",
    "{o}.{a} = {p}.{b}",
    "{o}.{a} = []",
    "if hasattr({o}, '{a}'): del {o}.{a}",
    "pass",
    "pass",
)


def fill(draw, text):
    o, p = draw.sample("hk", 2)
    a, b = draw.sample("ab", 2)
    return text.format(o=o, p=p, a=a, b=b)


def program(seed):
    draw = random.Random(seed)
    lines = [fill(draw, draw.choice(OPERATIONS)) for _ in range(draw.randrange(3, 8))]
    held = CLASSES[draw.choice(list(CLASSES))]
    between = [fill(draw, draw.choice(BETWEEN)) for _ in range(7)]
    return held, lines, between


def results(seed, backend):
    held, lines, between = program(seed)
    scope = scope_for(backend)
    scope["refused"] = []
    exec(f"{held}\n{METHODS}\nh, k = Held(), Held()\nh.a, h.b, k.a, k.b = [1], [], [1, 2, 3], [4.0]", scope)
    body = "\n    ".join(lines)
    exec(f"@fl.trace\ndef step(v):\n    total = v.sum()\n    {body}\n    return total", scope)
    found = []
    for i, line in enumerate(between):
        try:
            found.append(scope["step"](torch.full((2,), float(i))).item())
        except AttributeError:
            found.append("AttributeError")
        found += [len(getattr(o, a)) for o in (scope["h"], scope["k"]) for a in "ab" if hasattr(o, a)]
        with contextlib.suppress(AttributeError):
            exec(line, scope)
    return found


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::firstloss.errors.EagerStepWarning")
@pytest.mark.parametrize("first", range(0, scale.of(60, 1000), 10))
def test_all_that_is_read_before_it_is_set_is_guarded(first, tmp_path, by_kernels):
    for seed in range(first, first + 10):
        expected = results(seed, fl.backend("CPU"))
        actual = results(seed, fl.backend("XLA", artifact_dir=tmp_path))
        assert actual == expected, program(seed)
