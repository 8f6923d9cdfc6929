"""Changes of an optimizer between two traced steps match the same changes in eager PyTorch.

In float64, where another order of rounding stays below 1e-9. (The steps of Adam and similar optimizers are counted in
float32 in a traced step: 1e-6 there, and so for all of PyTorch's optimizers.)
"""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from tests.compiled_steps import check_runs_eagerly, compilations

schedulers = torch.optim.lr_scheduler
STEPS = 9
# float64 sums of a few numbers in another order, over nine steps. Measured: 4e-14 of a value, 3e-13 absolutely.
CLOSE = {"rtol": 5e-13, "atol": 3e-12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
def backend(folder, by_kernels, float64):
    """All of these tests share one folder, since many of their steps are identical: each is compiled once."""
    return fl.backend("XLA", artifact_dir=folder)


class Run:
    """A model in training, on a backend."""

    def __init__(self, backend, make, model=None):
        torch.manual_seed(0)
        self.model = (model or plain)()
        self.compiled = fl.compile(self.model, backend)
        self.parameters = list(self.model.parameters())
        self.optimizer = make(self.parameters)
        self.more = {}

    def step(self, set_to_none=True, trace=fl.trace):
        run = self

        @trace
        def step(x, y):
            loss = F.mse_loss(run.compiled(x), y)
            loss.backward()
            run.optimizer.step()
            if set_to_none is not None:
                run.optimizer.zero_grad(set_to_none=set_to_none)
            return loss

        return step

    def train(self, step, between=lambda n, run: None):
        generator = torch.Generator().manual_seed(1)
        losses = []
        for n in range(STEPS):
            between(n, self)
            x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)
            losses.append(step(x, y).detach().clone())
        return losses

    def state(self):
        """Weights, buffers, and the optimizer's state, by name."""
        result = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        for i, p in enumerate(self.parameters):
            for key, entry in self.optimizer.state.get(p, {}).items():
                if isinstance(entry, torch.Tensor):
                    result[f"{i}.{key}"] = entry.detach().clone().double()
        return result


def plain():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def check(backend, make, between=lambda n, run: None, model=None, set_to_none=True, also=lambda run: {}, close=CLOSE):
    """Traced and eager training have the same losses, weights and optimizer state."""
    results = []
    for where in (backend, fl.backend("CPU")):
        fl.backend(where)
        run = Run(where, make, model)
        losses = run.train(run.step(set_to_none), between)
        results.append((losses, run.state(), also(run)))
    (losses, state, extra), (eager_losses, eager_state, eager_extra) = results
    torch.testing.assert_close(losses, eager_losses, **close)
    torch.testing.assert_close(state, eager_state, check_dtype=False, **close)
    torch.testing.assert_close(extra, eager_extra, check_dtype=False, **close)


def sgd(parameters, **more):
    return torch.optim.SGD(parameters, lr=0.1, **{"momentum": 0.9, **more})


def setting(key, values):
    def between(n, run):
        for group in run.optimizer.param_groups:
            group[key] = copy.deepcopy(values[n])

    return between


# -- numbers on whose sign optimizers branch --

