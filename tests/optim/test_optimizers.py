"""Each optimizer, traced and eager, against eager PyTorch or, if PyTorch lacks it, a second implementation.

In float64, so that rounding differences stay far below any mistake in a formula: they agree to 1e-9, the remainder
being a division by a small square root.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.capture import shapes
from tests.small_training import on_both, training_step

from ..compiled_steps import compilations

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings(
        "error::firstloss.errors.GraphChangeWarning", "error::firstloss.errors.EagerStepWarning"
    ),
]

STEPS = 5


def problem():
    """A model, and batches for it."""
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        torch.randn(STEPS, 6, 4),
        torch.randn(STEPS, 6, 2),
    )


def train_eagerly(make, prepare=lambda optimizer: None):
    model, xs, ys = problem()
    optimizer = make(list(model.parameters()))
    prepare(optimizer)
    for x, y in zip(xs, ys, strict=True):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_traced(make, backend, prepare=lambda optimizer: None, compiles=1):
    model, xs, ys = problem()
    compiled = fl.compile(model, backend)
    optimizer = make(list(model.parameters()))
    prepare(optimizer)

    @fl.trace
    def step(x, y):
        loss = F.mse_loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss

    for x, y in zip(xs, ys, strict=True):
        step(x, y)
    assert compilations(step) == compiles
    return [p.detach().clone() for p in model.parameters()]


def assert_same(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        # float64 sums in another order. Measured: 5e-15 of an element, 6e-16 of the largest.
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


def matrices(parameters):
    return [p for p in parameters if p.ndim == 2]


STOCK = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "AdamW, fused": {"lr": 0.01, "fused": True},
    "Adam, all options": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True},
    "SGD": {"lr": 0.1},
    "SGD, momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "SGD, dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    "Adafactor": {"lr": 0.1, "weight_decay": 0.1},
    "Adafactor, up": {"lr": 0.1, "maximize": True, "eps": (1e-3, 0.5), "d": 1.5, "beta2_decay": -0.5},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    "Adamax": {"lr": 0.01, "weight_decay": 0.1},
    "NAdam": {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.01, "weight_decay": 0.1},
    "Rprop": {"lr": 0.01},
    "ASGD": {"lr": 0.01, "t0": 2, "weight_decay": 0.1},
    "Adadelta": {"lr": 1.0, "weight_decay": 0.1},
    "Muon": {"lr": 0.01, "weight_decay": 0.1},
}


def maker(case, library):
    name = case.split(",")[0]
    pick = matrices if name == "Muon" else list
    return lambda parameters: getattr(library, name)(pick(parameters), **STOCK[case])


@pytest.mark.parametrize("case", [case for case in STOCK if case != "Muon"])  # computes in bfloat16: see below
def test_traced_stock_optimizers_match_eager(case, backend):
    # SGD's momentum starts as the first gradient, without dampening: the first step is another computation, and is not
    # compiled.
    actual = train_traced(maker(case, torch.optim), backend, compiles=1)
    assert_same(actual, train_eagerly(maker(case, torch.optim)))


def test_traced_muon_matches_eager(backend):
    """Muon orthogonalizes in bfloat16: 2^-8 of an update, whose size is lr, if a product rounds differently."""
    actual, expected = train_traced(maker("Muon", torch.optim), backend), train_eagerly(maker("Muon", torch.optim))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=STEPS * 0.01 * 2**-6)


@pytest.mark.parametrize("case", STOCK)
def test_preinitialize_creates_the_state_of_the_first_step(case):
    """Bit-identical: PyTorch's own code computes the step."""
    states = []

    def prepare(optimizer):
        optimizer.preinitialize()
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(p.grad is None for p in weights)
        states.append({k: v for p in weights for k, v in optimizer.state[p].items()})
        assert not any(fl.is_deferred(v) for v in states[0].values() if isinstance(v, torch.Tensor))

    actual = train_eagerly(maker(case, fl.optim), prepare)
    expected = train_eagerly(maker(case, torch.optim))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert bool(states[0]) == (case not in ("SGD", "SGD, dampening"))


