"""Steps that return or keep a container that is an argument, or is in one: as in eager PyTorch, that of each call."""

import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl


class Pair(NamedTuple):
    number: Any
    text: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    held: Any


class Plain:
    def __init__(self, held):
        self.held = held


# Where the container is: in an argument of any kind.
WITHIN = {
    "itself": (lambda held: held, lambda outer: outer),
    "a tuple": (lambda held: (held,), lambda outer: outer[0]),
    "a tuple in a tuple": (lambda held: (1, (held,)), lambda outer: outer[1][0]),
    "a list": (lambda held: [held], lambda outer: outer[0]),
    "a dict": (lambda held: {"held": held}, lambda outer: outer["held"]),
    "an ordered dict": (lambda held: collections.OrderedDict(held=held), lambda outer: outer["held"]),
    "a named tuple": (lambda held: Pair(held, ""), lambda outer: outer.number),
    "a deque": (lambda held: collections.deque([held]), lambda outer: outer[0]),
    "a dataclass": (Frozen, lambda outer: outer.held),
    "an object": (Plain, lambda outer: outer.held),
    "a namespace": (lambda held: types.SimpleNamespace(held=held), lambda outer: outer.held),
}

# What it is, at call `i`.
HELD = {
    "a tuple of a number": lambda i: (i,),
    "a tuple of texts": lambda i: (f"sample {i}", "always"),
    "a tuple of two kinds": lambda i: (i / 3, i, f"{i}"),
    "a tuple in a tuple": lambda i: ((i,), 1),
    "a tuple in a list": lambda i: [(i,)],
    "a list in a tuple": lambda i: ([i],),
    "a named tuple": lambda i: Pair(i, f"{i}"),
    "a tuple of a tensor": lambda i: (torch.full((2,), float(i)), i),
    "a tuple of an array": lambda i: (np.full(2, float(i)), i),
    "an empty tuple": lambda i: (),
    "a size": lambda i: torch.Size([i]),
    "a frozen set": lambda i: frozenset([i]),
    "a slice": lambda i: slice(0, i),
    "a range": lambda i: range(i),
}


class Kept:
    """What the step has left, in every place that there is."""

    def __init__(self):
        self.items, self.table, self.last, self.local = [], {}, None, None

    def keep(self, held, name):
        self.items.append(held)
        self.table[name] = held
        self.last = held
        return held, {"held": [held]}, (lambda: held)


def described(value):
    """What can be compared: values with their types."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value), value.tolist()
    if isinstance(value, (tuple, list)):
        return type(value), [described(part) for part in value]
    return type(value), value


@pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning", "ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize("held", HELD)
def test_a_container_of_an_argument_is_that_of_the_call(held):
    backend = fl.backend("XLA")
    model = fl.compile(nn.Linear(2, 1), backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = {name: Kept() for name in WITHIN}

    @fl.trace
    def step(x, arguments):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {name: kept[name].keep(inner(arguments[name]), name) for name, (_, inner) in WITHIN.items()}

    passed = {name: [] for name in WITHIN}
    for i in range(5):
        values = {name: HELD[held](i) for name in WITHIN}
        returned = step(torch.ones(3, 2), {name: outer(values[name]) for name, (outer, _) in WITHIN.items()})
        for name, value in values.items():
            passed[name].append(value)
            itself, table, closure = returned[name]
            assert described(itself) == described(value), name
            assert isinstance(value, (frozenset, slice, range)) or itself is value  # as in eager PyTorch
            assert table["held"][0] is itself and closure() is itself
            assert kept[name].last is kept[name].table[name] is kept[name].items[-1] is itself
    for name, values in passed.items():
        assert described(kept[name].items) == described(values), name


@pytest.mark.parametrize("shape", [(), (2,), (0, 3), (2, 3, 4)])
def test_a_size_is_a_size_in_the_step(shape):
    """Of PyTorch's pytrees it comes back as a plain tuple."""
    fl.backend("XLA")
    printed = []

    @fl.step_closure
    def note(size):
        printed.append(size)

    @fl.trace
    def step(x, size, named):
        note(size)
        same = size is named["size"]
        return x.new_ones(size) * size.numel(), f"{size}", type(size), same, {"kept": size}

    for more in (1, 1, 3):
        size = torch.Size((*shape, more))
        ones, text, kind, same, kept = step(torch.ones(2), size, named={"size": size})
        assert torch.equal(ones, torch.ones(size) * size.numel())
        assert (text, kind, same) == (f"{size}", torch.Size, True) and kept["kept"] is printed[-1] is size


def test_sizes_are_counted_as_one_argument():
    """The names of the arguments after it are theirs."""
    fl.backend("XLA")

    @fl.trace(shapes=fl.Pad(values={"y": -100}))
    def step(size, x, y):
        return x + size[0], y + 0

    for rows in (4, 3):
        _, y = step(torch.Size((1, 2)), torch.zeros(rows), y=torch.zeros(rows, dtype=torch.long))
    assert y.tolist() == [0, 0, 0, -100]


@pytest.mark.filterwarnings("error::firstloss.errors.EagerStepWarning")
def test_a_result_of_max_beside_a_list_that_is_passed_twice():
    """Containers are copied then; it keeps its class."""
    fl.backend("XLA")

    @fl.trace
    def step(first, second, largest):
        first.append(1.0)
        return largest.values * len(second)

    held = [torch.ones(1)]
    for n in (2.0, 3.0):
        largest = torch.max(torch.full((2, 2), n), 0)
        assert step(held, held, largest).tolist() == [n * len(held)] * 2