MOMENTA = {
    "off for a while": [0.9] * 4 + [0.0] * 2 + [0.5] * 3,
    "off, as a whole number": [0.9] * 4 + [0] * 2 + [0.5] * 3,
    "on for a while": [0.0] * 3 + [0.9] * 3 + [0.0] * 3,
    "changing": [0.9, 0.8, 0.7, 0.0, 0.0, 0.5, 0.4, 0.0, 0.3],
}
KINDS = {
    "SGD": sgd,
    "damped": lambda p: sgd(p, dampening=0.3),
    "Nesterov": lambda p: sgd(p, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("values", MOMENTA)
def test_momentum_switched_off_leaves_its_buffer(kind, values, backend):
    if kind == "RMSprop" and values == "on for a while":
        pytest.skip("eager PyTorch raises KeyError: RMSprop makes no buffer then")
    check(backend, KINDS[kind], setting("momentum", MOMENTA[values]))


def test_momentum_switched_off_by_a_schedule_on_the_device(backend):
    """The host does not know the scheduled value."""

    def run_on(where):
        fl.backend(where)
        run = Run(where, sgd)
        schedule = fl.optim.lr_scheduler.PiecewiseConstantLR(
            run.optimizer, [0.9, 0.0, 0.5], [3, 6], param_group_key="momentum"
        )

        @fl.trace
        def step(x, y):
            loss = F.mse_loss(run.compiled(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            schedule.step()
            return loss

        return run.train(step), run.state()

    traced = run_on(backend)
    torch.testing.assert_close(traced, run_on(fl.backend("CPU")), **CLOSE)


def test_a_damped_momentum_on_the_device_matches_eager():
    def train(backend, trace):
        run = Run(backend, lambda p: sgd(p, dampening=0.3))
        fl.optim.lr_scheduler.LinearLR(run.optimizer, 0.0, 0.9, 5, param_group_key="momentum")
        return run.train(run.step(trace=trace))

    check_runs_eagerly(train, r"between_steps.py:\d+: the momentum of this SGD.*dampening", **CLOSE)


ZEROS = [0.0, 0.0, 0.1, 0.1, 0.0, 0.2, 0.0, 0.0, 0.3]
FLAGS = [False, True, True, False, False, True, False, True, False]
CHANGES = {
    "weight_decay": (ZEROS, ["SGD", "AdamW", "RMSprop", "Adamax", "RAdam", "Adafactor"]),
    "maximize": (FLAGS, ["SGD", "Adagrad", "NAdam", "Adadelta"]),
    "differentiable": (FLAGS, ["SGD", "Adam", "RAdam", "ASGD", "NAdam"]),
    "foreach": (FLAGS, ["SGD", "AdamW", "Adagrad"]),
    "fused": (FLAGS, ["SGD", "AdamW", "Adagrad"]),
    "dampening": (ZEROS, ["SGD"]),
    "betas": ([(0.9, 0.999), (0.8, 0.99), (0.0, 0.9)] * 3, ["Adam", "Adamax", "NAdam"]),
    "beta2_decay": ([-0.8, -0.8, -0.5] * 3, ["Adafactor"]),
    "etas": ([(0.5, 1.2), (0.4, 1.3), (0.5, 1.1)] * 3, ["Rprop"]),
    "t0": ([1e6, 1e6, 2.0] * 3, ["ASGD"]),
}  # fmt: skip
OPTIONS = {"SGD": {"momentum": 0.9}, "Adadelta": {"lr": 1.0}}


@pytest.mark.parametrize("key, name", [(key, name) for key, (_, names) in CHANGES.items() for name in names])
def test_groups_may_change_between_steps(key, name, backend):
    options = {"lr": 0.01, **OPTIONS.get(name, {})}
    check(backend, lambda p: getattr(torch.optim, name)(p, **options), setting(key, CHANGES[key][0]))


CYCLING = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, 12),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, base_momentum=0.6, max_momentum=0.8),
}
NUMBERS = {
    "SGD": ["momentum", "weight_decay", "dampening"],
    "AdamW": [("betas", 0), ("betas", 1), ("betas", slice(0, 2)), "eps", "weight_decay"],
    "NAdam": [("betas", 0), ("betas", 1), "momentum_decay"],
    "RMSprop": ["momentum", "alpha", "eps"],
}


@pytest.mark.parametrize("name, number", [(name, number) for name, numbers in NUMBERS.items() for number in numbers])
@pytest.mark.parametrize("schedule", CYCLING)
def test_a_number_may_be_set_by_hand_and_by_a_scheduler(schedule, name, number, backend):
    """A scheduler sets one number of a tuple, so changes of the others could be missed."""

    def between(n, run):
        if n == 0:
            run.more["scheduler"] = CYCLING[schedule](run.optimizer)
        else:
            run.more["scheduler"].step()
        if n not in (4, 7):
            return
        key, place = number if isinstance(number, tuple) else (number, None)
        for group in run.optimizer.param_groups:
            if place is None:
                group[key] = group[key] * 0.5 + 0.01
            else:
                values = list(group[key])
                values[place] = [v * 0.7 for v in values[place]] if isinstance(place, slice) else values[place] * 0.7
                group[key] = tuple(values)

    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    check(backend, lambda p: getattr(torch.optim, name)(p, lr=0.01, **options), between)


def test_a_list_in_a_group_may_be_edited_in_place(backend):
    def between(n, run):
        if n == 0:
            run.optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        run.optimizer.param_groups[0]["betas"][0] = 0.9 - 0.1 * (n % 3)

    check(backend, lambda p: torch.optim.AdamW(p, lr=0.01), between)


def test_a_number_may_return_to_its_first_value(backend):
    """The first executable has the value as a constant, later ones as an input: either may run."""
    check(backend, sgd, setting("momentum", [0.9, 0.8, 0.9, 0.8, 0.9, 0.9, 0.9, 0.8, 0.9]))


# -- tensors in groups --

SCHEDULERS = {
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "CyclicLR with momentum": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, 12),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.2, 3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_rate_that_is_a_tensor_follows_any_scheduler(name, backend):
    def make(parameters):
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.05))

    def between(n, run):
        if n == 0:
            run.more["scheduler"] = SCHEDULERS[name](run.optimizer)
        elif name == "ReduceLROnPlateau":
            run.more["scheduler"].step(1.0)
        else:
            run.more["scheduler"].step()

    check(backend, make, between)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "Adagrad", "NAdam", "Rprop", "Adadelta", "Adafactor"])
