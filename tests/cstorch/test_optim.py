"""The optimizers of `firstloss.cstorch`: their defaults, and their formulas against numpy.

Computed in float64, so that rounding differences stay far below any mistake in a formula: they agree to 1e-9.
"""

import inspect
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
import firstloss.cstorch as cstorch
from firstloss.errors import OptimizerError

pytestmark = pytest.mark.usefixtures("float64")

STEPS = 5


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return model, torch.randn(STEPS, 6, 4), torch.randn(STEPS, 6, 2)


def train(make, trace=lambda step: step, wrap=lambda model: model):
    """The weights after each step, and the gradients of each step."""
    model, xs, ys = problem()
    called = wrap(model)
    optimizer = make([p for p in model.parameters() if p.ndim == 2] if make.matrices else list(model.parameters()))

    @trace
    def step(x, y):
        loss = F.mse_loss(called(x), y)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return gradients

    history = []
    for x, y in zip(xs, ys, strict=True):
        gradients = [g.numpy().copy() for g in step(x, y)]
        history.append((gradients, [p.detach().numpy().copy() for p in model.parameters()]))
    start = [p.detach().numpy().copy() for p in problem()[0].parameters()]
    return start, history


class Make:
    def __init__(self, name, **options):
        self.name, self.options, self.matrices = name, options, name == "Muon"

    def __call__(self, parameters):
        return getattr(cstorch.optim, self.name)(parameters, **self.options)


# Each is a generator that receives a gradient and the weight, and yields the new weight.


def adam_base(w, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, decay=0.0, l2=0.0, correct=True, amsgrad=False):
    m, v, top, t = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w), 0
    g = yield w
    while True:
        t += 1
        g = g + l2 * w
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        top = np.maximum(top, v)
        update = m / (np.sqrt(top if amsgrad else v) + eps)
        if correct:
            update = update * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
        w = w - lr * (update + decay * w)
        g = yield w


def nadam(w, lr=2e-3, betas=(0.9, 0.999), eps=1e-8, decay=0.0, momentum_decay=4e-3):
    m, v, product, t = np.zeros_like(w), np.zeros_like(w), 1.0, 0
    g = yield w
    while True:
        t += 1
        g = g + decay * w
        mu = betas[0] * (1 - 0.5 * 0.96 ** (t * momentum_decay))
        after = betas[0] * (1 - 0.5 * 0.96 ** ((t + 1) * momentum_decay))
        product *= mu
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        update = after * m / (1 - product * mu * after) + (1 - mu) * g / (1 - product)
        w = w - lr * update / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
        g = yield w


def sgd(w, lr, momentum=0.0, dampening=0.0, decay=0.0, nesterov=False, maximize=False):
    b = np.zeros_like(w)
    g = yield w
    while True:
        g = (-g if maximize else g) + decay * w
        if momentum:
            b = momentum * b + (1 - dampening) * g
            g = g + momentum * b if nesterov else b
        w = w - lr * g
        g = yield w


def lamb(w, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, decay=0.0, adam=False):
    m, v = np.zeros_like(w), np.zeros_like(w)
    g = yield w
    while True:
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        update = m / (np.sqrt(v) + eps) + decay * w
        ratio = min(np.linalg.norm(w), 10) / np.linalg.norm(update)
        w = w - lr * (1 if adam else ratio) * update
        g = yield w


def adafactor(w, lr=None, clip=1.0, beta1=None, decay=0.0, scale=True, relative=False, warmup=False):
    r, c, v, m, t = 0.0, 0.0, 0.0, np.zeros_like(w), 0
    g = yield w
    while True:
        t += 1
        rate = lr
        if relative:
            rate = min(1e-6 * t if warmup else 1e-2, 1 / math.sqrt(t))
        if scale:
            rate = rate * max(1e-3, math.sqrt(np.mean(w * w)))
        b = 1 - t**-0.8
        s = g * g + 1e-30
        if w.ndim == 2:
            r, c = b * r + (1 - b) * s.mean(-1), b * c + (1 - b) * s.mean(-2)
            update = g / np.sqrt(np.outer(r, c) / r.mean())
        else:
            v = b * v + (1 - b) * s
            update = g / np.sqrt(v)
        update = rate * update / max(1.0, math.sqrt(np.mean(update * update)) / clip)
        if beta1 is not None:
            m = beta1 * m + (1 - beta1) * update
            update = m
        w = w - decay * rate * w - update
        g = yield w


