"""Any object that a step returns or keeps has the values of its call, as in eager PyTorch."""

import collections
import functools
import itertools
import types

import pytest
import torch

import firstloss as fl

pytestmark = pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning")


class Pair(tuple):
    pass


class WithAttribute(tuple):
    def __new__(cls, *items):
        self = super().__new__(cls, items)
        self.extra = items[0] * 2
        return self


class Frozen(frozenset):
    pass


class Iterates:
    def __init__(self, x):
        self.left = [x * 2, x * 3]

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def yields(x):
    yield x * 2
    yield x * 3


# How the step makes it, and how its tensors are taken out.
OBJECTS = {
    "max": (lambda x: x.max(0), list),
    "topk": (lambda x: x.topk(2), list),
    "sort": (lambda x: x.long().sort(), list),
    "qr": (lambda x: torch.linalg.qr(x.reshape(1, 3)), list),
    "a class of tuples": (lambda x: Pair((x * 2, 1)), list),
    "a tuple with an attribute": (lambda x: WithAttribute(x * 2, x), lambda held: [*held, held.extra]),
    "a class of frozen sets": (lambda x: Frozen([x * 2]), list),
    "an iterator of a list": (lambda x: iter([x * 2]), list),
    "an iterator of a class": (Iterates, list),
    "a generator": (yields, list),
    "a generator of results": (lambda x: yields(x * 2), list),
    "zip": (lambda x: zip([x * 2], [x * 3], strict=True), lambda held: [part for pair in held for part in pair]),
    "map": (lambda x: map(torch.neg, [x * 2]), list),
    "chain": (lambda x: itertools.chain([x * 2], (x,)), list),
    "cycle": (lambda x: itertools.cycle([x * 2]), lambda held: [next(held)]),
    "reversed": (lambda x: reversed([x * 2]), list),
    "enumerate": (lambda x: enumerate([x * 2]), lambda held: [part for _, part in held]),
    "an iterator of a deque": (lambda x: iter(collections.deque([x * 2])), list),
    "values of a dict": (lambda x: {"a": x * 2}.values(), list),
    "a read-only dict": (lambda x: types.MappingProxyType({"a": x * 2}), lambda held: [held["a"]]),
    "a partial function": (lambda x: functools.partial(torch.add, x * 2), lambda held: [held(1)]),
    "a function": (lambda x: lambda y=x * 2: y, lambda held: [held()]),
    "a method": (lambda x: [x * 2].copy, lambda held: held()),
}
FORMS = {
    "itself": (lambda made: made, lambda held: held),
    "in a tuple": (lambda made: (made, None), lambda held: held[0]),
    "in a dict": (lambda made: {"made": [made]}, lambda held: held["made"][0]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_returned_holds_the_values_of_its_call(name, form, tmp_path):
    (make, parts), (put, take) = OBJECTS[name], FORMS[form]
    fl.backend("XLA", artifact_dir=tmp_path)
    step = fl.trace(lambda x: put(make(x)))
    for n in range(4):
        x = torch.tensor([3.0, 1.0, 2.0]) * (n + 1)
        returned, expected = take(step(x)), make(x)
        assert type(returned) is type(expected)
        # One product and one sum of small whole numbers are exact; a decomposition is not. Measured: 1e-7.
        torch.testing.assert_close(parts(returned), parts(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_kept_holds_the_values_of_its_call(name, tmp_path):
    make, parts = OBJECTS[name]
    fl.backend("XLA", artifact_dir=tmp_path)
    kept = {}

    @fl.trace
    def step(x):
        kept["made"] = make(x)
        return x.sum()

    for n in range(4):
        x = torch.tensor([3.0, 1.0, 2.0]) * (n + 1)
        step(x)
        torch.testing.assert_close(parts(kept["made"]), parts(make(x)), rtol=1e-6, atol=1e-6)  # as above
