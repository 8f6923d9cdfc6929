"""Loss scaling matches PyTorch's in eager mode, and traced steps match eager mode."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import firstloss as fl

from .. import compiled_steps

pytestmark = pytest.mark.filterwarnings(
    "error::firstloss.errors.GraphChangeWarning", "error::firstloss.errors.EagerStepWarning"
)


def weight_with(gradient):
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor(gradient)
    return p


@settings(max_examples=40)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 5))
def test_scale_follows_pytorchs(overflows, interval):
    mine = fl.amp.GradScaler("dynamic", init_scale=2.0**10, steps_per_increase=interval, max_loss_scale=2.0**40)
    other = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=interval)
    for overflow in overflows:
        scales = []
        for scaler in (mine, other):
            p = weight_with([float("inf") if overflow else 1.0, 1.0])
            optimizer = torch.optim.SGD([p], lr=1.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            scales.append((scaler.get_scale(), p.detach().tolist()))
        assert scales[0][0] == max(scales[1][0], 2.0**-14)
        assert scales[0][1] == scales[1][1] or other.get_scale() < 2.0**-14
    assert mine.get_num_skipped_steps() == sum(overflows)


def test_tolerance_and_limits_are_respected():
    scaler = fl.amp.GradScaler("dynamic", init_scale=8.0, min_loss_scale=4.0, overflow_tolerance=0.5)
    scales = []
    for overflow in (False, True, True, True, True):
        optimizer = torch.optim.SGD([weight_with([float("nan") if overflow else 1.0, 1.0])], lr=1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    # 0 of 1, 1 of 2, 2 of 3 gradients overflow: halved; then 1 of 1: halved, but not below the limit
    assert scales == [8.0, 8.0, 4.0, 4.0, 4.0]


OVERFLOWS = [1.0, float("inf"), 1.0, 1.0, float("nan"), 1.0, 1.0, 1.0]


def train(backend, make, scaler_of, norm=None, value=None, factors=OVERFLOWS):
    """Weights, losses and scales of a few steps, in some of which the loss overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x, y = torch.randn(5, 4), torch.randn(5, 2)
    compiled, scaler = fl.compile(model, backend), scaler_of()
    optimizer = make(model.parameters())

    @fl.trace
    def step(x, y, factor):
        loss = F.mse_loss(compiled(x), y) * factor
        fl.amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=norm, max_gradient_value=value)
        return loss

    history = []
    for factor in factors:
        step(x, y, torch.tensor(factor))
        weights = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
        state = [v.clone() for p in model.parameters() for v in optimizer.state[p].values() if v is not None]
        history.append((weights, state, scaler.get_scale(), scaler.get_num_skipped_steps()))
    return history, step


def dynamic():
    return fl.amp.GradScaler("dynamic", init_scale=1024.0, steps_per_increase=2)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Lion": lambda p: fl.optim.Lion(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_traced_step_skips_an_update_that_overflows(name, backend):
    actual, step = train(backend, OPTIMIZERS[name], dynamic)
    eager, _ = train(fl.backend("CPU"), OPTIMIZERS[name], dynamic)
    assert compiled_steps.kinds(step) == 1
    for n, ((weights, state, scale, skipped), (expected, _, *rest)) in enumerate(zip(actual, eager, strict=True)):
        assert [scale, skipped] == rest
        # A traced Adam computes 1 - beta^t in float32; tests/optim checks its state and weights.
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
        if n and not torch.tensor(OVERFLOWS[n]).isfinite():  # skipped: bit-identical to the step before
            assert torch.equal(weights, actual[n - 1][0])
            assert all(torch.equal(a, b) for a, b in zip(state, actual[n - 1][1], strict=True))
    assert actual[-1][3] == 2


