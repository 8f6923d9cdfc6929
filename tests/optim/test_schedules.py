"""Schedules against their formulas in plain Python, against PyTorch's, and in traced steps.

They agree to 1e-12: both compute in float64, in another order.
"""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import firstloss as fl

from ..compiled_steps import compilations

pytestmark = pytest.mark.filterwarnings(
    "error::firstloss.errors.GraphChangeWarning", "error::firstloss.errors.EagerStepWarning"
)

ours, theirs = fl.optim.lr_scheduler, torch.optim.lr_scheduler
# float64; the formulas are evaluated in another order, and PyTorch's recursively. Measured: up to 4e-15.
EXACT = {"rel": 1e-13, "abs": 1e-15}
STEPS = 40


def sgd(lr=0.1, **options):
    return torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=lr, **options)


def half_cosine(start, end, t):
    return end + (start - end) * (1 + math.cos(math.pi * t)) / 2


def restarts(t, first, factor):
    """The cosine's position at step t, by counting."""
    begin, length = 0, first
    while t >= begin + length:
        begin, length = begin + length, length * factor
    return (t - begin) / length


def triangle(t, up, down):
    place = t % (up + down)
    return place / up if place <= up else (up + down - place) / down


def one_cycle(t, phases, anneal):
    """`phases`: (end step, start, end)."""
    begin = 0
    for i, (end, start, stop) in enumerate(phases):
        if t <= end or i == len(phases) - 1:
            return anneal(start, stop, min(1, (t - begin) / (end - begin)))
        begin = end


def line(start, end, t):
    return start + (end - start) * t


