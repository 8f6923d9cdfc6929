"""Optimizers that other people have published, in traced steps: the same losses and weights as in eager PyTorch."""

import pytest
import torch
from torch import nn

import firstloss as fl

pytorch_optimizer = pytest.importorskip("pytorch_optimizer", reason="is of requirements/no-deps.txt")

# Those that one is enough to test of each kind: numbers read from the device, lists of tensors, numbers in groups that
# change, decompositions, two sets of weights, a first step that differs, state created at a later step.
REPRESENTATIVES = ["prodigy", "dadaptadam", "soap", "schedulefreeadamw", "adopt", "galore", "shampoo", "ranger", "asgd",
                   "adashift"]  # fmt: skip
DRAW = {
    "gravity": "its first velocity is drawn, in a traced step by the device",
    "kron": "likewise, what its preconditioner is updated with",
}
# These compute products of weights in bfloat16, or keep state in 8 bits: what is rounded otherwise is 4e-3 of a value.
IN_FEWER_BITS = {"scion", "scionlight", "flashadamw"}
OPTIMIZERS = sorted(pytorch_optimizer.optimizer.OPTIMIZERS)


def train(name, backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    compiled = fl.compile(model, backend)
    optimizer = pytorch_optimizer.optimizer.OPTIMIZERS[name](model.parameters())

    @fl.trace
    def step(x):
        optimizer.zero_grad()
        loss = (compiled(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    generator, losses = torch.Generator().manual_seed(1), []
    for i in range(7):
        if i == 4:
            optimizer.param_groups[0]["lr"] *= 0.5
        losses.append(step(torch.randn(5, 6, generator=generator)).detach().clone())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def check(name, tmp_path):
    if name in DRAW:
        pytest.skip(DRAW[name])
    try:
        expected = train(name, fl.backend("CPU"))
    except Exception as error:  # it takes other arguments, a closure, or float32 alone
        pytest.skip(f"in eager PyTorch: {type(error).__name__}: {error}")
    actual = train(name, fl.backend("XLA", artifact_dir=tmp_path))
    close = 1e-4 if name in IN_FEWER_BITS else 1e-10  # float64, summed in another order
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_training_is_as_in_eager_pytorch(name, float64, tmp_path):
    check(name, tmp_path)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in REPRESENTATIVES])
def test_training_is_as_in_eager_pytorch_with_any(name, float64, tmp_path):
    check(name, tmp_path)