@pytest.mark.parametrize("limits", [{"norm": 0.01}, {"value": 0.003}, {}])
@pytest.mark.parametrize("scale", [None, 64.0])
def test_gradients_are_clipped_with_a_fixed_scale(limits, scale, backend):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.5)

    actual, _ = train(backend, sgd, lambda: fl.amp.GradScaler(scale), **limits, factors=[1.0] * 3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x, y = torch.randn(5, 4), torch.randn(5, 2)
    for weights, *_ in actual:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        if "norm" in limits:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        elif limits:
            nn.utils.clip_grad_value_(model.parameters(), 0.003)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.5 * p.grad)
        expected = torch.cat([p.detach().flatten() for p in model.parameters()])
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)  # float32 rounding


def test_float16_trains_with_scaling_in_a_traced_step(backend):
    """The products overflow at first, and the scale is reduced until they do not."""
    fl.amp.set_half_dtype("float16")
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = fl.amp.GradScaler("dynamic", init_scale=2.0**20, max_loss_scale=2.0**24)

    @fl.trace
    def step(x):
        with fl.amp.autocast():
            loss = compiled(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    x = torch.randn(16, 8)
    losses = [float(step(x)) for _ in range(10)]
    assert 0 < scaler.get_num_skipped_steps() < 8
    assert scaler.get_scale() == 2.0 ** (20 - scaler.get_num_skipped_steps())
    assert losses[0] == losses[1] and losses[-1] < losses[0]


def test_a_loaded_state_continues_the_scale():
    a, b = dynamic(), dynamic()
    for overflow in (1.0, float("inf"), 1.0):
        a.step(torch.optim.SGD([weight_with([overflow, 1.0])], lr=1.0))
        a.update()
    b.load_state_dict(a.state_dict())
    assert (b.get_scale(), b.get_num_skipped_steps()) == (512.0, 1)
    with pytest.raises(fl.errors.PrecisionError, match="num_skipped_steps"):
        b.load_state_dict({"loss_scale": 1.0})


def test_a_first_step_that_cannot_be_skipped_in_a_compiled_step_matches_eager(backend):
    def damped(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)

    with pytest.warns(fl.errors.EagerStepWarning, match="first step cannot be skipped"):
        actual, _ = train(backend, damped, dynamic)
    expected, _ = train(fl.backend("CPU"), damped, dynamic)
    assert len(actual) == len(expected)
    for ours, eager in zip(actual, expected, strict=True):
        assert ours[2:] == eager[2:]  # it is compiled once the state is there: float32, summed in another order
        torch.testing.assert_close(ours[:2], eager[:2], rtol=1e-4, atol=1e-5)


def test_invalid_call_orders_and_limits_are_refused():
    scaler, optimizer = dynamic(), torch.optim.SGD([weight_with([1.0, 1.0])], lr=1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(fl.errors.PrecisionError, match="unscale_"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(fl.errors.PrecisionError, match="step"):
        scaler.step(optimizer)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(fl.errors.PrecisionError, match="both"):
        fl.amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=1.0, max_gradient_value=1.0)
    with pytest.raises(fl.errors.PrecisionError, match="positive"):
        fl.amp.optimizer_step(loss, optimizer, scaler, max_gradient_norm=0.0)
    for options in ({"loss_scale": "static"}, {"loss_scale": -1.0}, {"loss_scale": "dynamic", "min_loss_scale": 1e9}):
        with pytest.raises(fl.errors.PrecisionError):
            fl.amp.GradScaler(**options)


def test_pytorchs_scaler_is_not_compiled_and_the_warning_names_the_users_line(backend):
    compiled = fl.compile(nn.Linear(2, 2), backend)
    scaler = torch.amp.GradScaler("cpu")

    @fl.trace
    def step(x):
        scaler.scale(compiled(x).sum()).backward()

    with pytest.warns(fl.errors.EagerStepWarning, match=f"{__file__}:.*firstloss.amp.GradScaler"):
        step(torch.ones(1, 2))
    assert float(scaler.scale(torch.ones(()))) == 65536.0