def test_preinitialize_can_be_called_before_a_traced_step(backend):
    class Heavy(fl.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        def preinitialize(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["velocity"] = torch.ones_like(p)

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p]["velocity"].mul_(0.5).add_(p.grad)
                p.sub_(self.state[p]["velocity"] * self.param_groups[0]["lr"])

    actual = train_traced(Heavy, backend)
    assert_same(actual, train_eagerly(Heavy, Heavy.preinitialize))


# -- the two that PyTorch lacks --


class PlainLion:
    """Lion, weight by weight."""

    def __init__(self, parameters, lr, betas, weight_decay):
        self.parameters, self.lr, self.betas, self.decay = parameters, lr, betas, weight_decay
        self.m = [0.0 for _ in parameters]

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.parameters):
            b1, b2 = self.betas
            direction = torch.sign(b1 * self.m[i] + (1 - b1) * p.grad)
            p.copy_(p - self.lr * (direction + self.decay * p))
            self.m[i] = b2 * self.m[i] + (1 - b2) * p.grad


class PlainLamb:
    """LAMB, weight by weight."""

    def __init__(self, parameters, lr, betas, weight_decay, eps=1e-6, adam=False):
        self.parameters, self.lr, self.betas, self.decay = parameters, lr, betas, weight_decay
        self.eps, self.adam, self.t = eps, adam, 0
        self.m, self.v = [0.0 for _ in parameters], [0.0 for _ in parameters]

    @torch.no_grad()
    def step(self):
        self.t += 1
        for i, p in enumerate(self.parameters):
            b1, b2 = self.betas
            self.m[i] = b1 * self.m[i] + (1 - b1) * p.grad
            self.v[i] = b2 * self.v[i] + (1 - b2) * p.grad**2
            r = (self.m[i] / (1 - b1**self.t)) / ((self.v[i] / (1 - b2**self.t)) ** 0.5 + self.eps)
            u = r + self.decay * p
            ratio = 1.0 if self.adam or not p.norm() or not u.norm() else p.norm() / u.norm()
            p.copy_(p - self.lr * ratio * u)


