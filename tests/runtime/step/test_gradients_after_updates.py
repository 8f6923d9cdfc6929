"""PyTorch's optimizers may change gradients, differently in for-loops and foreach operations."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from firstloss.runtime.step import compiling
from tests.fuzz.interpret import interpreted
from tests.small_training import batches, build, on_both, training_step

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
            if not (chosen.get("nesterov") and not chosen["momentum"]):  # refused by SGD
                words = [f"{k}={v}" for k, v in chosen.items() if v]
                yield pytest.param(cls, chosen, id=" ".join([cls.__name__, *words]))


@pytest.mark.parametrize(("cls", "options"), _cases())
def test_gradients_match_eager(cls, options, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(compiling, "compile_step", interpreted)  # by PyTorch's kernels: bit-identical, and fast

    def run(backend):
        torch.manual_seed(0)
        model, optimizer, compiled = build(
            backend, lambda: nn.Linear(4, 3, dtype=torch.float64), lambda weights: cls(weights, lr=0.01, **options)
        )
        step = training_step(compiled, optimizer)
        actual = []
        for x in batches(3, dtype=torch.float64):
            step(x)
            actual += [p.grad.detach().clone() for p in model.parameters()]
            actual += [p.detach().clone() for p in model.parameters()]
        return actual

    expected, actual = on_both(run, tmp_path)
    # Some optimizers compute corrections from float32 counts, in Python or in tensors: 2e-8 apart after two steps. An
    # update stored in a gradient is of the gradient's own size.
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)
