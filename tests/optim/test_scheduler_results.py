"""What a step reads of a scheduler that it has stepped: generated steps, against eager PyTorch, in float64.

Each reads some of what the scheduler sets, in one of some ways; between calls, something else may change it.
"""

import functools
import io
import logging
import math
import random
import types
import warnings
from os import environ

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.runtime.guards.side_effects import has_side_effects
from tests.compiled_steps import compilations

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:Detected call of", "ignore:Converting a tensor"),
]

kinds = torch.optim.lr_scheduler
WARMUP = 3
SETTINGS = types.SimpleNamespace(warmup=2, rates={"first": 0.5})


def warmed_up(step, *, warmup, total):
    if step < warmup:
        return float(step) / max(1, warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (total - warmup))))


class Inverse(kinds.LRScheduler):
    """As users write them."""

    def __init__(self, optimizer, warmup):
        self.warmup = warmup
        super().__init__(optimizer)

    def factor(self):
        return min(1.0, (self.last_epoch + 1) / self.warmup)

    def get_lr(self):
        return [base * self.factor() for base in self.base_lrs]


class Decay(Inverse):
    """Sets another number of the groups, too, and counts in an attribute."""

    turns = 0

    def get_lr(self):
        self.turns += 1
        rates = super().get_lr()
        return [rate * 0.9**self.turns for rate in rates]


class Warmup(kinds.LRScheduler):
    """Hands over to another scheduler, in a `step()` of its own."""

    def __init__(self, optimizer, count, then):
        self.count, self.then, self.is_over = count, then, False
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch < self.count:
            return [base * (self.last_epoch + 1) / self.count for base in self.base_lrs]
        if not self.is_over:
            self.then.base_lrs = list(self.base_lrs)
            self.is_over = True
        return self.then.get_last_lr()

    def step(self, epoch=None):
        if self.is_over:
            self.then.step(epoch)
            self._last_lr = self.then.get_last_lr()
        else:
            super().step(epoch)


SCHEDULERS = {
    "step": lambda o: kinds.StepLR(o, 2, 0.5),
    "milestones": lambda o: kinds.MultiStepLR(o, [2, 5], 0.5),
    "exponential": lambda o: kinds.ExponentialLR(o, 0.8),
    "lambda": lambda o: kinds.LambdaLR(o, lambda k: 1 / (1 + 0.3 * k)),
    "global": lambda o: kinds.LambdaLR(o, lambda k: min(1.0, (k + 1) / WARMUP)),
    "partial": lambda o: kinds.LambdaLR(o, functools.partial(warmed_up, warmup=2, total=30)),
    "cosine": lambda o: kinds.CosineAnnealingLR(o, 6),
    "restarts": lambda o: kinds.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: kinds.SequentialLR(o, [kinds.ConstantLR(o, 0.5, 2), kinds.ExponentialLR(o, 0.8)], [3]),
    "chained": lambda o: kinds.ChainedScheduler([kinds.ExponentialLR(o, 0.9), kinds.StepLR(o, 3, 0.5)]),
    "one cycle": lambda o: kinds.OneCycleLR(o, 0.1, total_steps=60),
    "cyclic": lambda o: kinds.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "user's": lambda o: Inverse(o, 4),
    "user's wrapper": lambda o: Warmup(o, 3, kinds.ExponentialLR(o, 0.9)),
    "user's with state": lambda o: Decay(o, 4),
}
OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    lambda p: torch.optim.AdamW(p, lr=0.05),
    lambda p: torch.optim.SGD([{"params": [each], "lr": 0.01 * (i + 1), "momentum": 0.5} for i, each in enumerate(p)]),
]
READS = {
    "last": lambda o, s: s.get_last_lr()[0],
    "group": lambda o, s: o.param_groups[-1]["lr"],
    "all": lambda o, s: sum(s.get_last_lr()),
    "epoch": lambda o, s: getattr(s, "last_epoch", 0),
    "momentum": lambda o, s: o.param_groups[0].get("momentum", 0.0),
    "branch": lambda o, s: 1.0 if o.param_groups[0]["lr"] > 0.04 else 2.0,
    "first": lambda o, s: (s._schedulers[0] if hasattr(s, "_schedulers") else s)._last_lr[0],
}
EVENTS = {
    "none": lambda o, s: None,
    "step": lambda o, s: s.step(),
    "set": lambda o, s: o.param_groups[0].update(lr=0.033),
    "load": lambda o, s: s.load_state_dict(s.state_dict()),
}


