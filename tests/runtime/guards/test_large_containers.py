"""Containers too large to be compared item by item are still guarded, or the error names the line that reads them."""

import array
import collections
import inspect
import warnings

import numpy as np
import pytest
import torch

import firstloss as fl
from firstloss.errors import EagerStepWarning, GraphChangeWarning
from firstloss.runtime.guards.kinds.containers import MAX_ITEMS
from firstloss.runtime.guards.snapshot import LARGEST
from firstloss.runtime.step import cache_entry

MANY, TOO_MANY = 5000, MAX_ITEMS + 2000
X = torch.ones(2)
filled: list = []
# Not one of the first or last items, nor of the evenly spaced ones, that are compared in larger containers.
PLACE = 3001


class Flag:
    on = False


def switched(held, place=PLACE, on=1):
    """A step that depends on `held[place]`, and a function that sets it."""

    def step(x):
        return x * 3 if held[place] else x * 2

    def switch():
        held[place] = on

    return fl.trace(step), switch


def matrix():
    return np.zeros((1024, 1024), bool)[:, ::2]  # not contiguous


WATCHED = {
    "a list": lambda: switched([0] * MANY),
    "a list of what does not compare": lambda: switched([None] * MANY, on=np.ones(3, int)[:1]),
    "a deque": lambda: switched(collections.deque([0] * MANY)),
    "a dict": lambda: switched(dict.fromkeys(range(MANY), 0)),
    "an OrderedDict": lambda: switched(collections.OrderedDict.fromkeys(range(MANY), 0)),
    "as many as are looked at": lambda: switched([0] * MAX_ITEMS),
    "a megabyte of numpy's": lambda: switched(np.zeros(1 << 17)),
    "a megabyte that is not contiguous": lambda: switched(matrix(), (PLACE // 5, 7)),
    "objects of numpy's": lambda: switched(np.zeros(MANY, object)),
    "an array of Python's": lambda: switched(array.array("d", bytes(1 << 20))),
    "bytes": lambda: switched(bytearray(1 << 20)),
}


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize("kind", WATCHED)
def test_a_change_of_one_of_many_items_is_detected(kind, backend):
    step, switch = WATCHED[kind]()
    assert [step(X).tolist()[0] for _ in range(3)] == [2.0] * 3
    switch()
    assert [step(X).tolist()[0] for _ in range(3)] == [3.0] * 3


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_a_change_in_a_large_set_is_detected(backend):
    seen = set(range(MANY))
    step = fl.trace(lambda x: x * 3 if -1 in seen else x * 2)
    first = step(X).tolist()
    seen.discard(1)
    seen.add(-1)
    assert (first, step(X).tolist()) == ([2.0, 2.0], [3.0, 3.0])


def test_unchanged_large_containers_do_not_retrace(backend, monkeypatch, traced):
    monkeypatch.setattr(cache_entry, "_CHECKING", 1e-9)
    held = {"flags": [0] * MANY, "table": np.zeros(1 << 17), "names": dict.fromkeys(map(str, range(MANY)))}

    @fl.trace
    def step(x):
        return x * 3 if held["flags"][0] or held["table"][0] or held["names"]["0"] else x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphChangeWarning)
        warnings.simplefilter("error", EagerStepWarning)
        for _ in range(5):
            step(X)
    assert len(traced) == 2  # the second call searches for reads that cannot be guarded


TOO_LARGE = {
    "a list of 67,536 items": lambda: switched([0] * TOO_MANY),
    "a dict of 67,536 items": lambda: switched(dict.fromkeys(range(TOO_MANY), 0)),
    "a deque of 67,536 items": lambda: switched(collections.deque([0] * TOO_MANY)),
    "an array of 8,388,608 bytes": lambda: switched(np.zeros(1 << 20)),
    "an array of 8,000,000 bytes": lambda: switched(np.zeros((1000, 2000))[:, ::2], (PLACE // 5, 7)),
    "a bytearray of 8,388,608 bytes": lambda: switched(bytearray(8 << 20), 8009),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_reading_a_very_large_container_is_named_and_not_compiled(what, backend):
    step, switch = TOO_LARGE[what]()
    with pytest.warns(EagerStepWarning) as record:
        for _ in range(3):
            assert step(X).tolist() == [2.0, 2.0]
    (text,) = [str(w.message) for w in record]
    lines, first = inspect.getsourcelines(switched)
    line = next(first + i for i, line in enumerate(lines) if "x * 3 if held" in line)
    assert "step would have to be traced at each call" in text and what in text
    assert "the variable held" in text and f"{__file__}:{line} reads" in text
    switch()
    assert step(X).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("kind", ["list", "keys", "values", "set", "deque", "tuples"])
def test_reading_objects_in_a_large_container_is_named_and_not_compiled(kind, backend):
    flags = [Flag() for _ in range(LARGEST + 1)]
    containers = {
        "list": lambda: flags,
        "keys": lambda: dict.fromkeys(flags),
        "values": lambda: dict(enumerate(flags)),
        "set": lambda: set(flags),
        "deque": lambda: collections.deque(flags),
        "tuples": lambda: [(flag, 1) for flag in flags],
    }[kind]()
    of = {"values": lambda: containers.values(), "tuples": lambda: [pair[0] for pair in containers]}.get(
        kind, lambda: containers
    )
    step = fl.trace(lambda x: x * 3 if any(flag.on for flag in of()) else x * 2)
    with pytest.warns(EagerStepWarning, match=r"of 1,025 items \(Flag\)"):
        for _ in range(3):
            assert step(X).tolist() == [2.0, 2.0]
    flags[700].on = True
    assert step(X).tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_a_growing_list_is_detected_whatever_its_length(backend):
    held = [0] * TOO_MANY
    step = fl.trace(lambda x: x * len(held))
    for _ in range(2):
        assert step(X)[0].item() == len(held)
        held.append(0)


def test_containers_that_user_code_does_not_read_are_not_named(backend):
    filled[:] = [0] * TOO_MANY

    @fl.trace
    def step(x):
        filled.append(0)  # the same in each call, and without effect
        return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphChangeWarning)
        warnings.simplefilter("error", EagerStepWarning)
        assert [step(X).tolist()[0] for _ in range(3)] == [2.0] * 3
