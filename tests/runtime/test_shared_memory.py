"""The memory of a tensor on the backend, past PyTorch's dispatcher: as eager PyTorch's is.

Each case runs one program eagerly and on the backend: who gets at the memory of a tensor (a way), of what kind, when,
and goes on to look at it and edit it between steps.
"""

import ctypes

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

NUMPYS = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.int16, torch.int64: np.int64}


# -- ways to get at the memory of a tensor: each gives an array of numpy's on it ---------------------------------------


def _at(address, like):
    """An array on raw memory, laid out as `like`: what C++ would do with a pointer."""
    kind = np.dtype(NUMPYS[like.dtype])
    if not like.numel():
        return np.empty(tuple(like.shape), kind)
    span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    flat = np.frombuffer((ctypes.c_char * (span * like.itemsize)).from_address(address), kind)
    strides = [s * like.itemsize for s in like.stride()]
    return np.lib.stride_tricks.as_strided(flat, tuple(like.shape), strides)


def _bits(t):
    """What numpy takes of it."""
    return t.view(torch.int16) if t.dtype == torch.bfloat16 else t


def _of_storage(t, storage):
    real = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), tuple(t.shape), t.stride())
    return _bits(real).numpy()


WAYS = {
    "numpy": lambda t: _bits(t).numpy(),
    "numpy(force=True)": lambda t: _bits(t).numpy(force=True),
    "np.asarray": lambda t: np.asarray(_bits(t)),
    "__array__": lambda t: _bits(t).__array__(),
    "__dlpack__": lambda t: np.from_dlpack(_bits(t)),
    "torch.from_dlpack": lambda t: _bits(torch.from_dlpack(t)).numpy(),
    "to_dlpack": lambda t: _bits(torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t))).numpy(),
    "data_ptr": lambda t: _at(t.data_ptr(), t),
    "untyped_storage": lambda t: _of_storage(t, t.untyped_storage()),
    "untyped_storage().data_ptr()": lambda t: _at(
        t.untyped_storage().data_ptr() + t.storage_offset() * t.itemsize * bool(t.numel()), t
    ),
    "storage": lambda t: _of_storage(t, t.storage().untyped()),
    "storage().data_ptr()": lambda t: _at(
        t.storage().data_ptr() + t.storage_offset() * t.itemsize * bool(t.numel()), t
    ),
    "set_": lambda t: _bits(torch.empty(0, dtype=t.dtype).set_(t)).numpy(),
    "an alias's numpy": lambda t: _bits(t.data).numpy(),
    "memoryview": lambda t: np.asarray(memoryview(_bits(t).numpy())),
    "torch.from_numpy": lambda t: torch.from_numpy(_bits(t).numpy()).numpy(),
    "a flat view": lambda t: _bits(t.reshape(-1)).numpy() if t.is_contiguous() else _bits(t).numpy(),
}


# -- kinds of tensor ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """One tensor of each kind that a step changes, and some that it only reads."""

    def __init__(self):
        super().__init__()
        self.big = nn.Parameter(torch.randn(160, 128))  # more than 64 KiB: memory of the device's own
        self.small = nn.Parameter(torch.randn(4, 3))
        self.column_major = nn.Parameter(torch.randn(3, 5).t())
        self.big_column_major = nn.Parameter(torch.randn(128, 160).t())
        self.bf16 = nn.Parameter(torch.randn(6, 4).bfloat16())
        self.f64 = nn.Parameter(torch.randn(7).double())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one = nn.Parameter(torch.randn(1, 5, 1))
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(12).reshape(3, 4))

    def forward(self, x):
        self.count += 1
        self.table += self.count
        total = sum((p.float() * x).square().sum() for p in self.parameters())
        return total * 1e-3


