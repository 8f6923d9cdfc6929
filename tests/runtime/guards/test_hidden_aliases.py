"""Tensors stored where they cannot be replaced share memory as in eager PyTorch."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn

import firstloss as fl


def _generator():
    held = yield
    while True:
        yield held


def _held_by_a_generator(tensor):
    generator = _generator()
    next(generator)
    generator.send(tensor)
    return generator


HOLDERS = {
    "generator": _held_by_a_generator,
    "list iterator": lambda tensor: iter([tensor]),
    "repeat": itertools.repeat,
    "generator expression": lambda tensor: (pair[0] for pair in [(tensor, 1)]),
    "chain": lambda tensor: itertools.chain([tensor]),
    "callable iterator": lambda tensor: iter(functools.partial(lambda t: t, tensor), None),
}
SHOWS = {
    "the same": lambda out: (out, out),
    "a part of it": lambda out: (out, out[1]),
    "the whole of it": lambda out: (out[1], out),
    "another part": lambda out: (out[1], out[0]),
    "transposed": lambda out: (out, out.t()),
}


def cases():
    """Every holder with every view, kept in one of the ways; the other way is for `make sweep`."""
    for i, holder in enumerate(HOLDERS):
        for j, shows in enumerate(SHOWS):
            for k, kept in enumerate(("returned", "left")):
                yield pytest.param(holder, shows, kept, marks=[pytest.mark.sweep] * ((i + j + k) % 2))


@pytest.mark.parametrize("holder, shows, kept", list(cases()))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_memory_is_shared_with_hidden_tensors(holder: str, shows: str, kept: str, tmp_path) -> None:
    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(4, 3)
        compiled = fl.compile(model, backend)
        box: dict = {}

        @fl.trace
        def step(x):
            out = compiled(x).detach()
            seen, unseen = SHOWS[shows](out)
            box["held"] = HOLDERS[holder](unseen)
            if kept == "left":
                box["seen"] = seen
            return (seen if kept == "returned" else out.sum()), out.sum()

        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            result, _ = step(torch.randn(6, 4, generator=generator))
            seen = result if kept == "returned" else box["seen"]
            held = next(box["held"])
            yield held.clone()
            seen.add_(1)
            yield held.clone()
            held.mul_(2)
            yield seen.clone()

    expected = list(run(fl.backend("CPU")))
    actual = list(run(fl.backend("XLA", artifact_dir=tmp_path)))
    # XLA sums four products in another order.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
