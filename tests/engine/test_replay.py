"""Replaying recorded operations with the kernels' own results."""

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.runtime.step import compiling

from ..fuzz.interpret import interpreted


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_kernel_may_return_none_where_its_meta_kernel_returns_a_tensor(kind, grad, monkeypatch):
    """oneDNN's LSTM layer returns a workspace only if gradients are required."""
    monkeypatch.setattr(compiling, "compile_step", interpreted)

    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            rnn = kind(4, 5)
        compiled = fl.compile(rnn, backend)

        @fl.trace
        def step(x):
            with torch.set_grad_enabled(grad):
                return compiled(x)[0].detach()

        return [step(torch.linspace(-1, 1, 24).reshape(2, 3, 4) * i) for i in range(3)]

    torch.testing.assert_close(run(fl.backend("XLA")), run(fl.backend("CPU")), rtol=0, atol=0)