class Program:
    """A generated step, and what happens between its calls."""

    def __init__(self, seed):
        rng = random.Random(seed)
        names = list(SCHEDULERS)
        self.schedulers = [names[seed % len(names)], *rng.choices(names, k=rng.random() < 0.3)]
        self.optimizer = rng.choice(OPTIMIZERS)
        # Each is a scheduler's number, or None for an update, and what is read after it.
        order = [None, *range(len(self.schedulers)), *rng.choices([None, 0], k=rng.choice([0, 0, 1, 2]))]
        if rng.random() < 0.3:
            rng.shuffle(order)
        self.order = [(i, rng.sample(list(READS), rng.choice([0, 1, 2]))) for i in order]
        self.use = rng.choice(["return", "scale", "attribute", "keep", "tensor", "item", "log"])
        self.events = [rng.choice(["none"] * 4 + list(EVENTS)) for _ in range(9)]

    def run(self, backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(3, 2)
        compiled = fl.compile(model, backend)
        optimizer = self.optimizer(list(model.parameters()))
        schedulers = [SCHEDULERS[name](optimizer) for name in self.schedulers]
        kept, text = [], io.StringIO()
        logger = logging.getLogger(__name__)
        logger.handlers, logger.propagate = [logging.StreamHandler(text)], False
        logger.setLevel(logging.INFO)
        model.rate = 0.0

        @fl.trace
        def step(x):
            results = []
            for i, reads in self.order:
                if i is None:
                    optimizer.zero_grad()
                    loss = compiled(x).square().mean()
                    if self.use == "scale":
                        loss = loss * (1.0 + 0.1 * sum(results))
                    loss.backward()
                    optimizer.step()
                else:
                    schedulers[i].step()
                results += [READS[name](optimizer, s) for name in reads for s in schedulers[: (i or 0) + 1]]
            if self.use == "attribute":
                model.rate = sum(results)
            if self.use == "keep":
                kept.append(results)
            if self.use == "log":
                logger.info("%s %.17g", len(results), sum(results))
            if self.use == "item":
                return (loss.item(), *results)
            if self.use == "tensor":
                return loss.detach(), torch.ones(2) * sum(results)
            return (loss.detach(), *results) if self.use != "attribute" else loss.detach()

        found = []
        for event in self.events:
            results = step(torch.randn(4, 3))
            found.append(
                [float(r.sum()) if isinstance(r, torch.Tensor) else r for r in results]
                if self.use != "attribute"
                else float(results)
            )
            EVENTS[event](optimizer, schedulers[0])
            found += [model.rate, [dict(g, params=None) for g in optimizer.param_groups]]
            found += [{k: v for k, v in vars(s).items() if isinstance(v, (int, float))} for s in schedulers]
        kept += [float(word) for word in text.getvalue().split()]
        return [*found, kept, [p.detach().tolist() for p in model.parameters()]], step


@pytest.mark.parametrize("seed", range(70))
def test_steps_read_what_schedulers_have_set(seed):
    program = Program(seed)
    expected, _ = program.run(fl.backend("CPU"))
    actual, step = program.run(fl.backend("XLA"))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)  # float64 sums in another order
    if "user's wrapper" not in program.schedulers:  # its step changes more than numbers, at one call
        assert compilations(step) >= 1


