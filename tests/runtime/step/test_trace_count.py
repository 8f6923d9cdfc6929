"""Ordinary programs are traced twice, at the first call and to verify it at the second, and never again.

Counters, logs and caches around and inside the step do not affect it; one guard too many would retrace at each call,
which costs a hundred times as much as a step.
"""

import collections
import copy
import functools
import itertools
import logging
import random
import time
import types
import warnings

import pytest
import torch
import transformers
from torch import nn

import firstloss as fl
from firstloss.compat import torch_names
from firstloss.errors import EagerStepWarning, GraphChangeWarning
from firstloss.runtime.guards.native import native
from firstloss.runtime.step import cache_entries, cache_entry
from firstloss.trainer import Callback, Checkpoint, Logging, Trainer, TrainingLoop
from firstloss.trainer.loggers import ProgressLogger
from tests import compiled_steps, small_training
from tests.tiny_llama import llama

STEPS = 200
ONCE = 2  # the first call, and the verification at the second
COUNTED = 3  # the same, and the proof that a number may be an input


@pytest.fixture(autouse=True)
def _no_more_verifications(monkeypatch):
    monkeypatch.setattr(cache_entry, "_CHECKING", 1e-9)  # none because of the time elapsed


@pytest.fixture(autouse=True)
def _nothing_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphChangeWarning)
        warnings.simplefilter("error", EagerStepWarning)
        yield


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def build(backend, optimizer=sgd):
    torch.manual_seed(0)
    return small_training.build(backend, optimizer=optimizer)


def batches(count=STEPS):
    return small_training.batches(count)


def loop_class():
    """Each test has its own class, whose methods no other test has traced."""

    class Loop:
        """A typical trainer, with all its state in `self`, which is an argument of the step."""

        def __init__(self, backend, scheduled=False, accumulate=1):
            self.model, self.optimizer, self.compiled = build(backend)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS) if scheduled else None
            self.accumulate = accumulate
            self.global_step = self.epoch = self.samples = 0
            self.started = self.last_time = time.perf_counter()
            self.speed = 0.0
            self.losses, self.times, self.history = [], [], collections.deque(maxlen=10)
            self.metrics, self.best = {}, float("inf")
            self.log = logging.getLogger(__name__)
            self.random = random.Random(0)
            self.batch = None

        def forward_backward(self, x):
            loss = (self.compiled(x) ** 2).mean() / self.accumulate
            loss.backward()
            return loss

        @fl.trace
        def step(self, x):
            loss = self.forward_backward(x)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

        @fl.trace
        def step_with_metrics(self, x):
            loss = self.forward_backward(x)
            self.metrics["loss"] = loss.detach()
            self.metrics["norm"] = torch.stack([p.grad.norm() for p in self.model.parameters()]).norm()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

        @fl.trace
        def micro_step(self, x):
            return self.forward_backward(x)

        @fl.trace
        def update(self):
            self.optimizer.step()
            self.optimizer.zero_grad()

        def after(self, loss):
            self.global_step += 1
            self.samples += 6
            now = time.perf_counter()
            self.times.append(now - self.last_time)
            self.last_time, self.speed = now, self.samples / (now - self.started)
            self.losses.append(loss.detach())
            self.history.append(loss.detach())
            if self.global_step % 50 == 0:
                self.epoch += 1
                self.best = min(self.best, loss.item())
                self.log.info("%d: %f", self.global_step, loss.item())
            if self.scheduler is not None:
                self.scheduler.step()

    return Loop


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("which", ["step", "step_with_metrics"])
def test_a_loop_in_a_class_is_traced_twice(backend, traced, which, scheduled):
    loop = loop_class()(backend, scheduled)
    for x in batches():
        loop.batch = x
        loop.after(getattr(loop, which)(x))
    assert len(traced) == ONCE
    assert len({loss.item() for loss in loop.losses}) == STEPS


def test_gradient_accumulation_in_a_class_is_traced_twice(backend, traced):
    loop = loop_class()(backend, accumulate=4)
    for i, x in enumerate(batches()):
        loop.after(loop.micro_step(x))
        if i % 4 == 3:
            loop.update()
    # The step that creates the gradients differs from the one that adds to them.
    assert len(traced) <= 3 * ONCE