@pytest.mark.parametrize("how", ["edited", "replaced", "now a number"])
def test_a_rate_that_is_a_tensor_may_be_edited_and_replaced(name, how, backend):
    def between(n, run):
        group = run.optimizer.param_groups[0]
        if how == "edited":
            group["lr"].mul_(0.9)
        else:
            group["lr"] = torch.tensor(0.05 / (n + 1)) if how == "replaced" or n % 2 else 0.05 / (n + 1)

    check(backend, lambda p: getattr(torch.optim, name)(p, lr=torch.tensor(0.05)), between)


def large():
    model = plain()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(30)
    return model


DECOUPLED_DECAY = {
    "Lion": lambda p: fl.optim.Lion(p, lr=0.01, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
}


SECOND_NUMBERS = {
    "SGD": (torch.optim.SGD, "weight_decay"),
    "AdamW": (torch.optim.AdamW, "weight_decay"),
    "Adam": (torch.optim.Adam, "weight_decay"),
    "RMSprop": (torch.optim.RMSprop, "alpha"),
}


@pytest.mark.parametrize("calls", [(1, 3), (3, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("name", SECOND_NUMBERS)
def test_a_rate_that_is_a_tensor_becomes_a_number_after_another_has_changed(name, calls, backend):
    """Then the same operations take the same number of scalars, of one dtype, but in another order."""
    cls, key = SECOND_NUMBERS[name]

    def between(n, run):
        group = run.optimizer.param_groups[0]
        if n == calls[0]:
            group[key] = 0.07
        if n == calls[1]:
            group["lr"] = 0.03

    close = CLOSE if name == "SGD" else {"rtol": 1e-6, "atol": 1e-6}  # counted in float32
    check(backend, lambda parameters: cls(parameters, lr=torch.tensor(0.01)), between, close=close)


@pytest.mark.parametrize("often", [1, 2])
@pytest.mark.parametrize("name", DECOUPLED_DECAY)
def test_a_rate_of_numpys_computes_in_its_own_precision(name, often, backend):
    """As from a table of float32: `1 - lr * weight_decay` is a float32, too. Every second one may be a float."""

    def between(n, run):
        rate = 0.05 / (n + 1)
        run.optimizer.param_groups[0]["lr"] = rate if n % often else np.float32(rate)

    # Where steps are counted on the device, eager PyTorch alone rounds `lr / bias_correction` to float32: 6e-8 of a
    # step. Weights are large, so that a decay in another precision is 1e-7 of them.
    close = CLOSE if name == "Lion" else {"rtol": 1e-8, "atol": 2e-8}
    check(backend, DECOUPLED_DECAY[name], between, model=large, close=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
def test_a_rate_may_have_any_dtype(dtype, backend):
    check(backend, lambda p: torch.optim.SGD(p, lr=torch.tensor(1, dtype=dtype), momentum=0.5))


TENSORS = {
    "betas edited": ("betas", lambda n, group: group["betas"][0].mul_(0.9)),
    "betas replaced": ("betas", lambda n, group: group.update(betas=(torch.tensor(0.9), torch.tensor(0.9 + 0.01 * n)))),
    "betas replaced by equal ones, which are edited": (
        "betas",
        lambda n, group: (
            group.update(betas=(torch.tensor(0.9), torch.tensor(0.99))) if n == 3 else group["betas"][0].mul_(0.9)
        ),
    ),
    "weight_decay edited": ("weight_decay", lambda n, group: group["weight_decay"].mul_(0.9)),
    "weight_decay to zero": ("weight_decay", lambda n, group: group["weight_decay"].fill_(0.1 * (n % 2))),
}


@pytest.mark.parametrize("name", TENSORS)
def test_other_numbers_may_be_tensors(name, backend):
    key, change = TENSORS[name]

    def make(parameters):
        number = (torch.tensor(0.9), torch.tensor(0.99)) if key == "betas" else torch.tensor(0.1)
        return torch.optim.AdamW(parameters, lr=0.01, foreach=False, **{key: number})

    check(backend, make, lambda n, run: change(n, run.optimizer.param_groups[0]))


def test_a_momentum_that_is_a_tensor_may_become_zero(backend):
    values = MOMENTA["changing"]
    check(backend, sgd, lambda n, run: run.optimizer.param_groups[0].update(momentum=torch.tensor(float(values[n]))))
    check(
        backend,
        sgd,
        lambda n, run: (
            run.optimizer.param_groups[0].update(momentum=torch.tensor(0.9))
            if n == 0
            else run.optimizer.param_groups[0]["momentum"].fill_(values[n])
        ),
    )


# -- groups and weights --


def two(parameters, cls=torch.optim.SGD):
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    return cls([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "lr": 0.05}], **options)


def exchanged(n, run):
    if n % 3 == 2:
        a, b = run.optimizer.param_groups
        a["params"], b["params"] = b["params"], a["params"]


def removed_and_back(n, run):
    if n == 3:
        run.more["group"] = run.optimizer.param_groups.pop()
    elif n == 6:
        run.optimizer.param_groups.append(run.more["group"])


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("change", ["fewer", "none", "more"])
def test_an_optimizer_may_only_clear_gradients(change, steps, backend):
    def run_on(where):
        run = Run(where, sgd)
        run.optimizer = torch.optim.SGD(run.parameters[:3], lr=0.1)

        @fl.trace
        def step(x, y):
            loss = F.mse_loss(run.compiled(x), y)
            loss.backward()
            if steps:
                run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)
            return loss

        def between(n, run):
            if n == 4 and change == "fewer":
                run.optimizer.param_groups[0]["params"].pop()
            elif n == 4 and change == "none":
                run.optimizer.param_groups = []
            elif n == 4:
                run.optimizer.add_param_group({"params": run.parameters[3:]})

        return run.train(step, between), [p.grad.clone() for p in run.parameters]

    torch.testing.assert_close(run_on(backend), run_on(fl.backend("CPU")), **CLOSE)


def at(when, change):
    return lambda n, run: change(run) if n == when else None


def moved(run):
    first, second = run.optimizer.param_groups
    second["params"].append(first["params"].pop())


def rebound(run):
    run.optimizer.param_groups = [{**g, "lr": 0.01 * (i + 1)} for i, g in enumerate(run.optimizer.param_groups)]


def frozen(part):
    return lambda n, run: part(run).requires_grad_(n == 6) if n in (3, 6) else None


def restored(n, run):
    if n == 3:
        run.more["state"] = copy.deepcopy((run.optimizer.state_dict(), run.model.state_dict()))
    elif n == 6:
        run.optimizer.load_state_dict(run.more["state"][0])
        run.model.load_state_dict(run.more["state"][1])


def put(value):
    def change(run):
        for entries in run.optimizer.state.values():
            for key, entry in entries.items():
                if key == "step" or entry.dim():
                    entries[key] = torch.full_like(entry, value)

    return change


EVENTS = {
    "groups reordered": lambda n, run: run.optimizer.param_groups.reverse() if n % 3 == 2 else None,
    "groups' weights exchanged": exchanged,
    "a group removed": at(3, lambda run: run.optimizer.param_groups.pop()),
    "a group removed and back": removed_and_back,
    "a group replaced": at(
        3, lambda run: run.optimizer.param_groups.__setitem__(0, {**run.optimizer.param_groups[0], "lr": 0.01})
    ),
    "the list of groups replaced": at(3, rebound),
    "a weight moved": at(3, moved),
    "a weight removed": at(3, lambda run: run.optimizer.param_groups[0]["params"].pop()),
    "weights reordered": at(3, lambda run: run.optimizer.param_groups[0]["params"].reverse()),
    "the list of weights replaced": at(
        3, lambda run: run.optimizer.param_groups[0].update(params=run.optimizer.param_groups[0]["params"][:1])
    ),
    "a key added": at(3, lambda run: run.optimizer.param_groups[0].update(name="first")),
    "a layer frozen": frozen(lambda run: run.model[0]),
    "a weight frozen": frozen(lambda run: run.parameters[0]),
    "state restored": restored,
    "state loaded from itself": at(4, lambda run: run.optimizer.load_state_dict(run.optimizer.state_dict())),
    "state cleared": at(4, lambda run: run.optimizer.state.clear()),
    "a weight's state cleared": at(4, lambda run: run.optimizer.state.pop(run.parameters[0])),
    "state replaced": at(4, put(3.0)),
    "a gradient removed": at(4, lambda run: setattr(run.parameters[0], "grad", None)),
    "a gradient given": at(4, lambda run: setattr(run.parameters[0], "grad", torch.ones(3, 4))),
}


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", EVENTS)
def test_groups_weights_and_state_may_change_between_steps(name, cls, backend):
    check(backend, lambda p: two(p, cls), EVENTS[name], set_to_none="gradient" not in name)


def test_a_group_may_be_added(backend):
    def between(n, run):
        if n == 3:
            run.optimizer.add_param_group({"params": run.parameters[2:], "lr": 0.05})

    check(backend, lambda p: torch.optim.AdamW(p[:2], lr=0.1), between)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.RMSprop])
def test_an_optimizer_may_be_replaced(cls, backend):
    check(backend, two, at(4, lambda run: setattr(run, "optimizer", two(run.parameters, cls))))


# -- state of one's own --


class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.direction(p, self.state[p]))


