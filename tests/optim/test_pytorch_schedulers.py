"""PyTorch's schedulers, stepped between traced steps, and numbers set by hand: compiled once or twice.

In float64, against the same loop in eager PyTorch, to 1e-9: another order of rounding.
"""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from tests.compiled_steps import check_runs_eagerly, compilations

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings(
        "error::firstloss.errors.GraphChangeWarning", "error::firstloss.errors.EagerStepWarning"
    ),
]

schedulers = torch.optim.lr_scheduler
STEPS = 8


def train(backend, make, change):
    """The losses and weights of `STEPS` steps; `change(optimizer)` returns `change(step number, loss)`, called between
    them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    xs, ys = torch.randn(STEPS, 6, 4), torch.randn(STEPS, 6, 3)
    compiled = fl.compile(model, backend)
    optimizer = make(model.parameters())
    between = change(optimizer)

    @fl.trace
    def step(x, y):
        loss = F.mse_loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for n in range(STEPS):
        between(n, float(step(xs[n], ys[n]).detach()))
    return [p.detach().clone() for p in model.parameters()], step


def check(backend, make, change, compiles=1):
    actual, step = train(backend, make, change)
    assert compilations(step) == compiles
    for a, b in zip(actual, train(fl.backend("CPU"), make, change)[0], strict=True):
        # float64 sums in another order. Measured: 2e-14 of an element, 1e-15 of the largest.
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def stepping(make):
    """A scheduler in the form that `train` takes."""
    return lambda optimizer: (lambda schedule: lambda n, loss: schedule.step())(make(optimizer))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


SCHEDULERS = {
    "StepLR": (sgd, lambda o: schedulers.StepLR(o, 3, 0.5)),
    "OneCycleLR": (sgd, lambda o: schedulers.OneCycleLR(o, 0.1, 10)),
    "OneCycleLR with betas": (adamw, lambda o: schedulers.OneCycleLR(o, 0.1, 10)),
    "CyclicLR": (sgd, lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3)),
    "CyclicLR with betas": (adamw, lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3)),
    "SequentialLR": (
        sgd,
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)], [3]
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_match_eager(name, backend):
    make, scheduler = SCHEDULERS[name]
    check(backend, make, stepping(scheduler))


def test_reduce_on_plateau_matches_eager(backend):
    def change(optimizer):
        schedule = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return lambda n, loss: schedule.step(loss)

    check(backend, sgd, change)


NUMBERS = [(sgd, "weight_decay"), (sgd, "momentum"), (adamw, "weight_decay"), (adamw, "eps"), (adamw, "betas")]


@pytest.mark.parametrize("make, key", NUMBERS)
def test_numbers_changed_by_hand_are_inputs_from_the_second_compile_on(make, key, backend):
    def change(optimizer):
        def between(n, loss):
            number = 0.5 + 0.05 * n
            optimizer.param_groups[0][key] = (number, 0.9 + 0.01 * n) if key == "betas" else number

        return between

    check(backend, make, change, compiles=2)


def test_numbers_of_a_custom_optimizer_are_retraced(backend):
    """What the optimizer's Python does with them is unknown."""

    class Odd(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1, "power": 1.0})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * (p.grad.sign() if group["power"] > 1.5 else p.grad))

    def change(optimizer):
        def between(n, loss):
            optimizer.param_groups[0]["power"] = 1.0 if n < 4 else 2.0

        return between

    check(backend, Odd, change, compiles=2)


def test_a_rate_in_a_tensor_is_read_at_each_step(backend):
    def change(optimizer):
        def between(n, loss):
            if n < 3:
                optimizer.param_groups[0]["lr"].mul_(0.5)

        return between

    check(backend, lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), change)


