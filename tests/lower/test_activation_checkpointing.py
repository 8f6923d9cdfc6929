"""torch.utils.checkpoint in a step: the same losses and gradients with less memory."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import firstloss as fl
from firstloss.runtime.step import compiling

WIDTH, ROWS, LAYERS = 64, 512, 8


class Layer(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.down(self.dropout(torch.tanh(self.up(x)).exp().sin()))


class Model(nn.Module):
    def __init__(self, kind, dropout):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))
        self.kind = kind

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.kind is None else checkpoint(layer, x, use_reentrant=self.kind == "reentrant")
        return x


def train(tmp_path, monkeypatch, kind, dropout, steps=2):
    """Losses and gradients of a few steps, and the executable's scratch memory in bytes."""
    backend = fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled")
    torch.manual_seed(0)
    with backend.device:
        model = Model(kind, dropout)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        return loss

    executables = []
    compile_step = compiling.compile_step

    def keep(*args):
        executables.append(compile_step(*args))
        return executables[-1]

    monkeypatch.setattr(compiling, "compile_step", keep)
    x = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).requires_grad_(kind == "reentrant")
    losses = []
    for _ in range(steps):
        losses.append(float(step(x)))
        grads = [p.grad.clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
    return losses, grads, memory_of(executables[-1])


def memory_of(step):
    (executable,) = step.executables  # a step in which nothing repeats
    return executable.memory_analysis().temp_size_in_bytes


@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_memory_is_saved_and_values_are_the_same(tmp_path, monkeypatch, kind):
    losses, grads, plain = train(tmp_path, monkeypatch, None, 0.0)
    again, same_grads, checkpointed = train(tmp_path, monkeypatch, kind, 0.0)
    assert again == losses
    for actual, expected in zip(same_grads, grads, strict=True):
        # the same operations, fused differently: a few ulp of a gradient's largest element
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    # Without checkpointing, three activations of (512, 256) per layer are alive at the end of the forward pass. With it
    # only inputs are, a fourth of one each; plus two more for layers whose weight gradients the scheduler delays.
    kept = ROWS * 4 * WIDTH * 4
    assert plain > 3 * LAYERS * kept
    assert checkpointed < 0.6 * plain


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_recomputed_dropout_has_the_same_mask(tmp_path, monkeypatch, kind):
    losses, grads, _ = train(tmp_path, monkeypatch, None, 0.5)
    again, same_grads, _ = train(tmp_path, monkeypatch, kind, 0.5)
    assert again == losses and losses[0] != losses[1]
    for actual, expected in zip(same_grads, grads, strict=True):
        # as above
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