class GradientByReference(Own):
    def direction(self, p, state):
        before, state["before"] = state.get("before"), p.grad
        return p.grad if before is None else p.grad + 0.5 * before


class GradientCloned(Own):
    def direction(self, p, state):
        state["mean"] = p.grad.clone() if "mean" not in state else 0.9 * state["mean"] + p.grad
        return state["mean"]


class Anchored(Own):
    def direction(self, p, state):
        if not state:
            state["anchor"], state["n"], state["strength"] = p.detach().clone(), torch.zeros(()), 0.1
        state["n"] += 1
        return (p.grad + state["strength"] * (p - state["anchor"])) / state["n"].sqrt()


class Counting(Own):
    def direction(self, p, state):
        state["n"] = state.get("n", 0) + 1
        return p.grad / state["n"]


class CountingInAList(Own):
    def direction(self, p, state):
        state.setdefault("n", [0])[0] += 1
        return p.grad / state["n"][0]


class Toggling(Own):
    def direction(self, p, state):
        state["odd"] = not state.get("odd", False)
        return p.grad if state["odd"] else 2 * p.grad


class Phases(Own):
    def direction(self, p, state):
        state["phase"] = "b" if state.get("phase") == "a" else "a"
        return p.grad if state["phase"] == "a" else 2 * p.grad


