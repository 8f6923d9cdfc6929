"""The small training that tests share: a model of two layers, its optimizer, its batches."""

import functools

import torch
from torch import nn

import firstloss as fl


def layers():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def build(backend, model=layers, optimizer=None):
    """A module of the backend's, its optimizer, and what is called in a step."""
    with backend.device:
        module = model()
    if optimizer is None:
        optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return module, optimizer(module.parameters()), fl.compile(module, backend)


def batches(count):
    data = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(6, 4, generator=data)
