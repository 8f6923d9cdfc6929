"""Steps of loops over time: offsets and numbers as operands, and one function for all steps."""

import math

import jax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import firstloss as fl
from firstloss.lower import segments
from firstloss.lower.program import View, read_view, write_view
from firstloss.lower.views import strided_positions

from .harness import to_array, to_tensor

STEPS = 60


@st.composite
def geometries(draw):
    """Size, stride and offset of a view without overlaps or with, and the length of its memory."""
    size = draw(st.lists(st.integers(1, 4), max_size=3))
    stride = [draw(st.integers(0, 12)) for _ in size]
    offset = draw(st.integers(0, 9))
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return tuple(size), tuple(stride), offset, offset + extent + draw(st.integers(0, 5))


@given(geometries())
def test_a_view_that_starts_at_an_operand_is_the_view(geometry):
    size, stride, offset, length = geometry
    base = torch.arange(float(length))
    view = View((length,), (1,), base.dtype, size, stride, 0, base.dtype)
    with jax.enable_x64(True):
        actual = jax.jit(lambda base, start: read_view(base, view, start))(to_array(base), offset)
        new = -torch.arange(float(math.prod(size))).view(size)
        write = jax.jit(lambda base, new, start: write_view(base, new, view, start))
        written = write(to_array(base), to_array(new), offset)
        positions = strided_positions(size, stride, 0).reshape(-1).tolist()
    assert torch.equal(to_tensor(actual, base.dtype), base.as_strided(size, stride, offset))
    if len(set(positions)) == new.numel():  # else which is written last?
        base.as_strided(size, stride, offset).copy_(new)
        assert torch.equal(to_tensor(written, base.dtype), base)


class Cell(nn.Module):
    """A loop as users write it."""

    def __init__(self, read):
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.read = read

    def forward(self, x):
        h, outputs = x.new_zeros(x.shape[0], 8), []
        for part in self.read(x):
            h = self.cell(part, h)
            outputs.append(h)
        return torch.stack(outputs, 1)


class Filling(Cell):
    """As in tutorials on translation, with the outputs written to a tensor that was there before."""

    def forward(self, x):
        parts = self.read(x)
        h, outputs = x.new_zeros(x.shape[0], 8), torch.zeros(len(parts), x.shape[0], 8)
        for t, part in enumerate(parts):
            h = self.cell(part, h)
            outputs[t] = h
        return outputs


class Flow(nn.Module):
    """A differential equation with fixed steps; `number` makes the time, and what depends on it."""

    def __init__(self, number):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.number = number

    def forward(self, x):
        x = x[:, 0]
        for i in range(STEPS):
            t = self.number((i + 1) / STEPS)
            drift = self.layer(x * t + t).tanh()
            x = (x - drift * ((1 - t) / STEPS)) / (1 + t / STEPS)
        return x


class First(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


MODELS = {
    "RNN": lambda: First(nn.RNN(6, 8, batch_first=True)),
    "GRU": lambda: First(nn.GRU(6, 8, 2, batch_first=True)),
    "GRU, both directions": lambda: First(nn.GRU(6, 8, bidirectional=True, batch_first=True)),
    "a loop over indices": lambda: Cell(lambda x: [x[:, t] for t in range(x.shape[1])]),
    "a loop over a list": lambda: Cell(lambda x: x.unbind(1)),
    "a loop over slices": lambda: Cell(lambda x: [x[:, t : t + 2].mean(1) for t in range(x.shape[1] - 1)]),
    "a loop that fills a tensor": lambda: Filling(lambda x: [x[:, t] for t in range(x.shape[1])]),
    "a differential equation": lambda: Flow(lambda t: t),
    "a differential equation, time in tensors": lambda: Flow(torch.tensor),
    "a differential equation in half precision": lambda: Flow(lambda t: t).bfloat16(),
    "a loop backwards": lambda: Cell(lambda x: [x[:, -t] for t in range(1, x.shape[1])]),
}


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_a_loop_are_one_function_and_train_as_eager(name, tmp_path, monkeypatch):
    cuts = []
    cut = segments.cut
    monkeypatch.setattr(
        "firstloss.runtime.step.segmentation.cut", lambda *args, **kwargs: cuts.append(cut(*args, **kwargs)) or cuts[-1]
    )

    def losses(call, parameters, trace):
        optimizer = torch.optim.SGD(parameters, lr=0.5)

        def step(x):
            loss = call(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = trace(step)
        return [step(x).item() for _ in range(3)]

    torch.manual_seed(0)
    x = torch.randn(4, STEPS, 6, dtype=torch.bfloat16 if "half" in name else torch.float32)
    eager = MODELS[name]()
    torch.manual_seed(0)
    torch.randn_like(x)
    backend = fl.backend("XLA", artifact_dir=str(tmp_path))
    with backend.device:
        model = MODELS[name]()
    actual = losses(fl.compile(model, backend), model.parameters(), fl.trace)
    expected = losses(eager, eager.parameters(), lambda step: step)
    # Sums over 60 steps in another order: of float32, or of bfloat16, which has 8 bits.
    tolerance = 0.03 if "half" in name else 1e-4
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=tolerance, atol=0)
    pieces = cuts[-1].segments
    compiled = {piece.function: len(piece.calls) for piece in pieces}
    assert sum(compiled.values()) < sum(len(piece.calls) for piece in pieces) / 3
