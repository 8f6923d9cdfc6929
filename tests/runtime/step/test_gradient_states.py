"""Which weights require a gradient, and have one: guarded however a step reaches them, as generated programs show."""

import random
import textwrap

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.runtime.step import compiling
from tests.fuzz.interpret import interpreted

# How the weights a, b and c are held: a function that returns the loss, and what an optimizer may get.
HELD = {
    "by a model": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = a, b, c
    def forward(self, x): return ((x * self.a).tanh() * self.b + self.c).square().sum()
loss_of = fl.compile(Model(), backend)
""",
    "by a model that is not compiled": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = nn.ParameterList([a, b, c])
    def forward(self, x): return ((x * self.held[0]).tanh() * self.held[1] + self.held[2]).square().sum()
loss_of = Model()
""",
    "by names": "def loss_of(x): return ((x * a).tanh() * b + c).square().sum()",
    "in a dict": """
held = {"a": a, "b": b, "c": c}
def loss_of(x): return ((x * held["a"]).tanh() * held["b"] + held["c"]).square().sum()
""",
    "in a tuple of lists": """
held = ([a], [b, c])
def loss_of(x): return ((x * held[0][0]).tanh() * held[1][0] + held[1][1]).square().sum()
""",
    "by an object": """
class Held: pass
held = Held()
held.weights = [a, b, c]
def loss_of(x):
    scale, factor, shift = held.weights
    return ((x * scale).tanh() * factor + shift).square().sum()
""",
    "by a partial function": """
loss_of = functools.partial(lambda a, b, c, x: ((x * a).tanh() * b + c).square().sum(), a, b, c)
""",
    "by a closure": """
def made(a, b, c):
    def loss_of(x): return ((x * a).tanh() * b + c).square().sum()
    return loss_of
loss_of = made(a, b, c)
""",
    "by default arguments": "def loss_of(x, a=a, b=b, c=c): return ((x * a).tanh() * b + c).square().sum()",
    "by an optimizer": """
def loss_of(x):
    a, b, c = (p for group in optimizer.param_groups for p in group["params"])
    return ((x * a).tanh() * b + c).square().sum()
""",
}

# What eager PyTorch does before the step, and what is traced.
STEPS = {
    "a whole step": ("", "optimizer.zero_grad(); loss_of(x).backward(); optimizer.step()"),
    "gradients that accumulate": ("", "loss_of(x).backward(); optimizer.step()"),
    "a backward pass": ("optimizer.step()", "loss_of(x).backward()"),
    "an update": ("loss_of(x).backward()", "optimizer.step()"),
    "an update and zero_grad": ("loss_of(x).backward()", "optimizer.step(); optimizer.zero_grad()"),
    "zero_grad": ("loss_of(x).backward(); optimizer.step()", "optimizer.zero_grad(set_to_none=False)"),
    "clipping": (
        "loss_of(x).backward()",
        "torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group['params']], 0.1)",
    ),
    "an update by hand": (
        "loss_of(x).backward()",
        """
with torch.no_grad():
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p -= 0.1 * p.grad
            if p.requires_grad:
                p.mul_(0.99)""",
    ),
}

# What changes between two calls.
EVENTS = (
    "{0}.grad = None",
    "{0}.grad = torch.full_like({0}, 0.5)",
    "{0}.requires_grad_(False)",
    "{0}.requires_grad_(True)",
    "{0}.requires_grad_(False); {0}.grad = None",
    "optimizer.zero_grad()",
)


def states(backend, held, step, events):
    before, traced = step
    scope: dict = {"nn": nn, "torch": torch, "fl": fl, "backend": backend, "__name__": "generated"}
    exec("import functools", scope)
    generator = torch.Generator().manual_seed(0)
    for name in "abc":
        scope[name] = nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64))
    scope["x"] = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    exec("optimizer = torch.optim.SGD([a, b, c], lr=0.1, momentum=0.9)", scope)
    exec(held, scope)
    exec("@fl.trace\ndef step():\n    x" + textwrap.indent(f"\n{traced}\n", "    "), scope)
    found = []
    for event in events:
        scope["x"].add_(0.01)
        exec(before, scope)
        exec(event, scope)
        scope["step"]()
        values = {name: scope[name].detach().clone() for name in "abc"}
        grads = {f"{name}.grad": None if (g := scope[name].grad) is None else g.clone() for name in "abc"}
        found.append(values | grads)
    return found


def generated(seed):
    draw = random.Random(seed)
    events = []
    for _ in range(10):
        some = [draw.choice(EVENTS).format(draw.choice("abc")) for _ in range(draw.choice((0, 0, 1, 1, 2)))]
        # A backward pass needs a weight that requires a gradient.
        events.append("\n".join([*some, "if not (a.requires_grad or b.requires_grad): c.requires_grad_(True)"]))
    return events


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("step", STEPS)
def test_gradients_and_requires_grad_may_change_between_calls(held, step, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "compile_step", interpreted)  # by PyTorch's kernels, which is fast
    events = generated(f"{held} {step}")
    expected = states(fl.backend("CPU"), HELD[held], STEPS[step], events)
    actual = states(fl.backend("XLA", artifact_dir=tmp_path), HELD[held], STEPS[step], events)
    for call, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        # A momentum's multiplication and addition are rounded once here, and twice there.
        torch.testing.assert_close(
            ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, call=call: f"{text} at call {call}: {events}"
        )