INSIDE = {
    "step": lambda o: schedulers.StepLR(o, 2, 0.5),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.8),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda k: 1 / (1 + 0.3 * k)),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda k: 0.9),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 6),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.5, 2), schedulers.ExponentialLR(o, 0.8)], [3]
    ),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.ExponentialLR(o, 0.9), schedulers.StepLR(o, 3, 0.5)]),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, factor=0.5),
    "one cycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=30),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
}


def inside(name, rate, backend, steps=8):
    """Training whose step calls its scheduler; returns losses, rates and the scheduler's state."""
    fl.backend(backend)
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    schedule = INSIDE[name](optimizer)

    @fl.trace
    def step(x):
        loss = compiled(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(*([loss.detach()] if name == "plateau" else []))
        return loss

    results = []
    for k in range(steps):
        loss = step(torch.full((3, 2), 1.0 + k))
        results.append((loss.item(), float(optimizer.param_groups[0]["lr"]), getattr(schedule, "last_epoch", 0)))
    return results, schedule


@pytest.mark.parametrize("name", INSIDE)
def test_a_scheduler_can_step_inside_the_traced_step(name, backend, traced):
    expected, _ = inside(name, 0.1, fl.backend("CPU"))
    actual, schedule = inside(name, 0.1, backend)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)  # float64 sums in another order: 9e-15
    assert len(traced) <= 3  # a schedule's numbers are inputs
    if name not in ("plateau", "chained"):
        before = schedule.last_epoch
        schedule.step()
        assert schedule.last_epoch == before + 1  # outside a step it is PyTorch's own


@pytest.mark.parametrize("name", ["step", "chained"])
def test_a_scheduler_inside_the_step_can_drive_a_tensor_rate(name, backend):
    expected, _ = inside(name, torch.tensor(0.1), fl.backend("CPU"))
    actual, _ = inside(name, torch.tensor(0.1), backend)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)  # as above


def too_late(optimizer, schedule):
    return optimizer.param_groups[0]["lr"]


def too_late_as_well(optimizer, schedule):
    return schedule.get_last_lr()


def computed_with(optimizer, schedule):
    return torch.ones(2) * optimizer.param_groups[0]["lr"]


def before_its_optimizer(optimizer, schedule):
    optimizer.step()


kept = {}
FORMS = {
    "itself": lambda rate: rate,
    "list": lambda rate: [[rate]],
    "tuple": lambda rate: (rate, 1),
    "dict": lambda rate: {"rate": rate},
    "set": lambda rate: {rate},
    "object": lambda rate: types.SimpleNamespace(rate=rate),
    "function": lambda rate: lambda: rate,
}


def kept_as(form):
    """As `pytorch_warmup` does; undoing the trace must not look into what is kept."""

    def keep(optimizer, schedule):
        kept["rate"] = FORMS[form](optimizer.param_groups[0]["lr"])
        kept["calls"] = kept.get("calls", 0) + 1
        return torch.tensor(float(kept["calls"]))

    return keep


READS = {
    **{read.__name__: read for read in (too_late, too_late_as_well, computed_with, before_its_optimizer)},
    **{f"kept as {form}": kept_as(form) for form in FORMS},
}


called = []


def with_side_effects(k):
    """So that it can be called once only, after the step; for others see test_scheduler_results.py."""
    called.append(k)
    return 0.5**k


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
@pytest.mark.filterwarnings("ignore:Detected call of")  # of the scheduler before its optimizer
def test_changes_of_a_scheduler_that_steps_once_may_be_read_inside_the_step(reads):
    def run(backend, trace):
        kept.clear()
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        compiled = fl.compile(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = schedulers.LambdaLR(optimizer, with_side_effects)

        @trace
        def step(x):
            compiled(x).sum().backward()
            schedule.step()
            return reads(optimizer, schedule)

        results = [step(torch.ones(1, 2)) for _ in range(3)]
        return results, optimizer.param_groups[0]["lr"], schedule.last_epoch, model.weight.detach().clone()

    check_runs_eagerly(run, r"test_pytorch_schedulers.py:\d+.*LambdaLR")
