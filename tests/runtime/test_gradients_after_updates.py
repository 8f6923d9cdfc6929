"""What PyTorch's optimizers leave in the gradients: loops over the weights, and operations on lists, may differ."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.runtime.step import compiling
from tests.fuzz.interpret import interpreted

OPTIONS = {
    torch.optim.SGD: {"momentum": (0, 0.9), "weight_decay": (0, 0.1), "nesterov": (False, True)},
    torch.optim.Adam: {"weight_decay": (0, 0.1), "amsgrad": (False, True)},
    torch.optim.AdamW: {"weight_decay": (0, 0.1)},
    torch.optim.Adamax: {"weight_decay": (0, 0.1)},
    torch.optim.NAdam: {"weight_decay": (0, 0.1), "decoupled_weight_decay": (False, True)},
    torch.optim.RAdam: {"weight_decay": (0, 0.1), "decoupled_weight_decay": (False, True)},
    torch.optim.Adagrad: {"weight_decay": (0, 0.1), "lr_decay": (0, 0.1)},
    torch.optim.Adadelta: {"weight_decay": (0, 0.1)},
    torch.optim.RMSprop: {"weight_decay": (0, 0.1), "momentum": (0, 0.9), "centered": (False, True)},
    torch.optim.Rprop: {},
    torch.optim.ASGD: {"weight_decay": (0, 0.1)},
}


def _cases():
    for cls, options in OPTIONS.items():
        options = {**options, "maximize": (False, True), "foreach": (None, True)}
        for values in itertools.product(*options.values()):
            chosen = dict(zip(options, values, strict=True))
            if not (chosen.get("nesterov") and not chosen["momentum"]):  # which SGD refuses
                words = [f"{k}={v}" for k, v in chosen.items() if v]
                yield pytest.param(cls, chosen, id=" ".join([cls.__name__, *words]))


@pytest.mark.parametrize(("cls", "options"), _cases())
def test_gradients_are_what_eager_pytorch_leaves(cls, options, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compiling, "compile_step", interpreted)  # by PyTorch's kernels: bit for bit, and quickly

    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(4, 3, dtype=torch.float64)
        compiled = fl.compile(model, backend)
        optimizer = cls(model.parameters(), lr=0.01, **options)

        @fl.trace
        def step(x):
            optimizer.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            step(torch.randn(6, 4, generator=generator, dtype=torch.float64))
            yield from (p.grad.detach().clone() for p in model.parameters())
            yield from (p.detach().clone() for p in model.parameters())

    expected = list(run(fl.backend("CPU")))
    found = list(run(fl.backend("XLA", artifact_dir=tmp_path)))
    # Some optimizers compute corrections from float32 counts, in Python or in tensors: 2e-8 apart after two steps.
    # An update that lands in a gradient is of the gradient's own size.
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
