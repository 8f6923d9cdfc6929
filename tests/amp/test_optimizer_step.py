"""`optimizer_step`: several optimizers, gradient accumulation, clipping with the scaler, autocast without regions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
import firstloss.cstorch as cstorch
from firstloss.errors import PrecisionError


@pytest.fixture(autouse=True)
def precision_as_before():
    before = fl.amp.get_half_dtype(), fl.amp.mixed_precision()
    yield
    fl.amp.set_half_dtype(before[0])
    fl.amp.enable_mixed_precision(before[1])


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(4, 5, 4), torch.randn(4, 5, 2)


def train(backend, scaler_of, step_of, steps=4, factors=(1.0, 1.0, float("inf"), 1.0)):
    net, xs, ys = model()
    called = fl.compile(net, backend)
    optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.5), torch.optim.SGD(net[2].parameters(), lr=0.1)]
    scaler = scaler_of()

    @fl.trace
    def step(x, y, factor):
        step_of(F.mse_loss(called(x), y) * factor, optimizers, scaler)

    weights = []
    for x, y, factor in zip(xs[:steps], ys, factors, strict=False):
        step(x, y, torch.tensor(factor))
        weights.append(torch.cat([p.detach().clone().flatten() for p in net.parameters()]))
    return weights


def by_hand(norm=None, earlier=False):
    """The same training in plain PyTorch."""
    net, xs, ys = model()
    weights = []
    for x, y, factor in zip(xs, ys, (1.0, 1.0, float("inf"), 1.0), strict=True):
        net.zero_grad()
        (F.mse_loss(net(x), y) * factor * (2 if earlier else 1)).backward()
        if factor == 1.0:
            if norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), norm)
            with torch.no_grad():
                for layer, lr in ((net[0], 0.5), (net[2], 0.1)):
                    for p in layer.parameters():
                        p.sub_(lr * p.grad)
        weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    return weights


def twice(loss, optimizers, scaler):
    scaler.scale(loss).backward(retain_graph=True)
    fl.amp.optimizer_step(loss, optimizers, scaler)


def one_by_one(loss, optimizers, scaler):
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()


def dynamic(norm=None):
    return fl.amp.GradScaler("dynamic", init_scale=16.0, max_gradient_norm=norm)


CASES = {
    "a list": (dynamic, fl.amp.optimizer_step, {}),
    "clipped together": (
        dynamic,
        lambda loss, optimizers, scaler: fl.amp.optimizer_step(loss, optimizers, scaler, max_gradient_norm=0.1),
        {"norm": 0.1},
    ),
    "gradients of before": (dynamic, twice, {"earlier": True}),
    "clipped by the scaler": (lambda: dynamic(0.1), fl.amp.optimizer_step, {"norm": 0.1}),
    "clipped by the scaler, one by one": (lambda: dynamic(0.1), one_by_one, {"norm": 0.1}),
}


@pytest.mark.parametrize("name", ["XLA", "CPU"])
@pytest.mark.parametrize("case", CASES)
def test_steps_match_a_loop_by_hand(case, name, tmp_path):
    scaler, step, options = CASES[case]
    actual = train(fl.backend(name, artifact_dir=tmp_path), scaler, step)
    for a, b in zip(actual, by_hand(**options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # float32, summed in another order


def test_all_optimizers_step_or_none(backend):
    """An optimizer whose own gradients are finite is skipped too if another's are not."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in weights]
    loss = weights[0].sum() + (weights[1] * float("inf")).sum()
    fl.amp.optimizer_step(loss, optimizers, dynamic())
    assert all(torch.equal(weight.detach(), torch.ones(2)) for weight in weights)


WRONG = {
    "no optimizer": lambda: fl.amp.optimizer_step(torch.ones((), requires_grad=True), []),
    "a function": lambda: fl.amp.optimizer_step(torch.ones((), requires_grad=True), print),
    "a norm without a dynamic scale": lambda: fl.amp.GradScaler(2.0, max_gradient_norm=1.0),
    "a negative norm": lambda: fl.amp.GradScaler("dynamic", max_gradient_norm=-1.0),
    "a new scale of a fixed one": lambda: fl.amp.GradScaler(2.0).update(4.0),
    "neither on nor off": lambda: fl.amp.enable_mixed_precision(1),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_arguments_are_refused(case):
    with pytest.raises(PrecisionError):
        WRONG[case]()


def test_several_optimizers_must_be_unscaled_before_the_first_step():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=0.1) for weight in weights)
    scaler = dynamic(0.1)
    scaler.scale(weights[0].sum() + weights[1].sum()).backward()
    scaler.step(first)
    with pytest.raises(PrecisionError, match="call unscale_ for all"):
        scaler.step(second)


def test_update_sets_a_new_scale():
    scaler = dynamic()
    scaler.update(8.0)
    assert scaler.get_scale() == 8


def test_an_autocast_region_has_its_own_dtype():
    x = torch.ones(2, 2)
    fl.amp.set_half_dtype("float16")
    with fl.amp.autocast("bfloat16"):
        assert (x @ x).dtype == torch.bfloat16
    with fl.amp.autocast(torch.float16):
        assert (x @ x).dtype == torch.float16
    with fl.amp.autocast():
        assert (x @ x).dtype == torch.float16


def test_enabled_mixed_precision_needs_no_regions(backend):
    """While mixed precision is enabled, compiled models compute in half precision; disabling it is another step."""
    net = nn.Linear(3, 3)
    called = fl.compile(net, backend)
    seen = []
    step = fl.trace(lambda x: seen.append(called(x).dtype) or called(x))
    x = torch.ones(2, 3)
    fl.amp.set_half_dtype("bfloat16")
    for on in (False, True, False):
        assert fl.amp.enable_mixed_precision(on) == fl.amp.mixed_precision() == on
        expected = torch.bfloat16 if on else torch.float32
        assert step(x).dtype == expected
        assert fl.amp.get_floating_point_dtype() == expected
        assert fl.amp.get_floating_point_dtype_str() == str(expected).removeprefix("torch.")


def test_cstorch_names_are_available():
    """Choosing a half dtype enables mixed precision."""
    fl.amp.enable_mixed_precision(False)
    assert cstorch.amp.set_half_dtype("cbfloat16") == torch.float16
    assert cstorch.amp.mixed_precision() and cstorch.amp.get_half_dtype() == torch.float16
    assert cstorch.amp.get_half_dtype_str() == cstorch.amp.get_floating_point_dtype_str() == "cbfloat16"
    assert cstorch.amp.is_cbfloat16_tensor(torch.ones(1, dtype=torch.float16))
    assert not cstorch.amp.is_cbfloat16_tensor(torch.ones(1))
    with pytest.raises(TypeError, match="grad_scaler"):
        cstorch.amp.optimizer_step(torch.ones(()), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