def test_code_that_asks_for_a_rates_type_gets_a_float():
    """Its step runs by its Python."""

    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(2, 1)
        compiled = fl.compile(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = kinds.StepLR(optimizer, 2)

        @fl.trace
        def step(x):
            loss = compiled(x).sum() * (2.0 if type(schedule.get_last_lr()[0]) is float else 3.0)
            loss.backward()
            optimizer.step()
            schedule.step()
            return loss.detach() * (2.0 if type(schedule.get_last_lr()[0]) is float else 3.0)

        return [step(torch.ones(1, 2)) for _ in range(4)]

    expected = run(fl.backend("CPU"))
    with pytest.warns(fl.errors.EagerStepWarning):
        torch.testing.assert_close(run(fl.backend("XLA")), expected)


def noisy(k):
    print(k)
    return 1.0


def counted(k, seen=[]):  # noqa: B006
    seen.append(k)
    return 1 / len(seen)


def drawn(k):
    return random.random()


def stored(k):
    global WARMUP
    WARMUP = 3
    return 1.0


def of_an_imported_object(k):
    environ.update({})
    return 1.0


class Called:
    def __call__(self, k):
        self.k = k
        return 1.0


NOT_PURE = [
    noisy,
    counted,
    drawn,
    stored,
    of_an_imported_object,
    Called(),
    lambda k: noisy(k),
    functools.partial(counted, 1),
]
PURE = [
    lambda k: 1 / (k + 1),
    lambda k: math.cos(k) + max(1, WARMUP),
    functools.partial(warmed_up, warmup=2, total=30),
    lambda k: [0.1, 0.2, 0.3][min(k, 2)],
    lambda k: SETTINGS.warmup / max(1, k) + np.cos(k) * SETTINGS.rates.get("first", 1.0) + float(environ.get("A", 1)),
    lambda k: sum(x * 0.1 for x in (1, 2)) if k else {"a": 1.0}.get("a", 2.0),
]


def test_what_has_no_side_effects_is_known():
    assert not any(map(has_side_effects, PURE)) and all(map(has_side_effects, NOT_PURE))


@pytest.mark.parametrize("factor", [noisy, counted, stored, Called()])
def test_a_function_with_side_effects_is_called_once_for_each_step(factor, capsys):
    """Its step runs by its Python."""

    def run(backend):
        counted.__defaults__[0].clear()
        with backend.device:
            model = nn.Linear(2, 1)
        compiled = fl.compile(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = kinds.LambdaLR(optimizer, factor)

        @fl.trace
        def step(x):
            compiled(x).sum().backward()
            optimizer.step()
            schedule.step()
            return schedule.get_last_lr()[0]

        capsys.readouterr()
        return [step(torch.ones(1, 2)) for _ in range(3)], capsys.readouterr().out

    expected = run(fl.backend("CPU"))
    with pytest.warns(fl.errors.EagerStepWarning):
        assert run(fl.backend("XLA")) == expected


def test_a_function_that_reads_what_the_step_changes_reads_it_as_the_step_has_left_it():
    def run(backend):
        with backend.device:
            model = nn.Linear(2, 1)
        compiled = fl.compile(model, backend)
        model.factor = 1.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = kinds.LambdaLR(optimizer, lambda k: model.factor)

        @fl.trace
        def step(x):
            compiled(x).sum().backward()
            optimizer.step()
            model.factor *= 0.5
            schedule.step()
            return schedule.get_last_lr()[0]

        return [step(torch.ones(1, 2)) for _ in range(5)]

    expected = run(fl.backend("CPU"))
    assert expected[:2] == [0.05, 0.025]
    with pytest.warns(fl.errors.EagerStepWarning):
        assert run(fl.backend("XLA")) == expected


def test_a_function_that_reads_what_the_step_changes_later_is_found_out():
    """When the step is traced the first time, both values are the same."""
    with fl.backend("XLA").device:
        model = nn.Linear(2, 1)
    compiled = fl.compile(model)
    state = nn.Module()
    state.flag = torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = kinds.LambdaLR(optimizer, lambda k: 1.0 if float(state.flag) < 3 else 0.5)

    @fl.trace
    def step(x):
        state.flag = state.flag + 1
        compiled(x).sum().backward()
        optimizer.step()
        schedule.step()
        return schedule.get_last_lr()[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            rates = [step(torch.ones(1, 2)) for _ in range(5)]
        except fl.errors.GraphChangedError as error:
            assert "depends on what the step changes" in str(error)
        else:  # run by its Python
            assert rates == [0.1, 0.1, 0.05, 0.05, 0.05]


def test_an_error_of_a_scheduler_is_raised_as_by_eager_pytorch():
    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(2, 1)
        compiled = fl.compile(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = kinds.OneCycleLR(optimizer, 0.1, total_steps=5)

        @fl.trace
        def step(x):
            optimizer.zero_grad()
            compiled(x).sum().backward()
            optimizer.step()
            schedule.step()
            return schedule.get_last_lr()[0]

        rates = [step(torch.ones(1, 2)) for _ in range(4)]
        with pytest.raises(ValueError, match="Tried to step 6 times"):
            for _ in range(2):
                step(torch.ones(1, 2))
        return rates, schedule.last_epoch, model.weight.detach().clone()

    torch.testing.assert_close(run(fl.backend("XLA")), run(fl.backend("CPU")))