FORMULAS = {
    "AdamW": (Make("AdamW"), adam_base, {}),
    "AdamW, all": (
        Make("AdamW", lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, amsgrad=True),
        adam_base,
        {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "decay": 0.1, "amsgrad": True},
    ),
    "AdamW, biased": (Make("AdamW", lr=0.01, correct_bias=False), adam_base, {"lr": 0.01, "correct": False}),
    "Adam": (Make("Adam", lr=0.01, weight_decay=0.1), adam_base, {"lr": 0.01, "l2": 0.1}),
    "AdamBase": (
        Make("AdamBase", weight_decay=0.2, l2_regularization_rate=0.1),
        adam_base,
        {"decay": 0.2, "l2": 0.1},
    ),
    "NAdam": (Make("NAdam", weight_decay=0.1), nadam, {"decay": 0.1}),
    "SGD": (Make("SGD", lr=0.1), sgd, {"lr": 0.1}),
    "SGD, dampening": (
        Make("SGD", lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
        sgd,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "decay": 0.1},
    ),
    "SGD, nesterov": (
        Make("SGD", lr=0.1, momentum=0.9, nesterov=True, maximize=True),
        sgd,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True},
    ),
    "Lamb": (Make("Lamb", lr=0.01, weight_decay=0.1), lamb, {"lr": 0.01, "decay": 0.1}),
    "Lamb, Adam": (Make("Lamb", lr=0.01, adam=True), lamb, {"lr": 0.01, "adam": True}),
    "Adafactor": (Make("Adafactor", lr=0.1), adafactor, {"lr": 0.1}),
    "Adafactor, all": (
        Make("Adafactor", lr=0.1, clip_threshold=0.5, beta1=0.9, weight_decay=0.1, scale_parameter=False),
        adafactor,
        {"lr": 0.1, "clip": 0.5, "beta1": 0.9, "decay": 0.1, "scale": False},
    ),
    "Adafactor, relative": (Make("Adafactor", lr=None, relative_step=True), adafactor, {"relative": True}),
    "Adafactor, warm-up": (
        Make("Adafactor", lr=None, relative_step=True, warmup_init=True),
        adafactor,
        {"relative": True, "warmup": True},
    ),
}


@pytest.mark.parametrize("case", FORMULAS)
def test_optimizers_follow_cerebras_formulas(case):
    make, formula, options = FORMULAS[case]
    start, history = train(make)
    runs = [formula(w, **options) for w in start]
    for run in runs:
        next(run)
    for gradients, weights in history:
        for run, g, w in zip(runs, gradients, weights, strict=True):
            # float64 sums in another order, here and below. Measured: 1e-14 of an element, 4e-16 absolutely.
            np.testing.assert_allclose(w, run.send(g), rtol=1e-13, atol=5e-15)


MORE = {
    "Adamax": Make("Adamax", weight_decay=0.1),
    "Adagrad": Make("Adagrad", lr_decay=0.1, initial_accumulator_value=0.1),
    "RAdam": Make("RAdam", weight_decay=0.1),
    "RMSprop": Make("RMSprop", momentum=0.9, centered=True),
    "Rprop": Make("Rprop"),
    "ASGD": Make("ASGD", t0=2),
    "Adadelta": Make("Adadelta", weight_decay=0.1),
    "Lion": Make("Lion", weight_decay=0.1),
}


@pytest.mark.parametrize("case", [*FORMULAS, *MORE])
def test_traced_optimizers_match_eager(case, backend):
    make = MORE[case] if case in MORE else FORMULAS[case][0]
    _, eager = train(make)
    _, traced = train(make, fl.trace, lambda model: fl.compile(model, backend))
    for (_, expected), (_, actual) in zip(eager, traced, strict=True):
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=5e-15)


