"""Nested functions that call themselves keep what they read until Python collects garbage: there are none."""

import ast
import gc
import math
import types
import weakref
from pathlib import Path

import pytest
import torch

import firstloss as fl
from firstloss.program.nested import mapped

SOURCE = Path(__file__).parents[2] / "src" / "firstloss"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def own_nodes(function):
    """The nodes of a function's body, without those of nested functions."""
    waiting = list(ast.iter_child_nodes(function))
    for node in waiting:
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            waiting += ast.iter_child_nodes(node)


def names_in(node):
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def self_references(function):
    """The nested functions of a function that reach themselves by its variables."""
    reads = {}
    for node in own_nodes(function):
        if isinstance(node, FUNCTIONS):
            reads.setdefault(node.name, set()).update(names_in(node))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            closures = [part for part in ast.walk(node.value) if isinstance(part, ast.Lambda)]
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in {target.id for target in targets if isinstance(target, ast.Name)} if closures else ():
                reads.setdefault(name, set()).update(*map(names_in, closures))
    for begin in reads:
        reached, waiting = set(), [begin]
        for name in waiting:
            waiting += reads.get(name, set()) - reached
            reached |= reads.get(name, set())
        if begin in reached:
            yield begin


def found(text):
    return [name for f in ast.walk(ast.parse(text)) if isinstance(f, FUNCTIONS) for name in self_references(f)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f():\n def g(x): return [g(y) for y in x]\n", ["g"]),
        ("def f():\n def g(x): return h(x)\n def h(x): return g(x)\n", ["g", "h"]),
        ("def f():\n table = {1: lambda x: g(x)}\n def g(x): return table[1](x)\n", ["table", "g"]),
        ("def f():\n def g(x): return x\n return g(g(1))\n", []),
        ("def f(x): return f(x)\n", []),
    ],
)
def test_self_references_are_found(text, names):
    assert sorted(found(text)) == sorted(names)


def test_no_nested_function_reaches_itself():
    assert {path: names for path in SOURCE.rglob("*.py") if (names := found(path.read_text()))} == {}


def test_mapped():
    value = (1, [2, (3,)], {4})
    assert mapped(lambda part: part if type(part) is set else part + 1, value) == (2, [3, (4,)], {4})
    assert mapped(str, value, list) == ["1", ["2", ["3"]], "{4}"]
    assert mapped(str, 5, tuple) == "5"


MASK = torch.tensor([[True, False, True], [False, True, False]])
# Operations on a tensor, with a number that is an input.
OPERATIONS = {
    "number * tensor": lambda x, k: k * x,
    "tensor - number": lambda x, k: x - k,
    "alpha": lambda x, k: torch.add(x, x, alpha=k),
    "list": lambda x, k: torch._foreach_mul([x, x], k)[1],
    "list of numbers": lambda x, k: torch._foreach_add([x], [k])[0],
    "full_like": lambda x, k: torch.full_like(x, k),
    "where": lambda x, k: torch.where(MASK, x, k),
    "masked_fill": lambda x, k: x.masked_fill(MASK, k),
    "clamp": lambda x, k: x.clamp(-k, k),
    "power": lambda x, k: k**x,
    "lerp": lambda x, k: torch.lerp(x, x * x, k),
}


@pytest.mark.filterwarnings("error::firstloss.errors.EagerStepWarning")
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_operands_do_not_outlive_an_operation_in_a_step(operation):
    """Else `weight.data = ...` finds another view of the weight's memory, and the step's Program is another one than
    where the number is a constant, so that it is not compiled."""

    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = torch.nn.Linear(3, 2, bias=False)
        fl.compile(model, backend)
        at = types.SimpleNamespace(k=0)

        @fl.trace
        def step():
            weight = model.weight
            weight.data = operation(weight.data, 1.0 - math.exp(-0.1 * at.k - 0.1))
            at.k += 1

        for _ in range(6):
            step()
        return model.weight.detach()

    expected = run(fl.backend("CPU"))
    gc.collect()
    gc.disable()
    try:
        torch.testing.assert_close(run(fl.backend("XLA")), expected, check_device=False)
    finally:
        gc.enable()


DEFERRED = {
    "index": lambda x: x[x > 0],
    "unique": lambda x: torch.unique(x),
    "written": lambda x: x.masked_scatter_(x > 0, torch.ones(6)),
    "folded": lambda x: torch.cat([x, x]).nonzero(),
    "list": lambda x: torch._foreach_add([x, x], 1.0),
    "number": lambda x: x * x.sum().item(),
}


@pytest.mark.parametrize("operation", DEFERRED.values(), ids=DEFERRED.keys())
def test_operands_do_not_outlive_an_operation_in_a_constructor(operation):
    gc.collect()
    gc.disable()
    try:
        with fl.deferred():
            x = torch.randn(2, 3)
            ref = weakref.ref(x)
            result = operation(x)
            same = result is x
            del x, result
            assert same or ref() is None
    finally:
        gc.enable()
