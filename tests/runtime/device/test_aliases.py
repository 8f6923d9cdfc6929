"""Aliases that a constructor creates between weights, buffers, attributes and outside memory.

They are as in eager PyTorch, whether weights are captured or moved at once.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl

OUTSIDE: list = []  # references that a constructor stores elsewhere


def _tied_by_data(s):
    s.b.weight = nn.Parameter(s.a.weight.data)


def _tied_transposed(s):
    s.b.weight = nn.Parameter(s.a.weight.data.t())


def _buffer_of_rows(s):
    s.register_buffer("rows", s.a.weight.detach()[1:3])


def _numpy_edited_later(s):
    array = s.a.weight.detach().numpy()
    s.b = nn.Linear(4, 4)
    array *= 0.5


def _alias_edited_later(s):
    alias = s.a.weight.data
    s.b, s.c = nn.Linear(4, 4), nn.Linear(4, 4)
    alias.mul_(2)


def _one_parameter_for_all(s):
    s.flat = nn.Parameter(torch.randn(40))
    s.a.weight = nn.Parameter(s.flat.data[:16].view(4, 4))
    s.b.weight = nn.Parameter(s.flat.data[16:32].view(4, 4))


def _exchanged(s):
    s.a.weight.data, s.b.weight.data = s.b.weight.data, s.a.weight.data


def _in_a_list(s):
    s.shown = [s.a.weight.detach(), s.b.bias.data[1:]]


def _tied_by_numpy(s):
    s.b.weight = nn.Parameter(torch.from_numpy(s.a.weight.detach().numpy()))


def _tied_by_dlpack(s):
    s.b.weight = nn.Parameter(torch.from_dlpack(s.a.weight.detach()).t())
    s.register_buffer("row", torch.from_dlpack(s.a.weight.detach())[0])


def _tied_and_copied(s):
    s.b.weight = nn.Parameter(s.a.weight.data[:])
    s.again = copy.deepcopy(nn.ModuleList([s.a, s.b]))


def _part_of_a_storage(s):
    storage = s.a.weight.untyped_storage()
    s.b = nn.Linear(4, 4)
    s.register_buffer("corner", torch.empty(0).set_(storage, 4, (2, 2), (4, 1)))


def _alias_outside(s):
    OUTSIDE.append(s.a.weight.detach())


def _numpy_outside(s):
    array = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    s.a.weight = nn.Parameter(torch.from_numpy(array))
    s.b.weight = nn.Parameter(torch.from_numpy(array.T))
    OUTSIDE.append(array)


ALIASES = [
    _tied_by_data,
    _tied_transposed,
    _buffer_of_rows,
    _numpy_edited_later,
    _alias_edited_later,
    _one_parameter_for_all,
    _exchanged,
    _in_a_list,
    _tied_by_numpy,
    _tied_by_dlpack,
    _tied_and_copied,
    _part_of_a_storage,
    _alias_outside,
    _numpy_outside,
]


class Model(nn.Module):
    def __init__(self, alias):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        alias(self)

    def forward(self, x):
        for module in self.modules():
            x = module(x) if isinstance(module, nn.Linear) else x
        return x + sum(b.sum() for b in self.buffers()) + sum(t.sum() for t in getattr(self, "shown", ()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("artifacts")


def _program(alias, backend, lazy):
    torch.manual_seed(0)
    OUTSIDE.clear()
    if backend is None:
        model = compiled = Model(alias)
    else:
        backend.device.config.lazy_initialization = lazy
        with backend.device:
            model = Model(alias)
        compiled = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = step if backend is None else fl.trace(step)
    x, seen = torch.linspace(-1, 1, 8).view(2, 4), []
    for i in range(3):
        seen.append(step(x).item())
        with torch.no_grad():
            model.a.weight.mul_(0.9)
        for held in OUTSIDE if i == 1 else ():
            held[1] = 0.25
        seen += [t.detach().clone().numpy() for t in model.state_dict().values()]
        seen += [t.clone().numpy() if isinstance(t, torch.Tensor) else t.copy() for t in OUTSIDE]
        seen += [t.clone().numpy() for t in getattr(model, "shown", ())]
    return seen


@pytest.mark.parametrize("lazy", [True, False], ids=["captured", "at once"])
@pytest.mark.parametrize("alias", ALIASES, ids=lambda f: f.__name__.strip("_"))
def test_aliases_from_a_constructor_are_kept(folder, alias, lazy):
    traced = _program(alias, fl.backend("XLA", artifact_dir=folder), lazy)
    eager = _program(alias, None, lazy)
    assert len(traced) == len(eager)
    for a, b in zip(traced, eager, strict=True):
        # float32 sums in another order, over three steps.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