OTHERS = {
    "Lion": (fl.optim.Lion, PlainLion, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "Lamb": (fl.optim.Lamb, PlainLamb, {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.1}),
    "Lamb without the ratio": (
        fl.optim.Lamb,
        PlainLamb,
        {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, "adam": True},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_lion_and_lamb_follow_their_formulas(name, backend):
    actual, eager, options = OTHERS[name]
    expected = train_eagerly(lambda parameters: eager(parameters, **options))
    assert_same(train_eagerly(lambda parameters: actual(parameters, **options)), expected)
    assert_same(train_traced(lambda parameters: actual(parameters, **options), backend), expected)


def test_lambs_ratio_is_one_for_a_weight_of_zeros():
    p = nn.Parameter(torch.zeros(3))
    p.grad = torch.ones(3)
    fl.optim.Lamb([p], lr=0.5).step()
    torch.testing.assert_close(p.detach(), torch.full((3,), -0.5), rtol=1e-5, atol=0)  # Adam's first step is lr


@pytest.mark.parametrize("make", [fl.optim.Lion, fl.optim.Lamb])
def test_invalid_numbers_are_refused(make):
    with pytest.raises(fl.errors.OptimizerError, match="lr=-1"):
        make([nn.Parameter(torch.zeros(3))], lr=-1)


# -- optimizers that cannot be traced --


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_that_cannot_be_traced_are_an_error(name, backend):
    model, xs, ys = problem()
    compiled = fl.compile(model, backend)
    optimizer = getattr(torch.optim, name)(model.parameters())

    @fl.trace(reads="refuse")
    def step(x):
        loss = compiled(x).sum()
        loss.backward()
        optimizer.step(lambda: loss)
        return loss

    with pytest.raises(fl.errors.TraceError, match=f"{name} cannot be traced"):
        step(xs[0])


class Counting(torch.optim.Optimizer):
    """Counts in Python, in its parameter groups."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                group["count"] = group.get("count", 0) + 1
                p.sub_(group["lr"] / group["count"] * p.grad)


def test_a_count_in_a_group_is_an_input(backend):
    def train(on):
        model, xs, _ = problem()
        compiled = fl.compile(model, on)
        optimizer = Counting(model.parameters())

        @fl.trace
        def step(x):
            compiled(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for x in xs:
            step(x)
        return step, optimizer.param_groups[0]["count"], [p.detach().numpy() for p in model.parameters()]

    step, count, weights = train(backend)
    _, expected_count, expected = train(fl.backend("CPU"))
    assert count == expected_count and compilations(step) <= 3  # the first has no count yet
    for a, b in zip(weights, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # float32, other kernels


# -- optimizers and schedules made anywhere --


@pytest.mark.parametrize("where", ["inside", "before compile", "after compile"])
@pytest.mark.parametrize("preinitialize", [True, False])
def test_optimizers_and_schedules_may_be_made_on_the_device_or_off_it(where, preinitialize, backend):
    created = []

    def make(parameters):
        optimizer = fl.optim.Adam(parameters, lr=1.0)
        if preinitialize:
            optimizer.preinitialize()
        created[:] = [optimizer, fl.optim.lr_scheduler.LinearLR(optimizer, 0.1, 0.01, 3)]

    torch.manual_seed(0)
    with backend.device:
        model = nn.Linear(4, 3)
        if where == "inside":
            make(model.parameters())
    if where == "before compile":
        make(model.parameters())
    compiled = fl.compile(model, backend)
    if where == "after compile":
        make(model.parameters())
    optimizer, schedule = created

    @fl.trace
    def step(x):
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    torch.manual_seed(0)
    reference = nn.Linear(4, 3)
    make(reference.parameters())
    for _ in range(4):
        step(torch.ones(2, 4))
        reference(torch.ones(2, 4)).square().mean().backward()
        created[0].step()
        created[0].zero_grad()
        created[1].step()
    assert_same([p.detach().clone() for p in model.parameters()], [p.detach() for p in reference.parameters()])
    assert type(schedule.last_epoch).__name__ == "DeferredTensor"  # is on the backend: nobody waits for its value


class Rebinding(torch.optim.Optimizer):
    """Rebinds its state, and the weights' data, to new tensors at each step."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["before"] = torch.zeros_like(p), torch.zeros_like(p)
                state["before"] = state["mean"]
                state["mean"] = 0.9 * state["mean"] + p.grad
                p.data = p.data - group["lr"] * (state["mean"] + 0.5 * state["before"])


def sgd_with_momentum(parameters):
    return torch.optim.SGD(parameters, 0.1, 0.9)


def _cleared(optimizer):
    optimizer.state.clear()


def _replaced(optimizer):
    for p, entries in optimizer.state.items():
        entries["momentum_buffer"] = torch.ones_like(p)


@pytest.mark.parametrize(
    "make, change", [(Rebinding, None), (sgd_with_momentum, _cleared), (sgd_with_momentum, _replaced)]
)
def test_state_may_be_rebound(make, change, tmp_path):
    """By the optimizer itself, or by the caller between steps."""

    def losses(backend):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = make(model.parameters())
        step = training_step(fl.compile(model, backend), optimizer)
        out = []
        for n in range(6):
            out.append(step(torch.ones(3, 4)).item())
            if n == 2 and change is not None:
                change(optimizer)
        return out

    eager, traced = on_both(losses, tmp_path)
    torch.testing.assert_close(traced, eager, rtol=3e-14, atol=0)  # as above: 2e-15


def test_an_optimizer_in_a_capture_finds_dtypes_by_real_tensors(backend):
    """The dtypes of results are found by running operations on small tensors, which the capture around must not
    defer: a kernel would run on no memory."""
    shapes._dtypes_cache.clear()
    with backend.device:
        model = nn.Linear(4, 3)
        fl.optim.Adam(model.parameters(), lr=1.0).preinitialize()
    assert fl.is_deferred(model)