@pytest.mark.parametrize("case", MORE)
def test_some_optimizers_follow_pytorchs_formula(case):
    """With the same hyperparameters, these run PyTorch's code: bit-identical."""
    make = MORE[case]
    if case == "Lion":
        library, other = fl.optim, {}
    else:
        parameter = inspect.signature(getattr(cstorch.optim, case)).parameters
        other = {name: p.default for name, p in parameter.items() if name != "params"}
        library = torch.optim
    pytorchs = Make(case, **{**other, **make.options})
    pytorchs.__class__ = type("Of", (Make,), {"__call__": lambda self, p: getattr(library, case)(p, **self.options)})
    for (_, a), (_, b) in zip(train(make)[1], train(pytorchs)[1], strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


DEFAULTS = {
    "AdamW": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0, "correct_bias": True},
    "Adam": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0},
    "Adamax": {"lr": 1e-3, "eps": 1e-6},
    "RAdam": {"lr": 1e-3, "eps": 1e-6},
    "Adagrad": {"lr": 1e-2, "eps": 1e-6},
    "Muon": {"lr": 0.02, "weight_decay": 0.01, "ns_steps": 5},
    "Rprop": {"lr": 1e-3},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_cerebras(name):
    """Cerebras' defaults in `firstloss.cstorch`; PyTorch's in `fl.optim`."""
    parameters = inspect.signature(getattr(cstorch.optim, name)).parameters
    assert {key: parameters[key].default for key in DEFAULTS[name]} == DEFAULTS[name]
    firstlosses, pytorchs = (inspect.signature(getattr(where, name)).parameters for where in (fl.optim, torch.optim))
    assert {k: p.default for k, p in firstlosses.items()} == {k: p.default for k, p in pytorchs.items()}


def muon(w, lr, decay, momentum, nesterov, steps=5):
    """Muon in float64; the optimizer computes in bfloat16."""
    b = np.zeros_like(w)
    g = yield w
    while True:
        b = momentum * b + (1 - momentum) * g
        x = g + momentum * b if nesterov else b
        tall = x.shape[0] > x.shape[1]
        x = (x.T if tall else x) / np.linalg.norm(x)
        for _ in range(steps):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        rate = lr * 0.2 * math.sqrt(max(w.shape))
        w = w * (1 - rate * decay) - rate * (x.T if tall else x)
        g = yield w


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_follows_its_formula(traced, nesterov, request):
    make = Make("Muon", lr=0.02, weight_decay=0.1, nesterov=nesterov)
    extra = (fl.trace, lambda model: fl.compile(model, request.getfixturevalue("backend"))) if traced else ()
    start, history = train(make, *extra)
    for i in (0, 2):  # only the matrices
        run = muon(start[i], 0.02, 0.1, 0.95, nesterov)
        next(run)
        for gradients, weights in history:
            # bfloat16 has 8 bits, and five iterations multiply singular values and their errors by up to 3.4 each while
            # these are small: a twentieth of an update, whose length is 0.2 * 0.02 * 2.
            np.testing.assert_allclose(weights[i], run.send(gradients[i]), rtol=0, atol=STEPS * 0.008 / 20)


