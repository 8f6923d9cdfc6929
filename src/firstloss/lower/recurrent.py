"""Recurrent layers for which eager PyTorch has a kernel. (GRU and plain RNN are captured as matrix products.)"""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from torch.ops import aten

from .dtypes import cast, opmath
from .matmul import linear
from .registry import rule

_LSTM = 2  # PyTorch's enum of the mode


def _lstm(x, w_ih, w_hh, b_ih, b_hh, h, c, *, reverse):
    """One direction of one layer over x (time, batch, features): outputs, last hidden state, last cell state.

    Hochreiter and Schmidhuber, 1997, with forget gates; the weights' gates are input, forget, cell, output.
    """
    driven = linear(x, w_ih, b_ih)  # the inputs' contribution, for all time steps at once

    def step(state, drive):
        h, c = state
        gates = drive + linear(h, w_hh, b_hh)
        i, f, g, o = lax.split(gates, (w_hh.shape[1],) * 4, gates.ndim - 1)
        c = lax.logistic(f) * c + lax.logistic(i) * lax.tanh(g)
        h = lax.logistic(o) * lax.tanh(c)
        return (h, c), h

    (h, c), y = lax.scan(step, (h, c), driven, reverse=reverse)
    return y, h, c


def _checked_mode(mode, batch_sizes):
    if mode != _LSTM or batch_sizes:
        raise NotImplementedError(
            "Only LSTMs over padded sequences have a lowering. Pass padded tensors instead of a PackedSequence, and "
            "mask what is beyond each length."
        )


@rule(aten.mkldnn_rnn_layer.default)
def mkldnn_rnn_layer(
    input, weight0, weight1, weight2, weight3, hx_, cx_, reverse, batch_sizes, mode, hidden_size, num_layers,
    has_biases, bidirectional, batch_first, train,
):  # fmt: skip
    """The kernel's workspace, which only its own backward pass could read, is a single zero, which broadcasts."""
    _checked_mode(mode, batch_sizes)
    dtype = opmath(input.dtype)
    operands = [cast(x, dtype) for x in (input, weight0, weight1, weight2, weight3, hx_, cx_)]
    return *_lstm(*operands, reverse=reverse), np.uint8(0)


@rule(aten.mkldnn_rnn_layer_backward.default)
def mkldnn_rnn_layer_backward(
    input, weight1, weight2, weight3, weight4, hx_, cx_tmp, output, hy_, cy_, grad_output, grad_hy, grad_cy, reverse,
    mode, hidden_size, num_layers, has_biases, train, bidirectional, batch_sizes, batch_first, workspace,
):  # fmt: skip
    """Recomputes the forward pass for the gates."""
    _checked_mode(mode, batch_sizes)
    dtype = opmath(input.dtype)
    operands = [cast(x, dtype) for x in (input, weight1, weight2, weight3, weight4, hx_, cx_tmp)]
    results, transpose = jax.vjp(lambda *xs: _lstm(*xs, reverse=reverse), *operands)
    grads = (grad_output, grad_hy, grad_cy)
    gradients = (lax.full_like(y, 0) if g is None else cast(g, dtype) for g, y in zip(grads, results, strict=True))
    return transpose(tuple(gradients))
