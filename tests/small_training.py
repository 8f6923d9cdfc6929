"""The shared small training: a model of two layers, its optimizer, step and batches."""

import functools

import torch
from torch import nn

import firstloss as fl


def layers():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def build(backend, model=layers, optimizer=None):
    """A module on the backend, its optimizer, and the compiled model to call in a step."""
    with backend.device:
        module = model()
    if optimizer is None:
        optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return module, optimizer(module.parameters()), fl.compile(module, backend)


def training_step(compiled, optimizer, loss=lambda module, x: module(x).square().mean()):
    """A traced step: zero_grad, loss, backward pass, update."""

    @fl.trace
    def step(x):
        optimizer.zero_grad()
        value = loss(compiled, x)
        value.backward()
        optimizer.step()
        return value

    return step


def scaled_step(backend, scale):
    """A traced step of a new model, whose loss is multiplied by `scale()`, called in the step."""
    _, optimizer, compiled = build(backend)
    return training_step(compiled, optimizer, lambda module, x: module(x).square().mean() * scale())


def batches(count, features=4, dtype=None):
    data = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(6, features, generator=data, dtype=dtype)


def on_both(run, folder):
    """The results of `run(backend)` in eager PyTorch and traced."""
    return run(fl.backend("CPU")), run(fl.backend("XLA", artifact_dir=folder))