def test_a_convolutions_weight_is_a_matrix_to_muon():
    conv = nn.Conv2d(3, 4, 2)
    optimizer = cstorch.optim.Muon([conv.weight], lr=0.1, weight_decay=0.0)
    before = conv.weight.detach().clone()
    conv(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    change = (conv.weight.detach() - before).reshape(4, -1) / (0.1 * 0.2 * 2)
    # The iteration maps singular values to between 0.7 and 1.2, not to 1; the others are zero up to bfloat16 rounding.
    assert torch.linalg.matrix_norm(change, 2) < 1.3
    with pytest.raises(OptimizerError, match=r"shape \[4\]"):
        cstorch.optim.Muon([conv.weight, conv.bias])


def test_cerebras_state_can_be_loaded():
    """Cerebras stores beta1^(t + 1) instead of the step t."""
    weight = nn.Parameter(torch.ones(2))
    saved = cstorch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    for _ in range(3):
        saved.step()
    state = saved.state_dict()
    entries = state["state"][0]
    entries["beta1_power"], entries["beta2_power"] = torch.tensor(0.9**4), torch.tensor(0.999**4)
    expected = entries.pop("step")
    optimizer = cstorch.optim.AdamW([weight])
    optimizer.load_state_dict(state)
    assert optimizer.state[weight]["step"] == expected == 3
    assert "beta1_power" not in optimizer.state[weight]


def test_pytorchs_state_can_be_loaded():
    weight = nn.Parameter(torch.ones(2))
    saved = torch.optim.Adam([weight], weight_decay=0.1)
    weight.grad = torch.ones(2)
    saved.step()
    optimizer = cstorch.optim.Adam([weight])
    optimizer.load_state_dict(saved.state_dict())
    assert (optimizer.param_groups[0]["l2_regularization_rate"], optimizer.param_groups[0]["weight_decay"]) == (
        0.1,
        0.0,
    )
    optimizer.step()


WRONG = {
    "rate": lambda w: cstorch.optim.AdamW(w, lr=-1.0),
    "beta": lambda w: cstorch.optim.NAdam(w, betas=(0.9, 1.0)),
    "rate twice": lambda w: cstorch.optim.Adafactor(w, lr=0.1, relative_step=True),
    "no rate": lambda w: cstorch.optim.Adafactor(w, lr=None),
    "warm-up of nothing": lambda w: cstorch.optim.Adafactor(w, lr=0.1, warmup_init=True),
    "eps": lambda w: cstorch.optim.Adafactor(w, lr=0.1, eps=1e-3),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_numbers_are_refused(case):
    with pytest.raises(OptimizerError):
        WRONG[case]([nn.Parameter(torch.ones(2))])


# -- the base class --


class Counting(fl.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1}, enable_global_step=True)

    def update(self, weights, gradients, group):
        for p, g in zip(weights, gradients, strict=True):
            p.sub_(g * (group["lr"] / self.increment_global_step(p)))


Counting.matrices = False


def test_global_steps_count_in_a_traced_step(backend):
    _, eager = train(Counting)
    _, traced = train(Counting, fl.trace, lambda model: fl.compile(model, backend))
    for (_, expected), (_, actual) in zip(eager, traced, strict=True):
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=5e-15)


def test_steps_are_counted_only_on_request():
    optimizer = fl.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(OptimizerError, match="enable_global_step=True"):
        optimizer.increment_global_step(optimizer.param_groups[0]["params"][0])


def test_visit_state_maps_the_state():
    weight = nn.Parameter(torch.ones(2))
    optimizer = Counting([weight])
    optimizer.visit_state(lambda entry: entry + 3)
    assert optimizer.state[weight]["step"] == 3
    seen = []
    optimizer.visit_state(seen.append)
    assert optimizer.state[weight]["step"] == 3 and len(seen) == 1


def test_apply_calls_the_algorithm():
    optimizer = Counting([nn.Parameter(torch.ones(2))])
    assert optimizer.apply(lambda o: o) is optimizer
    assert optimizer.apply(type("Algorithm", (), {"apply": lambda self, o: [o]})()) == [optimizer]
    with pytest.raises(OptimizerError, match="int"):
        optimizer.apply(3)


def test_hooks_run_around_zero_grad():
    weight = nn.Parameter(torch.ones(2))
    optimizer = cstorch.optim.AdamW([weight])
    seen = []
    before = optimizer.register_zero_grad_pre_hook(lambda o, args, kwargs: ((), {"set_to_none": False}))
    after = optimizer.register_zero_grad_post_hook(lambda o, args, kwargs: seen.append(kwargs))
    weight.grad = torch.ones(2)
    optimizer.zero_grad()
    assert torch.equal(weight.grad, torch.zeros(2)) and seen == [{"set_to_none": False}]
    before.remove(), after.remove()
    optimizer.zero_grad()
    assert weight.grad is None and len(seen) == 1
    optimizer.register_zero_grad_pre_hook(lambda o, args, kwargs: 3)
    with pytest.raises(OptimizerError, match=r"must return None or \(args, kwargs\)"):
        optimizer.zero_grad()