def test_gradient_accumulation_in_one_step_is_traced_twice(backend, traced):
    model, optimizer, compiled = build(backend)

    @fl.trace
    def step(parts):
        optimizer.zero_grad()
        total = 0.0
        for x in parts:
            loss = (compiled(x) ** 2).mean() / len(parts)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    count = 0
    for x in batches():
        count += 1
        step([x, x + 1])
    assert len(traced) == ONCE


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 20, 0.9),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, STEPS + 1),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)),
    "by hand": lambda o: types.SimpleNamespace(
        step=lambda: o.param_groups[0].update(lr=o.param_groups[0]["lr"] * 0.99)
    ),
}
OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_scheduled_learning_rate_does_not_retrace(backend, traced, scheduler, optimizer):
    _, optimizer, compiled = build(backend, OPTIMIZERS[optimizer])
    scheduler = SCHEDULERS[scheduler](optimizer)

    @fl.trace
    def step(x):
        loss = (compiled(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    rates = set()
    for x in batches():
        step(x)
        rates.add(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert len(rates) > 5
    assert len(traced) == ONCE


def test_a_scheduler_inside_the_step_does_not_retrace(backend, traced):
    """Firstloss's own schedulers are meant to be used like this, and PyTorch's may be."""
    _, optimizer, compiled = build(backend)
    scheduler = fl.optim.lr_scheduler.LinearLR(optimizer, 0.1, 0.01, STEPS)

    @fl.trace
    def step(x):
        loss = (compiled(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return loss

    for x in batches():
        step(x)
    assert len(traced) == ONCE


# -- state kept around a step and in it
# ---------------------------------------------------------------------------------


def train_step(backend, inside=lambda loss, x: None):
    _, optimizer, compiled = build(backend)

    @fl.trace
    def step(x):
        loss = (compiled(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        inside(loss, x)
        return loss

    return step


def test_lists_that_grow_outside_do_not_retrace(backend, traced):
    step = train_step(backend)
    losses, numbers, everything = [], [], {}
    for i, x in enumerate(batches()):
        losses.append(step(x))
        numbers.append(losses[-1].item())
        everything[i] = (x, losses[-1])
    assert len(traced) == ONCE
    assert [loss.item() for loss in losses] == numbers


INSIDE = {}


def kept_inside(case):
    INSIDE[case.__name__] = case
    return case


@kept_inside
def a_list_that_grows():
    losses = []
    return lambda loss, x: losses.append(loss.detach()), lambda: len(losses) == STEPS


@kept_inside
def a_dict_of_metrics():
    metrics = {}
    is_complete = lambda: set(metrics) == {"loss", "mean"}  # noqa: E731
    return lambda loss, x: metrics.update(loss=loss.detach(), mean=x.mean()), is_complete


@kept_inside
def a_dict_replaced():
    held = types.SimpleNamespace(metrics=None)
    return lambda loss, x: setattr(held, "metrics", {"loss": loss.detach()}), lambda: "loss" in held.metrics


@kept_inside
def the_last_loss():
    held = types.SimpleNamespace(last=None)
    return lambda loss, x: setattr(held, "last", loss.detach()), lambda: held.last is not None


@kept_inside
def a_running_sum():
    held = types.SimpleNamespace(total=torch.zeros(()))

    def keep(loss, x):
        held.total = held.total + loss.detach()

    return keep, lambda: held.total.item() > 0


@kept_inside
def a_running_sum_in_place():
    total = torch.zeros(())
    return lambda loss, x: total.add_(loss.detach()), lambda: total.item() > 0


@kept_inside
def a_moving_average():
    held = {"ema": torch.zeros(())}

    def keep(loss, x):
        held["ema"] = 0.9 * held["ema"] + 0.1 * loss.detach()

    return keep, lambda: held["ema"].item() > 0


@kept_inside
def a_recurrent_state():
    held = types.SimpleNamespace(h=torch.zeros(6, 4), c=torch.zeros(6, 4))

    def keep(loss, x):
        held.c = held.c * 0.5 + x
        held.h = torch.tanh(held.c + held.h)

    return keep, lambda: held.h.abs().sum().item() > 0


@kept_inside
def two_states_that_swap():
    held = types.SimpleNamespace(a=torch.zeros(6, 4), b=torch.zeros(6, 4))

    def keep(loss, x):
        held.a, held.b = held.b, held.a + x

    return keep, lambda: held.a.abs().sum().item() > 0


@kept_inside
def a_nonlocal_state():
    state = torch.zeros(6, 4)

    def keep(loss, x):
        nonlocal state
        state = state * 0.5 + x

    return keep, lambda: state.abs().sum().item() > 0


@kept_inside
def counts_in_a_dict():
    counts = {"steps": 0, "samples": 0.0}

    def keep(loss, x):
        counts["steps"] += 1
        counts["samples"] += 6.0

    return keep, lambda: counts == {"steps": STEPS, "samples": 6.0 * STEPS}


@kept_inside
def counts_in_a_list_and_in_an_attributes_dict():
    counts, held = [5, 0], types.SimpleNamespace(stats=collections.defaultdict(int, steps=0))

    def keep(loss, x):
        counts[0] -= 1
        held.stats["steps"] += 1

    return keep, lambda: counts == [5 - STEPS, 0] and held.stats == {"steps": STEPS}


@kept_inside
def a_print_in_a_closure():
    printed = []

    @fl.step_closure
    def show(loss):
        printed.append(loss.item())

    return lambda loss, x: show(loss), lambda: len(printed) == STEPS


@kept_inside
def what_the_runtime_looks_up():
    """The runtime caches names that it has looked up in globals of its own, which are not reads of the step."""
    return lambda loss, x: torch_names.__getattr__("decomposition_table"), lambda: True


@kept_inside
def what_is_written_in_the_step():
    """Logging reads the clock and the process, which does not affect the step."""
    log = logging.getLogger("written in the step")

    def keep(loss, x):
        log.warning("a step")
        log.debug("with %d rows", len(x))
        print("a step")

    return keep, lambda: True


def bert():
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@pytest.mark.parametrize("make", [llama, bert])
def test_a_library_model_is_traced_twice(backend, traced, make):
    """Its code reads settings, imports, and caches."""
    with backend.device:
        model = make()
    compiled, optimizer = fl.compile(model, backend), torch.optim.AdamW(model.parameters())

    @fl.trace
    def step(ids):
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(5):
        step(torch.randint(64, (2, 8)))
    assert len(traced) == ONCE


IN_NAMESPACES = ("counts_in_a_list_and_in_an_attributes_dict", "a_dict_replaced")
OF_NAMESPACES = pytest.mark.skipif(
    native is None, reason="without the part in C, a step reads all of a SimpleNamespace, which it also changes"
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[OF_NAMESPACES] * ("attributes_dict" in n or n == "a_dict_replaced")) for n in INSIDE],
)
def test_kept_values_do_not_retrace(backend, traced, name):
    keep_value, right = INSIDE[name]()
    step = train_step(backend, keep_value)
    for x in batches():
        step(x)
    assert right()
    assert len(traced) == (COUNTED if name.startswith("counts") else ONCE)


def test_averaged_weights_do_not_retrace(backend, traced):
    """An EMA of the weights, as in diffusers and timm."""
    model, optimizer, compiled = build(backend)
    with backend.device:
        average = small_training.layers()
    fl.compile(average, backend)

    @fl.trace
    def step(x):
        loss = (compiled(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.mul_(0.9).add_(p, alpha=0.1)
        return loss

    for x in batches():
        step(x)
    assert len(traced) == ONCE


# -- train and eval, and two models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 10])
def test_alternating_train_and_eval_does_not_retrace(backend, traced, every):
    model, optimizer, compiled = build(backend)

    @fl.trace
    def train(x):
        loss = (compiled(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    @fl.trace
    @torch.no_grad()
    def validate(x):
        return (compiled(x) ** 2).mean()

    best = float("inf")
    for i, x in enumerate(batches()):
        model.train()
        train(x)
        if i % every == 0:
            model.eval()
            best = min(best, validate(x).item())
    assert len(traced) == 2 * ONCE


def test_one_step_for_train_and_eval_is_traced_for_each(backend, traced):
    model, _, compiled = build(backend)
    model.append(nn.Dropout(0.5))

    @fl.trace
    def step(x):
        return (compiled(x) ** 2).mean()

    for i, x in enumerate(batches()):
        model.train(i % 3 != 0)
        step(x)
    assert len(traced) == 2 * ONCE


HISTORIES = {
    "list": (list, lambda held, value: held.append(value)),
    "dict": (dict, lambda held, value: held.update({len(held): value})),
    "defaultdict": (lambda: collections.defaultdict(list), lambda held, value: held["loss"].append(value)),
    "Counter": (collections.Counter, lambda held, value: held.update(calls=1)),
    "deque": (lambda: collections.deque(maxlen=3), lambda held, value: held.append(value)),
    "set": (set, lambda held, value: held.add(value)),
    "nested": (lambda: {"train": {"loss": []}}, lambda held, value: held["train"]["loss"].append(value)),
    "long": (lambda: [0.0] * 100_000, lambda held, value: held.append(value)),
}
PASSING = {
    "a variable": lambda log, held, place: lambda loss: log(held, loss),
    "an attribute": lambda log, held, place: lambda loss: log(place.held, loss.detach() * 2),
    "a keyword": lambda log, held, place: lambda loss: log(loss=loss, held=held),
    "beside a call of a variable": lambda log, held, place: lambda loss, double=torch.neg: log(held, double(loss)),
    "in a dict": lambda log, held, place: lambda loss: log({"given": held, "loss": loss}, loss + 1),
    "in a dict without tensors": lambda log, held, place: lambda loss: log({"given": place.held, "k": [1]}, loss),
    "a method": lambda log, held, place: lambda loss: place.log(place.held, loss),
}


@pytest.mark.parametrize("way", PASSING)
@pytest.mark.parametrize("kind", HISTORIES)
def test_what_closures_change_in_what_they_are_passed_does_not_retrace(kind, way, backend, traced):
    make, change = HISTORIES[kind]
    held, place = make(), types.SimpleNamespace()
    model, optimizer, *_ = build(backend)

    @fl.step_closure
    def log(held, loss):
        change(held["given"] if isinstance(held, dict) and "given" in held else held, loss.item())

    place.held, place.log = held, log
    note = PASSING[way](log, held, place)

    @fl.trace
    def step(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(loss)
        return loss

    before = copy.deepcopy(held)
    for x in batches(20):
        step(x)
    assert len(traced) == ONCE and held != before


# How a step gets the member `k` of an ensemble that is trained next: its call, its parameters, and what it does first.

MEMBERS = {
    "an index that is read": ("place.k = k; loss = step(x)", "x", "k = place.k; model, optimizer = members[k]"),
    "attributes": ("place.member = members[k]; loss = step(x)", "x", "model, optimizer = place.member"),
    "an argument": ("loss = step(k, x)", "k, x", "model, optimizer = members[k]"),
    "a name in a dict": ("place.k = f'fold {k}'; loss = step(x)", "x", "model, optimizer = place.folds[place.k]"),
}
ENSEMBLE = """
def program(backend, wrap, trace, batches):
    members = []
    for k in range(12):
        torch.manual_seed(k)
        with backend: model = nn.Sequential(trunk, nn.Linear(4, 5), nn.Linear(5, 1))
        members.append((wrap(model), sgd(model.parameters())))
    place.folds = {{f"fold {{k}}": member for k, member in enumerate(members)}}
    @trace
    def step({parameters}):
        {get}
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss
    losses = []
    for x in batches:
        for k in range(12):
            {call}
            losses.append(loss)
        yield losses
"""


@pytest.mark.parametrize("way", MEMBERS)
def test_a_step_for_the_members_of_an_ensemble_in_turns_does_not_retrace(way, backend, traced):
    warnings.filterwarnings("ignore", ".*recompiled for k", GraphChangeWarning)
    call, parameters, get = MEMBERS[way]
    text = ENSEMBLE.format(parameters=parameters, get=get, call=call)

    def run(device, wrap, trace):
        torch.manual_seed(0)
        with device:
            trunk = nn.Linear(4, 4)
        scope = {"torch": torch, "nn": nn, "sgd": sgd, "trunk": trunk, "place": types.SimpleNamespace()}
        exec(text, scope)
        rounds = [(losses, len(traced)) for losses in scope["program"](device, wrap, trace, batches(5))]
        return rounds[-1][0], [count for _, count in rounds]

    expected, _ = run(torch.device("cpu"), lambda module: module, lambda step: step)
    losses, counts = run(backend.device, lambda module: fl.compile(module, backend), fl.trace)
    assert counts[2] == counts[4] and counts[4] <= 12 * COUNTED
    torch.testing.assert_close([loss.item() for loss in losses], [loss.item() for loss in expected])


def frozen_by_a_loop(module, value):
    for parameter in module.parameters():
        parameter.requires_grad = value


@pytest.mark.parametrize("compiles", [False, True], ids=["constructed on the backend", "compiled"])
@pytest.mark.parametrize("freeze", [nn.Module.requires_grad_, frozen_by_a_loop])
@pytest.mark.parametrize("begins_thawed", [False, True])
def test_a_critic_frozen_at_every_third_call_does_not_retrace(backend, traced, freeze, begins_thawed, compiles):
    def run(device, wrap, trace):
        torch.manual_seed(0)
        with device:
            critic, generator = nn.Linear(4, 1), nn.Linear(4, 4)
        optimizers = sgd(critic.parameters()), sgd(generator.parameters())
        score, make = wrap(critic), wrap(generator)

        @trace
        def step(x, both):
            freeze(critic, True)
            loss = score(make(x).detach()).mean() - score(x).mean()
            loss.backward()
            optimizers[0].step()
            if both:
                freeze(critic, False)
                optimizers[1].zero_grad()
                score(make(x)).mean().backward()
                optimizers[1].step()
                if begins_thawed:
                    freeze(critic, True)
            optimizers[0].zero_grad()
            return loss

        losses, counts = [], []
        warnings.filterwarnings("ignore", ".*recompiled for both", GraphChangeWarning)  # which is asked for
        for i, x in enumerate(torch.randn(24, 6, 4, generator=torch.Generator().manual_seed(0))):
            losses.append(step(x, i % 3 == 2))
            counts.append(len(traced))
        return [*losses, *critic.parameters(), *generator.parameters()], counts

    expected, _ = run(torch.device("cpu"), lambda module: module, lambda step: step)
    wrap = functools.partial(fl.compile, backend=backend) if compiles else lambda module: module
    values, counts = run(backend.device, wrap, fl.trace)
    for value, wanted in zip(values, expected, strict=True):
        torch.testing.assert_close(value.detach(), wanted.detach())
    # Two kinds of call; at their first calls gradients are missing, and the critic is frozen before some.
    assert counts[-1] == counts[8] <= 4 * ONCE


def test_two_models_trained_in_turn_do_not_retrace(backend, traced):
    first, second = train_step(backend), train_step(backend)
    for x in batches():
        assert first(x).shape == second(x).shape
    assert len(traced) == 2 * ONCE


# -- loops at module level ---------------------------------------------------------------------------------------------

iteration = 0
batch = loss = None
running = 0.0
elapsed = []
results = {}
compiled = optimizer = None


@fl.trace
def step_of_globals(x):
    result = (compiled(x) ** 2).mean()
    result.backward()
    optimizer.step()
    optimizer.zero_grad()
    return result


def test_a_loop_at_module_level_is_traced_twice(backend, traced):
    """In a script, the loop's variables are globals, next to those that the step reads."""
    global iteration, batch, loss, running, compiled, optimizer
    _, optimizer, compiled = build(backend)
    running = 0.0
    for iteration, batch in enumerate(batches()):
        begin = time.perf_counter()
        loss = step_of_globals(batch)
        running += loss.item()
        elapsed.append(time.perf_counter() - begin)
        results["loss"] = running / (iteration + 1)
    assert len(traced) == ONCE


def test_a_script_is_traced_twice(backend, traced):
    """The same if the script itself creates everything, including the step, in a namespace of its own."""
    script = """
import time, random, torch, firstloss as fl
from torch import nn
torch.manual_seed(0)
with backend.device:
    model = nn.Linear(4, 3)
compiled = fl.compile(model, backend)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses, i, best, seed = [], 0, 1e9, None

@fl.trace
def step(x):
    loss = (compiled(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

begin = time.time()
while i < steps:
    seed = random.random()
    x = torch.full((2, 4), seed)
    loss = step(x)
    losses.append(loss)
    value = loss.item()
    best = min(best, value)
    i += 1
    seconds = time.time() - begin
"""
    space = {"backend": backend, "steps": STEPS, "__name__": "script"}
    exec(compile(script, "script.py", "exec"), space)
    assert len(space["losses"]) == STEPS
    assert len(traced) == ONCE


# -- the Trainer -------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = small_training.layers()

    def forward(self, x):
        y = self.layers(x)
        return {"loss": (y**2).mean(), "largest": y.detach().max()}


class Keeps(Callback):
    def __init__(self):
        self.logged = []

    def on_metrics(self, trainer, metrics, step):
        self.logged.append(dict(metrics))


def test_the_trainer_does_not_retrace(tmp_path, traced):
    keeps = Keeps()
    data = torch.utils.data.DataLoader(torch.randn(6 * 40, 4), 6, shuffle=True)
    trainer = Trainer(
        backend=fl.backend("XLA", artifact_dir=tmp_path / "artifacts"),
        model_dir=tmp_path,
        model=Net,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
        schedulers=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS),
        loop=TrainingLoop(max_steps=STEPS),
        checkpoint=Checkpoint(steps=100),
        logging=Logging(log_steps=5),
        callbacks=[keeps],
        loggers=[ProgressLogger()],
        seed=0,
    )
    trainer.fit(data)
    assert len(keeps.logged) >= STEPS // 5
    assert len(traced) == ONCE


class Adaptive(torch.optim.Optimizer):
    """An optimizer with state as Nero and D-Adaptation have it, of which each trait can be left out."""

    def __init__(self, parameters, traits):
        super().__init__(parameters, {"lr": 0.01})
        self.traits = traits

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            total = 0.0
            for p in group["params"]:
                state = self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                    if "asks at first" in self.traits and p.any():
                        state["before"] = p.clone()
                state["momentum"].mul_(0.9).add_(p.grad)
                if "reads" in self.traits:
                    total += state["momentum"].abs().sum().item()
                p.sub_(state["momentum"] * group["lr"])
                if "counts" in self.traits:
                    p.mul_(1 - 0.01 / (state["step"] + 1))
                state["step"] += 1
            group["total"] = total


TRAITS = ["asks at first", "reads", "counts"]


@pytest.mark.parametrize("traits", [t for n in range(4) for t in itertools.combinations(TRAITS, n)], ids=", ".join)
def test_an_optimizer_that_reads_and_counts(traits, monkeypatch):
    traces = []
    trace = cache_entries.CacheEntries._traced
    monkeypatch.setattr(cache_entries.CacheEntries, "_traced", lambda *a, **k: traces.append(1) or trace(*a, **k))

    def run(backend, trace):
        model, optimizer, compiled = build(backend, lambda parameters: Adaptive(parameters, traits))

        @trace
        def step(x):
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = []
        for number, x in enumerate(batches(10)):
            if number == 5:
                traces.clear()
            losses.append(step(x).item())
        return losses, step

    expected, _ = run(fl.backend("CPU"), lambda step: step)
    losses, step = run(fl.backend("XLA"), fl.trace)
    # Sums of float32 in another order, ten times
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    assert compiled_steps.compilations(step) <= 3 and not traces


def trained(model, backend):
    model = fl.compile(model, backend)
    return model, sgd(model.parameters())


@pytest.mark.parametrize("changes", ["recompile", "refuse"])
def test_a_step_for_models_of_other_sizes_one_after_another_is_compiled_for_each(changes, backend, traced, recwarn):
    """A search over architectures, with one step that finds the present model by itself."""
    now = {}

    @fl.trace(changes=changes)
    def step(x):
        model, optimizer = now["trial"]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for width in range(2, 14):
        with backend.device:
            model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        now["trial"] = trained(model, backend)
        before = len(traced)
        for x in batches(5):
            step(x)
        assert len(traced) - before == ONCE
    assert not [w for w in recwarn if "firstloss" in type(w.message).__module__]


def test_a_step_that_one_model_keeps_from_being_compiled_is_compiled_for_another(backend, traced):
    class Selects(nn.Linear):
        def forward(self, x):
            return super().forward(x[x.sum(1) > 0])  # a shape that depends on values

    now = {}

    @fl.trace
    def step(x):
        model, optimizer = now["model"]
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    warnings.filterwarnings("ignore", ".*not compiled", EagerStepWarning)
    for kind in (Selects, nn.Linear):
        with backend.device:
            model = kind(4, 1)
        now["model"] = trained(model, backend)
        traced.clear()
        for x in batches(6):
            step(x)
        assert bool(compiled_steps.steps(step)) == (kind is nn.Linear)
    assert len(traced) <= COUNTED


@pytest.mark.parametrize("every", [2, 3])
def test_numbers_become_inputs_where_kinds_of_steps_take_turns(every, traced):
    """The step that updates differs from the last one in more than its counters."""

    def train(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(3, 1)
        compiled = fl.compile(model, backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = types.SimpleNamespace(updates=0, total=0.0)

        @fl.trace
        def step(i, x):
            loss = compiled(x).square().mean()
            loss.backward()
            if (i + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
                state.updates += 1
                state.total += 0.5 * state.updates
            return loss.detach() * (1.0 + 0.1 * state.updates)

        results = []
        for i in range(60):
            if i == 30:
                traced.clear()
            results.append(float(step(i, torch.randn(4, 3))))
        return [*results, state.updates, state.total]

    expected = train(fl.backend("CPU"))
    traced.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphChangeWarning)
        torch.testing.assert_close(train(fl.backend("XLA")), expected)
    assert not traced