@pytest.mark.parametrize("cls", [GradientByReference, GradientCloned, Anchored])
@pytest.mark.parametrize("set_to_none", [True, False, None])  # None: never cleared
def test_state_may_start_from_the_first_gradient(cls, set_to_none, backend):
    check(backend, cls, set_to_none=set_to_none)


@pytest.mark.parametrize("cls", [Counting, CountingInAList, Toggling, Phases])
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_python_values_in_the_state_are_respected(cls, backend):
    check(backend, cls)


def test_an_optimizer_that_counts_in_python_is_compiled_no_more_after_three_steps(backend):
    run = Run(backend, Counting)
    step = run.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error", fl.errors.GraphChangeWarning)
        warnings.simplefilter("error", fl.errors.EagerStepWarning)
        for _ in range(3):
            run.train(step)
    assert compilations(step) <= 3  # without a count, with its first, with any


def test_a_rate_that_is_a_tensor_is_handed_out_itself(backend):
    run = Run(backend, lambda parameters: torch.optim.SGD(parameters, lr=torch.tensor(0.1)))
    rates = []

    @fl.trace
    def step(x):
        loss = run.model(x).square().mean()
        loss.backward()
        run.optimizer.step()
        rates.append(run.optimizer.param_groups[0]["lr"])
        return loss

    for _ in range(4):
        step(torch.ones(2, 4))
        run.optimizer.param_groups[0]["lr"].mul_(0.5)
    assert all(rate is run.optimizer.param_groups[0]["lr"] for rate in rates)