# Name: how to create it, and its formula.
FORMULAS = {
    "ConstantLR": (lambda o: ours.ConstantLR(o, 0.3), lambda t: 0.3),
    "LinearLR": (lambda o: ours.LinearLR(o, 0.1, 0.02, 9), lambda t: 0.1 - 0.08 * min(t, 9) / 9),
    "LinearLR, warmup": (lambda o: ours.LinearLR(o, 0.0, 0.2, 9), lambda t: 0.2 * min(t, 9) / 9),
    "PolynomialLR": (
        lambda o: ours.PolynomialLR(o, 0.1, 0.02, 9, power=2.5),
        lambda t: 0.08 * (1 - min(t, 9) / 9) ** 2.5 + 0.02,
    ),
    "PolynomialLR, cycle": (
        lambda o: ours.PolynomialLR(o, 0.1, 0.02, 9, power=2.0, cycle=True),
        lambda t: 0.08 * (1 - t / (9 * max(1, math.ceil(t / 9)))) ** 2.0 + 0.02,
    ),
    "ExponentialLR": (lambda o: ours.ExponentialLR(o, 0.1, 7, 0.5), lambda t: 0.1 * 0.5 ** (t / 7)),
    "ExponentialLR, staircase": (
        lambda o: ours.ExponentialLR(o, 0.1, 7, 0.5, staircase=True),
        lambda t: 0.1 * 0.5 ** (t // 7),
    ),
    "InverseExponentialTimeDecayLR": (
        lambda o: ours.InverseExponentialTimeDecayLR(o, 0.1, 2, 7, 0.5),
        lambda t: 0.1 / (1 + 0.5 * t**2 / 7),
    ),
    "InverseExponentialTimeDecayLR, staircase": (
        lambda o: ours.InverseExponentialTimeDecayLR(o, 0.1, 1, 7, 0.5, staircase=True),
        lambda t: 0.1 / (1 + 0.5 * (t // 7)),
    ),
    "InverseSquareRootDecayLR": (
        lambda o: ours.InverseSquareRootDecayLR(o, 0.1, 3.0, 5),
        lambda t: 0.3 / math.sqrt(max(t, 5)),
    ),
    "CosineDecayLR": (lambda o: ours.CosineDecayLR(o, 0.1, 0.02, 9), lambda t: half_cosine(0.1, 0.02, min(t, 9) / 9)),
    "CosineAnnealingLR": (lambda o: ours.CosineAnnealingLR(o, 0.1, 9, 0.02), lambda t: half_cosine(0.1, 0.02, t / 9)),
    "CosineAnnealingWarmRestartsLR": (
        lambda o: ours.CosineAnnealingWarmRestartsLR(o, 0.1, 7, eta_min=0.02),
        lambda t: half_cosine(0.1, 0.02, restarts(t, 7, 1)),
    ),
    "CosineAnnealingWarmRestartsLR, longer": (
        lambda o: ours.CosineAnnealingWarmRestarts(o, 0.1, 3, 2, 0.02),
        lambda t: half_cosine(0.1, 0.02, restarts(t, 3, 2)),
    ),
    "StepLR": (lambda o: ours.StepLR(o, 0.1, 7, 0.5), lambda t: 0.1 * 0.5 ** (t // 7)),
    "MultiStepLR": (
        lambda o: ours.MultiStepLR(o, 0.1, 0.5, [3, 5, 20]),
        lambda t: 0.1 * 0.5 ** sum(t >= m for m in (3, 5, 20)),
    ),
    "LambdaLR": (lambda o: ours.LambdaLR(o, 0.1, lambda t: 0.95**t), lambda t: 0.1 * 0.95**t),
    "LambdaLR, two": (
        lambda o: ours.LambdaLR(o, 0.1, [lambda t: 0.95**t, lambda t: t / 30]),
        lambda t: 0.1 * 0.95**t * t / 30,
    ),
    "MultiplicativeLR": (lambda o: ours.MultiplicativeLR(o, 0.1, 0.95), lambda t: 0.1 * 0.95**t),
    "CyclicLR": (lambda o: ours.CyclicLR(o, 0.1, 0.5, 5, 3), lambda t: 0.1 + 0.4 * triangle(t, 5, 3)),
    "CyclicLR, triangular2": (
        lambda o: ours.CyclicLR(o, 0.1, 0.5, 5, mode="triangular2"),
        lambda t: 0.1 + 0.4 * triangle(t, 5, 5) / 2 ** (t // 10),
    ),
    "CyclicLR, exp_range": (
        lambda o: ours.CyclicLR(o, 0.1, 0.5, 5, 3, "exp_range", 0.9),
        lambda t: 0.1 + 0.4 * triangle(t, 5, 3) * 0.9**t,
    ),
    "OneCycleLR": (
        lambda o: ours.OneCycleLR(o, 0.1, 0.5, 30),
        lambda t: one_cycle(t, [(8, 0.1, 0.5), (29, 0.5, 1e-5)], half_cosine),
    ),
    "OneCycleLR, three phases": (
        lambda o: ours.OneCycleLR(o, 0.1, 0.5, 30, 0.25, 100.0, three_phase=True, anneal_strategy="linear"),
        lambda t: one_cycle(t, [(6.5, 0.1, 0.5), (13, 0.5, 0.1), (29, 0.1, 0.001)], line),
    ),
    "PiecewiseConstantLR": (
        lambda o: ours.PiecewiseConstantLR(o, [0.1, 0.3, 0.2], [4, 9]),
        lambda t: 0.1 if t < 4 else 0.3 if t < 9 else 0.2,
    ),
    "SequentialLR": (
        lambda o: ours.SequentialLR(
            o, [ours.LinearLR(o, 0.0, 0.1, 5), ours.ConstantLR(o, 0.2), ours.CosineDecayLR(o, 0.1, 0.01, 20)], [5, 8]
        ),
        lambda t: t * 0.02 if t < 5 else 0.2 if t < 8 else half_cosine(0.1, 0.01, min(t - 8, 20) / 20),
    ),
    "ChainedLR": (
        lambda o: ours.ChainedLR([ours.LinearLR(o, 0.1, 0.05, 5), ours.ExponentialLR(o, 0.7, 1, 0.9)]),
        lambda t: (0.1 - 0.05 * min(t, 5) / 5) * 0.9**t,
    ),
}

# The same schedule by PyTorch, whose optimizer has rate 0.1.
PYTORCH = {
    "LinearLR": lambda o: theirs.LinearLR(o, 1.0, 0.2, 9),
    "ExponentialLR": lambda o: theirs.ExponentialLR(o, 0.5 ** (1 / 7)),
    "CosineAnnealingLR": lambda o: theirs.CosineAnnealingLR(o, 9, 0.02),
    "CosineAnnealingWarmRestartsLR": lambda o: theirs.CosineAnnealingWarmRestarts(o, 7, eta_min=0.02),
    "CosineAnnealingWarmRestartsLR, longer": lambda o: theirs.CosineAnnealingWarmRestarts(o, 3, 2, 0.02),
    "StepLR": lambda o: theirs.StepLR(o, 7, 0.5),
    "MultiStepLR": lambda o: theirs.MultiStepLR(o, [3, 5, 20], 0.5),
    "LambdaLR": lambda o: theirs.LambdaLR(o, lambda t: 0.95**t),
    "MultiplicativeLR": lambda o: theirs.MultiplicativeLR(o, lambda t: 0.95),
    "CyclicLR": lambda o: theirs.CyclicLR(o, 0.1, 0.5, 5, 3, cycle_momentum=False),
    "CyclicLR, triangular2": lambda o: theirs.CyclicLR(o, 0.1, 0.5, 5, mode="triangular2", cycle_momentum=False),
    "CyclicLR, exp_range": lambda o: theirs.CyclicLR(o, 0.1, 0.5, 5, 3, "exp_range", 0.9, cycle_momentum=False),
    "OneCycleLR": lambda o: theirs.OneCycleLR(o, 0.5, STEPS, div_factor=5, cycle_momentum=False),
    "ChainedLR": lambda o: theirs.ChainedScheduler(
        [theirs.LinearLR(o, 1.0, 0.5, 5), theirs.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


def rates(optimizer, schedule, steps=STEPS):
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return values


@pytest.mark.parametrize("name", FORMULAS)
def test_eager_schedules_follow_their_formula(name):
    make, formula = FORMULAS[name]
    optimizer = sgd()
    schedule = make(optimizer)
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert rates(optimizer, schedule) == pytest.approx([formula(t) for t in range(STEPS)], **EXACT)
    assert schedule.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    assert schedule.value(torch.arange(STEPS)).tolist() == pytest.approx([formula(t) for t in range(STEPS)], **EXACT)


@pytest.mark.parametrize("name", PYTORCH)
def test_eager_schedules_match_pytorchs(name):
    optimizer, reference = sgd(), sgd()
    make = FORMULAS[name][0] if name != "OneCycleLR" else lambda o: ours.OneCycleLR(o, 0.1, 0.5, STEPS)
    assert rates(optimizer, make(optimizer)) == pytest.approx(rates(reference, PYTORCH[name](reference)), **EXACT)


def test_sequences_and_polynomials_match_pytorchs():
    optimizer, reference = sgd(), sgd()
    parts = [ours.LinearLR(optimizer, 0.025, 0.1, 5), ours.PolynomialLR(optimizer, 0.1, 0.0, 12, 2.0)]
    sequence = ours.SequentialLR(optimizer, parts, [5])
    parts = [theirs.LinearLR(reference, 0.25, 1.0, 5), theirs.PolynomialLR(reference, 12, 2.0)]
    expected = rates(reference, theirs.SequentialLR(reference, parts, [5]))
    assert rates(optimizer, sequence) == pytest.approx(expected, **EXACT)


@settings(max_examples=50)
@given(st.integers(0, 2**40), st.integers(1, 1000), st.integers(1, 5))
def test_restarts_come_at_the_right_steps(t, first, factor):
    schedule = ours.CosineAnnealingWarmRestartsLR(sgd(), 1.0, first, factor)
    if factor == 1:
        t %= 1000 * first  # counting takes long
    expected = half_cosine(1.0, 0.0, restarts(t, first, factor))
    # A step too early or too late differs by 1e-6 and more; PyTorch's cosine and Python's, by a last digit.
    assert float(schedule.value(torch.tensor(t))) == pytest.approx(expected, rel=1e-14, abs=1e-15)


def test_traced_schedules_are_functions_of_the_step(backend):
    """All of them in one step, each with an optimizer whose gradient is 1: the weight is minus the sum of the rates."""
    optimizers = {name: sgd() for name in FORMULAS}
    schedules = {name: FORMULAS[name][0](optimizer) for name, optimizer in optimizers.items()}

    @fl.trace
    def step():
        used = {}
        for name, optimizer in optimizers.items():
            (p,) = optimizer.param_groups[0]["params"]
            p.grad = torch.ones(())
            used[name] = schedules[name].get_last_lr()[0]
            optimizer.step()
            schedules[name].step()
            p.grad = None
        return used

    model = nn.ParameterList([o.param_groups[0]["params"][0] for o in optimizers.values()])
    fl.compile(model, backend)
    used = [step() for _ in range(12)]
    assert compilations(step) == 1
    for name, (_, formula) in FORMULAS.items():
        expected = [formula(t) for t in range(13)]
        assert [float(u[name]) for u in used] == pytest.approx(expected[:-1], **EXACT), name
        (group,) = optimizers[name].param_groups
        # the weight is float32, and each of 12 sums is rounded. Measured: 2e-7.
        assert group["params"][0].item() == pytest.approx(-sum(expected[:-1]), rel=2e-6), name
        assert float(group["lr"]) == pytest.approx(expected[-1], **EXACT), name
        assert int(schedules[name].last_epoch) == 12
        assert type(optimizers[name].state_dict()["param_groups"][0]["lr"]) is float


def train(backend, optimizer_of, schedules_of, steps, resume=None, eager=False):
    """Losses and final state of a small model under schedules."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = optimizer_of(model.parameters())
    schedules = schedules_of(optimizer)
    compiled = fl.compile(model, backend)
    if resume is not None:
        model.load_state_dict(resume[0])
        optimizer.load_state_dict(copy.deepcopy(resume[1]))  # holds on to the tensors that it is given
        for schedule, state in zip(schedules, resume[2], strict=True):
            schedule.load_state_dict(state)

    @fl.trace
    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        return loss

    generator = torch.Generator().manual_seed(1 if resume is None else 2)
    losses = [float(step(torch.randn(5, 4, generator=generator))) for _ in range(steps)]
    assert eager or compilations(step) == 1
    state = (model.state_dict(), optimizer.state_dict(), [schedule.state_dict() for schedule in schedules])
    return losses, torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, state)


def several(optimizer):
    """The rate, the weight decay and a moment's decay rate, all scheduled."""
    return [
        ours.CosineDecayLR(optimizer, 0.1, 0.01, 10),
        ours.LinearLR(optimizer, 0.0, 0.5, 5, param_group_key="weight_decay"),
        ours.LinearLR(optimizer, 0.8, 0.9, 5, param_group_key=("betas", 0)),
    ]


def test_weight_decay_and_betas_follow_schedules_too(backend):
    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=1.0, weight_decay=1.0)

    traced, _ = train(backend, adam, several, 8)
    eager, _ = train(fl.backend("CPU"), adam, several, 8, eager=True)
    # float32 sums in another order, over eight steps. Measured: 3e-7.
    assert traced == pytest.approx(eager, rel=3e-6)
    # without the schedules of weight decay and betas, losses differ by up to a third
    assert traced != pytest.approx(train(fl.backend("CPU"), adam, lambda o: several(o)[:1], 8, eager=True)[0], rel=1e-2)


def test_momentum_can_be_scheduled_from_zero(backend):
    def momentum(optimizer):
        return [ours.PiecewiseConstantLR(optimizer, [0.0, 0.9], [3], param_group_key="momentum")]

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)

    traced, _ = train(backend, make, momentum, 6)
    eager, _ = train(fl.backend("CPU"), make, momentum, 6, eager=True)
    assert traced == pytest.approx(eager, rel=2e-6)  # as above: 2e-7


def test_a_checkpoint_resumes_the_schedule(backend):
    def adam(parameters):
        return fl.optim.Adam(parameters, lr=1.0, weight_decay=1.0)

    _, state = train(backend, adam, several, 6)
    assert [int(s["last_epoch"]) for s in state[2]] == [6, 6, 6]
    on_xla, _ = train(backend, adam, several, 4, resume=state)
    on_cpu, _ = train(fl.backend("CPU"), adam, several, 4, resume=state, eager=True)
    assert on_xla == pytest.approx(on_cpu, rel=3e-6)  # as above: 1e-7


def test_a_schedule_takes_the_step_from_pytorchs_checkpoint():
    optimizer = sgd()
    reference = theirs.StepLR(optimizer, 3, 0.5)
    for _ in range(7):
        optimizer.step()
        reference.step()
    schedule = ours.StepLR(sgd(), 0.1, 3, 0.5)
    schedule.load_state_dict(reference.state_dict())
    assert schedule.get_last_lr() == reference.get_last_lr()
    with pytest.raises(fl.errors.ScheduleError, match="last_epoch"):
        schedule.load_state_dict({"epoch": 3})


def test_what_an_optimizer_loads_does_not_override_its_schedule():
    optimizer = sgd()
    ours.ConstantLR(optimizer, 0.25)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_tags_choose_groups():
    a, b, c = (nn.Parameter(torch.zeros(())) for _ in range(3))
    groups = [{"params": [a], "tags": ["slow", "first"]}, {"params": [b], "tags": "fast"}, {"params": [c]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    ours.ConstantLR(optimizer, 0.5, param_group_tags="slow")
    ours.ConstantLR(optimizer, 0.7, param_group_tags=[None]).step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1, 0.7]
    with pytest.raises(fl.errors.ScheduleError, match="nothere.*fast, first, slow|nothere.*None, fast, first, slow"):
        ours.ConstantLR(optimizer, 0.5, param_group_tags="nothere")


def test_a_custom_schedule_defines_value():
    class Inverse(ours.Schedule):
        def value(self, step):
            return 1.0 / (step.double() + 1)

    optimizer = sgd()
    assert rates(optimizer, Inverse(optimizer), 4) == [1, 1 / 2, 1 / 3, 1 / 4]


def test_a_subclass_can_compute_its_lambda():
    class Ours(ours.LambdaLR):
        def set_value_lambda(self):
            return [lambda step: torch.pow(torch.tensor(0.5, dtype=torch.float64), step)]

    optimizer = sgd()
    assert rates(optimizer, Ours(optimizer, 0.4), 3) == [0.4, 0.2, 0.1]


MISTAKES = {
    "no optimizer": lambda: ours.ConstantLR([], 0.1),
    "no such number": lambda: ours.ConstantLR(sgd(), 0.1, param_group_key="betas"),
    "two at once": lambda: (o := sgd(), ours.ConstantLR(o, 0.1), ours.ConstantLR(o, 0.2).step()),
    "no steps": lambda: ours.LinearLR(sgd(), 0.1, 0.0, 0),
    "milestones fall": lambda: ours.PiecewiseConstantLR(sgd(), [1, 2, 3], [5, 4]),
    "too few parts": lambda: ours.PiecewiseConstantLR(sgd(), [1, 2], [4, 5]),
    "another optimizer's": lambda: ours.SequentialLR(
        o := sgd(), [ours.ConstantLR(o, 0.1), ours.ConstantLR(sgd(), 1)], [3]
    ),
    "nothing to multiply by": lambda: ours.ChainedLR([ours.ConstantLR(o := sgd(), 0.1), ours.LinearLR(o, 0.0, 0.1, 5)]),
    "a factor that is a function": lambda: ours.MultiplicativeLR(sgd(), 0.1, lambda t: 0.9),
    "no function": lambda: ours.LambdaLR(sgd(), 0.1),
    "a mode that is none": lambda: ours.CyclicLR(sgd(), 0.1, 0.5, mode="square"),
    "a strategy that is none": lambda: ours.OneCycleLR(sgd(), 0.1, 0.5, anneal_strategy="step"),
    "a phase without steps": lambda: ours.OneCycleLR(sgd(), 0.1, 0.5, 100, pct_start=0.6, three_phase=True),
    "a part of a restart": lambda: ours.CosineAnnealingWarmRestartsLR(sgd(), 0.1, 5, 1.5),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_errors(mistake):
    with pytest.raises(fl.errors.ScheduleError):
        MISTAKES[mistake]()
