"""Steps that call functions with `functools.lru_cache`: cached values are guarded like other reads."""

import functools

import pytest
import torch
from torch import nn

import firstloss as fl

pytestmark = pytest.mark.usefixtures("by_kernels")


class Settings:
    def __init__(self, scale):
        self.scale = scale


KINDS = {
    "number": (lambda scale: scale, lambda kept: kept),
    "dict": (lambda scale: {"scale": scale}, lambda kept: kept["scale"]),
    "object": (Settings, lambda kept: kept.scale),
}


def cleared(get, scale):
    scale[0] = 5.0
    get.cache_clear()


def cleared_and_called(get, scale):
    scale[0] = 5.0
    get.cache_clear()
    get()


def called_otherwise(get, scale):
    scale[0] = 5.0
    get("b")


def result_edited(get, scale):
    kept = get()
    if isinstance(kept, dict):
        kept["scale"] = 7.0
    elif isinstance(kept, Settings):
        kept.scale = 7.0


def program(backend, cache, kind, event, when, before):
    torch.manual_seed(0)
    model = fl.compile(nn.Linear(4, 3), backend)
    scale = [2.0]
    make, read = KINDS[kind]

    @cache
    def get(name="a"):
        return make(scale[0])

    if before:
        get()

    @fl.trace
    def step(x):
        return model(x).square().mean() * read(get())

    for i in range(5):
        if i == when:
            event(get, scale)
        yield step(torch.randn(6, 4)).detach().clone()


@pytest.mark.parametrize("cache", [functools.cache, functools.lru_cache, functools.lru_cache(1)], ids=["", "128", "1"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("event", [cleared, cleared_and_called, called_otherwise, result_edited])
@pytest.mark.parametrize(("when", "before"), [(1, False), (3, True)])
def test_cached_values_are_guarded(cache, kind, event, when, before, backend):
    expected = list(program(fl.backend("CPU"), cache, kind, event, when, before))
    actual = list(program(fl.backend(backend), cache, kind, event, when, before))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)  # XLA sums in another order


def test_entries_cached_by_other_code_do_not_retrace(backend, traced):
    model = fl.compile(nn.Linear(4, 3), backend)

    @functools.lru_cache
    def get(name):
        return 2.0

    @fl.trace
    def step(x):
        return model(x).square().mean() * get("a")

    for i in range(6):
        get(i)
        step(torch.randn(6, 4))
    assert len(traced) == 2  # and one for the verification