# -- averages by a count --

swa = torch.optim.swa_utils
AVERAGES = {
    "plain": {},
    "of buffers": {"use_buffers": True},
    "avg_fn": {"avg_fn": lambda average, p, n: average + (p - average) / (n + 1)},
    "ema avg_fn": {"avg_fn": swa.get_ema_avg_fn(0.9)},
    "ema multi_avg_fn": {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.9)},
    "swa multi_avg_fn": {"multi_avg_fn": swa.get_swa_multi_avg_fn()},
}


def normalized(momentum=0.1, norm=nn.BatchNorm1d):
    return lambda: nn.Sequential(nn.Linear(4, 3), norm(3, momentum=momentum), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize("of", ["the model", "the compiled model"])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_averaged_model_is_updated_in_a_step(name, of, backend):
    def run_on(where):
        fl.backend(where)
        run = Run(where, sgd, normalized())
        source = run.model if of == "the model" else run.compiled
        average = swa.AveragedModel(source, **AVERAGES[name])

        @fl.trace
        def step(x, y):
            loss = F.mse_loss(run.compiled(x), y)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            average.update_parameters(source)
            return loss

        losses = run.train(step)
        return losses, {name: tensor.detach().clone() for name, tensor in average.state_dict().items()}

    traced = run_on(backend)
    torch.testing.assert_close(traced, run_on(fl.backend("CPU")), **CLOSE)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
@pytest.mark.parametrize("event", ["nothing", "eval between", "reset", "momentum given"])
@pytest.mark.optimized  # in eval mode the kernel saves tensors of other shapes for the backward pass
def test_batch_norm_with_a_cumulative_average_matches_eager(norm, event, backend):
    def between(n, run):
        if event == "eval between":
            run.model.train(n % 3 != 2)
        elif event == "reset" and n == 4:
            run.model[1].reset_running_stats()
        elif event == "momentum given" and n == 4:
            run.model[1].momentum = 0.1

    check(backend, sgd, between, model=normalized(None, norm))


def test_outside_of_a_trace_the_averages_are_pytorchs_own(backend):
    before = nn.BatchNorm1d.forward, swa.AveragedModel.update_parameters
    run = Run(backend, sgd, normalized(None))
    run.train(run.step())
    assert (nn.BatchNorm1d.forward, swa.AveragedModel.update_parameters) == before


# -- preinitialize --

OURS = ["AdamW", "Adam", "SGD", "Lion", "Lamb", "Adafactor", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop",
        "ASGD", "Adadelta"]  # fmt: skip


@pytest.mark.parametrize("name, when", [*((name, 0) for name in OURS), ("SGD", 4), ("AdamW", 4), ("Lamb", 4)])
def test_preinitialize_changes_nothing_on_any_backend(name, when, backend):
    def make(parameters):
        return getattr(fl.optim, name)(parameters, lr=0.01, **({"momentum": 0.9} if name == "SGD" else {}))

    check(backend, make, at(when, lambda run: run.optimizer.preinitialize()))
