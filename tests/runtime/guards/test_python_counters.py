"""A branch on a Python counter is not frozen, wherever the step keeps the counter."""

import argparse
import array
import collections
import contextvars
import dataclasses
import functools
import io
import itertools
import os
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl

pytestmark = pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")

SWITCH = 4  # from this call on the second argument is returned


class Slots:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


@dataclasses.dataclass(slots=True)
class Record:
    n: int = 0


class Plain:
    def __init__(self):
        self.n = 0


class Compares(Plain):
    def __lt__(self, other):
        self.n += 1
        return self.n < other


class Open(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self):
        self.n += 1
        return self.n


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = [Inner()]  # a plain list, which nn.Module does not search

    def forward(self):
        return self.parts[0]()


def attribute(held, way=lambda held: held):
    """Count in the attribute n of the object that `way` reaches from `held`."""

    def count():
        way(held).n += 1
        return way(held).n

    return count


def item(container, key):
    """Count in an item."""

    def count():
        container[key] += 1
        return container[key]

    return count


def nested():
    settings = {"a": {"b": [0]}}

    def count():
        settings["a"]["b"][0] += 1
        return settings["a"]["b"][0]

    return count


def collected():
    calls = collections.deque()

    def count():
        calls.append(None)
        return len(calls)

    return count


def of_the_function():
    def count():
        count.n += 1
        return count.n

    count.n = 0
    return count


def default():
    def count(calls=[0]):  # noqa: B006 - the point of it
        calls[0] += 1
        return calls[0]

    return count


def generator():
    def numbers():
        n = 0
        while True:
            n += 1
            yield n

    return functools.partial(next, numbers())


def environment():
    os.environ["FIRSTLOSS_TEST"] = "0"

    def count():
        os.environ["FIRSTLOSS_TEST"] = str(int(os.environ["FIRSTLOSS_TEST"]) + 1)
        return int(os.environ["FIRSTLOSS_TEST"])

    return count


def context():
    variable = contextvars.ContextVar("variable", default=0)

    def count():
        variable.set(variable.get() + 1)
        return variable.get()

    return count


def by_string():
    owner, name = Plain(), "".join(["n"])

    def count():
        setattr(owner, name, getattr(owner, name) + 1)
        return getattr(owner, name)

    return count


def local():
    storage = threading.local()
    storage.n = 0
    return attribute(storage)


def called(functions):
    return lambda: [f() for f in functions][0]


kept = Plain()
PLACES = {
    "slots": lambda: attribute(Slots()),
    "slots of a dataclass": lambda: attribute(Record()),
    "an object in a list": lambda: attribute([Plain()], lambda held: held[0]),
    "an object in a tuple in a dict": lambda: attribute({"x": (Plain(),)}, lambda held: held["x"][0]),
    "a namespace": lambda: attribute(argparse.Namespace(n=0)),
    "a weak reference": lambda: attribute(weakref.ref(kept), lambda held: held()),
    "a thread's own": local,
    "dicts in dicts": nested,
    "an array of numpy's": lambda: item(np.zeros(1, int), 0),
    "the memory of a tensor": lambda: item(torch.zeros(1).numpy(), 0),
    "an array of Python's": lambda: item(array.array("i", [0]), 0),
    "bytes": lambda: item(bytearray(1), 0),
    "a Counter": lambda: item(collections.Counter(), "n"),
    "a UserDict": lambda: item(collections.UserDict(n=0), "n"),
    "a dict with attributes": lambda: attribute(Open(n=0)),
    "a long list": lambda: item([0] * 1000, 0),
    "a deque": collected,
    "a function": of_the_function,
    "a default argument": default,
    "a callback": lambda: called([of_the_function()]),
    "a module in a list": Outer,
    "an operator": lambda: Compares(),
    "itertools": lambda: functools.partial(next, itertools.count(1)),
    "a generator": generator,
    "the environment": environment,
    "a context variable": context,
    "a name that is worked out": by_string,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_counter_in_a_branch_is_not_frozen(place, backend):
    kept.n = 0
    count = PLACES[place]()

    def chosen(a, b):
        return a if (count if isinstance(count, Compares) else count()) < SWITCH else b

    step = fl.trace(chosen)
    actual = [step(torch.zeros(2), torch.ones(2))[0].item() for _ in range(SWITCH + 1)]
    assert actual == [0.0] * (SWITCH - 1) + [1.0] * 2


SOURCES = {
    "a list": iter,
    "a generator": lambda batches: (batch for batch in batches),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_step_that_fetches_batches_fetches_at_each_call(source, backend):
    batches = [torch.full((2,), float(n)) for n in range(5)]
    it = SOURCES[source](batches)
    step = fl.trace(lambda: next(it) * 2)
    assert [step()[0].item() for _ in batches] == [0.0, 2.0, 4.0, 6.0, 8.0]


def bytes_of_a_file():
    file = io.BytesIO(bytes(range(16)))
    return lambda: torch.frombuffer(bytearray(file.read(4)), dtype=torch.uint8)


def batches_of_pytorchs_loader():
    it = iter(torch.utils.data.DataLoader(torch.arange(16).reshape(4, 4), batch_size=None))
    return lambda: next(it)


@pytest.mark.parametrize("make", [bytes_of_a_file, batches_of_pytorchs_loader])
def test_batches_from_an_opaque_source_are_fetched_at_each_call(make, backend):
    batch = make()
    step = fl.trace(lambda: batch() + 1)
    for begin in (1, 5, 9, 13):
        assert step().tolist() == list(range(begin, begin + 4))


def test_our_loader_inside_a_step_is_an_error(backend):
    it = iter(fl.utils.data.DataExecutor([torch.zeros(2)], num_steps=3))
    with pytest.raises(fl.errors.LoaderError, match="inside a traced step.*argument"):
        fl.trace(lambda: next(it))()


def test_numpy_memory_is_read_at_each_call(backend):
    weights = np.array([1.0, 2.0])
    step = fl.trace(lambda x: x * torch.from_numpy(weights))
    x = torch.ones(2, dtype=torch.float64)
    for first in (1.0, 5.0, 7.0):
        weights[0] = first
        assert step(x).tolist() == [first, 2.0]
