"""`trunc_normal_` stays deferred: bit-identical, and the stream continues as in eager PyTorch."""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.engine import rejection
from tests.capture.eager_comparison import assert_same_as_eager, deferred, eager

BOUNDS = {
    "nothing can fall outside": {"std": 0.02},
    "two standard deviations": {"std": 0.02, "a": -0.04, "b": 0.04},
    "one side": {"mean": 1.0, "std": 2.0, "a": 0.0, "b": 30.0},
    "a narrow slice": {"std": 1.0, "a": -0.5, "b": 0.6},
    "the tail, by uniforms": {"a": 1.0, "b": 2.0},
}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
@pytest.mark.parametrize("shape", [(300, 1000), (17,), (16,), (5,), (1000,), (0, 4), (64, 1024)], ids=str)
def test_trunc_normal_matches_eager(bounds, shape):
    def build():
        weight = torch.empty(shape)
        before = torch.randn(3)  # a normal is cached when the operation begins
        nn.init.trunc_normal_(weight, **bounds)
        return [before, weight, torch.randn(3), torch.rand(20)]

    assert_same_as_eager(build)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_match_eager(dtype):
    def build():
        weight = nn.Parameter(torch.empty(200, 700, dtype=dtype))
        nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)
        return [weight, torch.rand(4)]

    assert_same_as_eager(build)


def test_sequences_edits_and_layouts_match_eager():
    def build():
        layers = nn.ModuleList(nn.Linear(130, 70) for _ in range(5))
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=1.0)
            nn.init.trunc_normal_(layer.bias, std=0.5)
        conv = nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last)
        nn.init.trunc_normal_(conv.weight, std=1.0)
        with torch.no_grad():
            layers[1].weight.mul_(0.5)
            layers[2].weight[3] = 0
        copied = layers[3].weight.detach().clone()
        nn.init.trunc_normal_(layers[0].weight[1:3], std=1.0)
        return [layers, conv, copied]

    assert_same_as_eager(build)


def test_its_own_generator_matches_eager():
    def build():
        generator = torch.Generator().manual_seed(3)
        weight = torch.empty(50, 50)
        nn.init.trunc_normal_(weight, generator=generator)
        return [weight, torch.rand(4, generator=generator), torch.rand(4)]

    assert_same_as_eager(build)


def test_reseeding_avoids_the_draws(monkeypatch):
    monkeypatch.setattr(rejection.Rejection, "_search", lambda self, pieces: pytest.fail("the candidates were drawn"))

    def build():
        weight = torch.empty(1 << 20, 1 << 20)  # 4 TB
        nn.init.trunc_normal_(weight)
        torch.manual_seed(1)
        return weight

    assert fl.is_deferred(fl.deferred_init(build))


def test_draws_after_the_constructor_match_eager():
    def build():
        return nn.Linear(100, 100)

    expected, _ = eager(build)
    nn.init.trunc_normal_(expected.weight, std=1.0)
    state = torch.get_rng_state()
    actual, _ = deferred(build)
    nn.init.trunc_normal_(actual.weight, std=1.0)
    assert fl.is_deferred(actual.weight) and torch.equal(torch.get_rng_state(), state)
    fl.materialize_module(actual)
    assert torch.equal(actual.weight, expected.weight) and torch.equal(actual.bias, expected.bias)


def test_results_do_not_depend_on_the_cache(monkeypatch):
    monkeypatch.setattr(rejection, "_MAX_CACHED_BYTES", 0)

    def build():
        weight = torch.empty(300, 1000)
        nn.init.trunc_normal_(weight, std=1.0)
        return [weight, torch.rand(2)]

    assert_same_as_eager(build)


def test_real_tensors_are_left_to_torch():
    torch.manual_seed(0)
    weight = nn.init.trunc_normal_(torch.empty(40, 40), std=1.0)
    assert weight.abs().max() <= 2 and not fl.is_deferred(weight)


def test_the_warning_matches_torchs():
    with pytest.warns(UserWarning, match="mean is more than 2 std"), fl.deferred():
        nn.init.trunc_normal_(torch.empty(10), mean=9.0)
