"""Models, optimizers and steps that nobody holds any more are freed, whatever Python is between them: the classes of a
notebook's cell, run again, are others, and a search over settings trains many models on one backend."""

import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import threading
import time
import types
import typing
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.runtime.step import cache, cache_entries

X = torch.ones(2, 4)


def train(model, optimizer, x, scale=1.0):
    optimizer.zero_grad()
    loss = model(x).pow(2).sum() * scale
    loss.backward()
    optimizer.step()
    return loss


# Each makes the step `(call)`: what it defines here is reached only from the step, and refers to it.

CASES = {
    "function": "step = fl.trace(lambda x: train(model, optimizer, x))",
    "method": """
class Trainer:
    @fl.trace
    def step(self, x): return train(model, optimizer, x)
step = Trainer().step
""",
    "batch": """
class Batch:
    def __init__(self): self.x, self.scale = torch.ones(2, 4), 2.0
traced = fl.trace(lambda batch: train(model, optimizer, batch.x, batch.scale))
step = lambda x: traced(Batch())
""",
    "slots": """
class Trainer:
    __slots__ = ("scale",)
    def __init__(self): self.scale = 2.0
    @fl.trace
    def step(self, x): return train(model, optimizer, x, self.scale)
step = Trainer().step
""",
    "dataclass": """
@dataclasses.dataclass
class Config:
    scale: float = 2.0
    model: object = None
config = Config(2.0, model)
step = Config.step = fl.trace(lambda x: train(config.model, optimizer, x, config.scale))
""",
    "enumeration": """
class Mode(enum.Enum):
    A = 1
mode = [Mode.A]
step = Mode.step = fl.trace(lambda x: train(model, optimizer, x, mode[0].value))
""",
    "exception": """
class Stop(Exception): pass
kept = [Stop("a", 1.0)]
step = Stop.step = fl.trace(lambda x: train(model, optimizer, x, kept[0].args[1]))
""",
    "named tuple": """
class Point(typing.NamedTuple): scale: float
point = Point(2.0)
step = Point.step = fl.trace(lambda x: train(model, optimizer, x, point.scale))
""",
    "autograd function": """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, grad): return grad * 2
step = Double.step = fl.trace(lambda x: train(lambda x: Double.apply(model(x)), optimizer, x))
""",
    "module": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, x): return self.inner(x)
net = Net()
step = Net.step = fl.trace(lambda x: train(net, optimizer, x))
""",
    "optimizer": """
class Plain(torch.optim.Optimizer):
    def __init__(self, parameters): super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]: p.add_(p.grad, alpha=-group["lr"])
plain = Plain(model.parameters())
step = Plain.of_step = fl.trace(lambda x: train(model, plain, x))
""",
    "scheduler": """
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
@fl.trace
def step(x):
    loss = train(model, optimizer, x)
    scheduler.step()
    return loss
""",
    "hook": "held = []; step = fl.trace(lambda x: train(model, optimizer, x)); held.append(step)\n"
    "model.register_forward_hook(lambda module, args, out: (held, out * 2)[1])",
    "caches of methods": """
class Trainer:
    @functools.lru_cache
    def scale(self): return 2.0
    @functools.cached_property
    def other(self): return 3.0
    @fl.trace
    def step(self, x): return train(model, optimizer, x, self.scale() * self.other)
step = Trainer().step
""",
    "value read": """
class Trainer:
    log = []
    @fl.trace
    def step(self, x):
        loss = train(model, optimizer, x)
        if loss.item() > 1e9: self.log.append(1)
        return loss
step = Trainer().step
""",
    "tensors kept": """
class Averages(dict): pass
averages = Averages()
@fl.trace
def step(x):
    loss = train(model, optimizer, x)
    for name, p in model.named_parameters(): averages[name] = averages.get(name, 0.0) * 0.9 + p.detach() * 0.1
    return loss
Averages.step = step
""",
    "step closure": """
class Trainer:
    @fl.step_closure
    def show(self, loss): self.shown = float(loss)
    @fl.trace
    def step(self, x):
        loss = train(model, optimizer, x)
        self.show(loss)
        return loss
step = Trainer().step
""",
    "generator": """
def scales():
    while True: yield 2.0
values = scales()
step = fl.trace(lambda x: train(model, optimizer, x, next(values)))
""",
    "metaclass": """
class Meta(abc.ABCMeta): pass
class Trainer(metaclass=Meta):
    scale = 2.0
    @fl.trace
    def step(self, x): return train(model, optimizer, x, self.scale)
Meta.trainer = Trainer
step = Trainer().step
""",
    "containers": """
class D(collections.UserDict): pass
class L(list): pass
d, l = D(scale=2.0), L([1.0])
@fl.trace
def step(x):
    l.append(0.0)
    l.pop()
    return train(model, optimizer, x, d["scale"] * l[0])
D.step = L.step = step
""",
    "NumPy": """
values = np.ones(3)
class Trainer:
    rng = np.random.RandomState(0)
    @fl.trace
    def step(self, x): return train(model, optimizer, x, float(values[0]) + 0.0 * self.rng.rand())
step = Trainer().step
""",
    "control flow": """
class Trainer:
    @fl.trace
    def step(self, x): return torch.cond(x.sum() > 0, lambda t: model(t) * 2, lambda t: model(t), (x,)).sum()
step = Trainer().step
""",
    "data of a thread": """