KINDS = {
    "float32": lambda m: m.small.detach(),
    "64 KiB and more": lambda m: m.big.detach(),
    "a row": lambda m: m.big.detach()[3],
    "a slice with an offset and gaps": lambda m: m.small.detach()[1:, ::2],
    "transposed": lambda m: m.small.detach().t(),
    "one element": lambda m: m.small.detach()[2, 1],
    "expanded": lambda m: m.scalar.detach().expand(3, 2),
    "column-major": lambda m: m.column_major.detach(),
    "column-major, 64 KiB": lambda m: m.big_column_major.detach(),
    "bfloat16": lambda m: m.bf16.detach(),
    "float64": lambda m: m.f64.detach(),
    "0-dim": lambda m: m.scalar.detach(),
    "empty": lambda m: m.empty.detach(),
    "dimensions of one": lambda m: m.one.detach(),
    "a frozen weight": lambda m: m.frozen.data,
    "a buffer": lambda m: m.table,
    "a 0-dim buffer": lambda m: m.count,
    "of state_dict()": lambda m: m.state_dict()["small"],
    "an empty slice": lambda m: m.small.detach()[1:1],
}


class Run:
    def __init__(self, backend=None, optimizer=lambda p: torch.optim.SGD(p, 0.25), make=Net):
        torch.manual_seed(0)
        if backend is None:
            self.model = self.compiled = make()
        else:
            with backend.device:
                self.model = make()
            self.compiled = fl.compile(self.model, backend)
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.step = self._step if backend is None else fl.trace(self._step)
        self.x = torch.tensor(1.5)

    def _step(self, x):
        loss = self.compiled(x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def close(ours, theirs, what=""):
    # A step's sums in another order: a few units in the last place of float32, and of bfloat16.
    half = ours.dtype == np.int16
    if half:
        ours, theirs = (torch.from_numpy(a.copy()).view(torch.bfloat16).float().numpy() for a in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, rtol=1e-2 if half else 1e-5, atol=1e-6, err_msg=what)


def _edit(held):
    """An edit through numpy, of what can be edited."""
    if held.size and held.flags.writeable and 0 not in held.strides:
        held[...] = (
            held + 3
            if held.dtype.kind == "i" and held.dtype != np.int16
            else held * 0 + (16256, 1)[held.dtype.kind == "f"]
        )


def program(run, way, moment):
    """What somebody sees who takes hold of memory of all kinds at `moment`, keeps it, and edits it between steps."""
    if moment != "before the first step":
        loss = run.step(run.x)
        if moment == "between steps":
            loss.item()
    held = {kind: way(of(run.model)) for kind, of in KINDS.items()}
    seen = []

    def look(when):
        seen.extend((f"{kind}, {when}", array.copy()) for kind, array in held.items())

    look("when it was taken")
    run.step(run.x)
    look("after a step")  # which may be under way
    for kind, array in held.items():
        _edit(array)
        seen.append((f"{kind}, by PyTorch, edited", _bits(KINDS[kind](run.model)).clone().numpy()))
    run.step(run.x)
    look("after an edit and a step")
    for of in KINDS.values():
        tensor = of(run.model)
        if 0 not in tensor.stride():
            tensor.mul_(2)
    look("after an edit by PyTorch")
    run.step(run.x)
    run.step(run.x)
    look("in the end")
    for kind, of in KINDS.items():
        seen.append((f"{kind}, taken again", way(of(run.model)).copy()))
        seen.append((f"{kind}, by PyTorch", _bits(of(run.model)).clone().numpy()))
    return seen


MOMENTS = ("before the first step", "between steps", "after a step that is under way")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
def backend(folder):
    """A backend that compiles what all tests compile once."""
    return fl.backend("XLA", artifact_dir=folder)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_weights_own_memory(backend, way, moment):
    theirs = program(Run(), WAYS[way], moment)
    ours = program(Run(backend), WAYS[way], moment)
    for (what, a), (also, b) in zip(ours, theirs, strict=True):
        assert what == also and a.dtype == b.dtype and a.shape == b.shape, what
        close(a, b, what)
