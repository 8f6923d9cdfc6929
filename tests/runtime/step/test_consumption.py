"""Steps that take items from outside, and whose arguments vary: what is taken is taken once at each call."""

import functools
import io
import itertools
import queue
import warnings
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl

CALLS = 6
FIRST = 2  # the call at which it begins to take something: until then, nothing tells that it will
ITEMS = [0.9**i for i in range(50)]


def generator():
    yield from ITEMS


def file(folder):
    path = folder / "items"
    path.write_text("\n".join(map(str, ITEMS)))
    return path


def queued(made):
    for item in ITEMS:
        made.put(item)
    return made.get


def first_of(pairs):
    return next(pairs)[0]


def line_of(opened):
    return lambda: float(opened.readline())


TAKERS = {
    "a generator": lambda folder: generator().__next__,
    "a list's iterator": lambda folder: iter(ITEMS).__next__,
    "map": lambda folder: map(ITEMS.__getitem__, itertools.count()).__next__,
    "zip": lambda folder: functools.partial(first_of, zip(generator(), generator(), strict=True)),
    "islice": lambda folder: itertools.islice(generator(), 40).__next__,
    "a deque": lambda folder: deque(ITEMS).popleft,
    "a queue": lambda folder: queued(queue.Queue()),
    "a simple queue": lambda folder: queued(queue.SimpleQueue()),
    "a file": lambda folder: line_of(open(file(folder))),
    "a binary file": lambda folder: line_of(open(file(folder), "rb")),
    "a file in memory": lambda folder: line_of(io.StringIO("\n".join(map(str, ITEMS)))),
}
ARGUMENTS = {
    "none": lambda call: None,
    "a text": lambda call: "ab"[call % 2],
    "a number": lambda call: 1.0 + call,
    "a whole number": lambda call: call,
    "a dict": lambda call: {"n": call, "t": "ab"[call % 2]},
}


def factor(arg, strict):
    if isinstance(arg, dict):
        return arg["n"] * (1.0 if arg["t"] == "a" else 2.0)
    if strict:  # treats an input number in another way than a number
        return 0.5 if type(arg) in (float, int, str) else 0.25
    return 0.0 if arg is None else 0.01 * arg if not isinstance(arg, str) else 0.1 * (arg == "a")


def losses(backend, taker, argument, reads, new_shape, folder):
    torch.manual_seed(0)
    with backend.device:
        net = nn.Linear(4, 3)
    model, optimizer = fl.compile(net, backend), torch.optim.SGD(net.parameters(), lr=0.1)
    take, read = TAKERS[taker](folder), []

    @fl.trace
    def step(x, takes, arg):
        loss = F.mse_loss(model(x), torch.zeros(len(x), 3))
        if reads:
            read.append(loss.item())
        loss = loss * ((take() if takes else 1.0) + factor(arg, strict=not reads))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = []
    for call in range(CALLS):
        x = torch.ones(4 if new_shape and call >= FIRST else 6, 4)
        found.append(step(x, call >= FIRST, ARGUMENTS[argument](call)).item())
    return found, read, take()


@pytest.mark.parametrize("reads", [False, True], ids=["strict", "reads"])
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("taker", TAKERS)
def test_what_is_taken_is_taken_once(taker, argument, reads, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled, or is for each shape
        for new_shape in (False, True):
            expected = losses(fl.backend("CPU"), taker, argument, reads, new_shape, tmp_path)
            found = losses(fl.backend("XLA", artifact_dir=tmp_path), taker, argument, reads, new_shape, tmp_path)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # XLA sums in another order