local = threading.local()
local.scale = 2.0
step = local.step = fl.trace(lambda x: train(model, optimizer, x, local.scale))
""",
    "context managers": """
class Scope:
    def __enter__(self): return 2.0
    def __exit__(self, *exception): return False
@contextlib.contextmanager
def scope(): yield 2.0
@fl.trace
def step(x):
    with scope() as a, Scope() as b: return train(model, optimizer, x, a * b)
Scope.step = step
""",
    "autocast and scaler": """
class Trainer:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    @fl.trace
    def step(self, x):
        with torch.autocast("cpu", torch.bfloat16): loss = model(x).float().sum()
        optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        return loss
step = Trainer().step
""",
}
MODULES = (abc, collections, contextlib, dataclasses, enum, functools, threading, types, typing)
NAMES = {**{each.__name__: each for each in MODULES}, "np": np, "nn": nn, "torch": torch, "fl": fl, "train": train}


def trained(backend, case):
    """Train a model on `backend`; returns references to it, its first weight, its optimizer, and the step's owner."""
    with backend.device:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    compiled, optimizer = fl.compile(model, backend), torch.optim.SGD(model.parameters(), lr=0.1)
    scope = {**NAMES, "model": compiled, "optimizer": optimizer, "__name__": "cell"}
    exec(CASES[case], scope)
    for _ in range(3):
        scope["step"](X).item()
    return [weakref.ref(each) for each in (model, model[0].weight, compiled, optimizer)]


def kept(references, most=0):
    """What is not freed, once threads in the background have returned from what they did for it."""
    for _ in range(100):
        gc.collect()
        if len(left := [type(each()).__name__ for each in references if each() is not None]) <= most:
            break
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("case", CASES)
def test_what_is_dropped_is_freed(case, backend):
    assert not kept(trained(backend, case))


# One step for all models: `step` is called with (model, optimizer, x), which it gets in these ways.

FOR_ALL = {
    "arguments": "step = fl.trace(train)",
    "globals": """
@fl.trace
def traced(x): return train(model, optimizer, x)
def step(new, its_optimizer, x):
    global model, optimizer
    model, optimizer = new, its_optimizer
    return traced(x)
""",
    "self": """
class Trainer:
    @fl.trace
    def step(self, x): return train(self.model, self.optimizer, x)
def step(model, optimizer, x):
    trainer = trainers.setdefault(id(model), Trainer())
    trainer.model, trainer.optimizer = model, optimizer
    return trainer.step(x)
trainers = {}
""",
    "a loss for each call": """
class Loss(nn.Module):
    def forward(self, y): return y.pow(2).sum()
@fl.trace
def traced(model, optimizer, loss, x): return train(nn.Sequential(model, loss), optimizer, x)
def step(model, optimizer, x): return traced(model, optimizer, Loss(), x)
""",
}


def made(backend):
    with backend.device:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return fl.compile(model, backend), torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("way", FOR_ALL)
def test_one_step_for_many_models_keeps_few_of_them(way, backend, monkeypatch):
    monkeypatch.setattr(cache, "_PATIENCE", 8)
    scope = {**NAMES, "train": train, "__name__": "cell"}
    exec(FOR_ALL[way], scope)
    models = []
    for _ in range(12):
        model, optimizer = made(backend)
        models.append(weakref.ref(model.model))
        for _ in range(4):
            scope["step"](model, optimizer, X)
        scope.get("trainers", {}).clear()
    del model, optimizer
    assert len(kept(models, most=4)) <= 4  # those of some 16 calls


def test_the_steps_of_models_that_are_trained_in_turns_are_kept(backend, monkeypatch):
    monkeypatch.setattr(cache, "_PATIENCE", 8)
    step = fl.trace(train)
    models = [made(backend) for _ in range(4)]

    def turns():
        for model, optimizer in models:
            for _ in range(6):
                step(model, optimizer, X)

    for _ in range(4):  # each turn is longer than steps are kept at first
        turns()
    monkeypatch.setattr(cache_entries.CacheEntries, "_traced", None)  # from now on, nothing is traced
    turns()


def test_a_step_for_all_models_is_not_traced_again_when_one_is_dropped(backend, monkeypatch):
    """Nor when one is added."""

    def make():
        with backend.device:
            model = nn.Linear(4, 3)
        return fl.compile(model, backend)

    first, other = make(), make()
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)

    @fl.trace
    def step(x):
        return train(first, optimizer, x)

    for count in (2, 3):
        for _ in range(3):
            step(torch.ones(count, 4))
    reference = weakref.ref(other.model)
    monkeypatch.setattr(cache_entries.CacheEntries, "_traced", None)  # from now on, nothing is traced
    del other
    assert not kept([reference])
    for count in (2, 3, 2):
        step(torch.ones(count, 4))
    third = make()
    for count in (2, 3, 2):
        step(torch.ones(count, 4))
    assert third is not None


def test_a_dropped_models_weights_that_a_step_reads_are_those_of_its_key(backend):
    """A gradient that has come meanwhile is added to, although the module is gone."""
    with backend.device:
        module = nn.Linear(4, 3)
    weight, reference = module.weight, weakref.ref(module)
    fl.compile(module, backend)

    @fl.trace
    def step(x):
        loss = (x @ weight.t()).sum()
        loss.backward()
        return loss

    step(X)
    first = weight.grad.clone()
    weight.grad = None
    del module
    assert not kept([reference])
    for calls in (1, 2, 3):
        step(X)
        assert torch.equal(weight.grad, calls * first)
