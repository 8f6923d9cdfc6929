"""Recurrent layers for which eager PyTorch has a kernel. (GRU and plain RNN are captured as matrix products.)"""

from __future__ import annotations

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import cast, opmath
from .matmul import of_matrices
from .registry import rule

_LSTM = 2  # PyTorch's enum of the mode


def _times(x, weight):
    """The product of (time, batch, features) and the transpose of a weight, for all times at once."""
    product = of_matrices(lax.reshape(x, (x.shape[0] * x.shape[1], x.shape[2])), weight.T, (False, True))
    return lax.reshape(product, (*x.shape[:2], weight.shape[0]))


def _gates(sums):
    """The input, forget, cell and output gates from their sums: the weights' gates are in this order."""
    i, f, g, o = jnp.split(sums, 4, axis=-1)
    return lax.logistic(i), lax.logistic(f), lax.tanh(g), lax.logistic(o)


def _lstm(x, w_ih, w_hh, b_ih, b_hh, h, c, *, reverse):
    """One direction of one layer over x (time, batch, features): outputs, last hidden state, last cell state.

    Hochreiter and Schmidhuber, 1997, with forget gates.
    """
    driven = _times(x, w_ih) + b_ih + b_hh  # the inputs' contribution, for all time steps at once

    def step(state, drive):
        h, c = state
        i, f, g, o = _gates(drive + of_matrices(h, w_hh.T, (False, True)))
        c = f * c + i * g
        h = o * lax.tanh(c)
        return (h, c), h

    (h, c), y = lax.scan(step, (h, c), driven, reverse=reverse)
    return y, h, c


def _before(first, states, reverse):
    """For each time, the state before it."""
    parts = (states[1:], first[None]) if reverse else (first[None], states[:-1])
    return lax.concatenate(parts, 0)


def _lstm_backward(x, w_ih, w_hh, b_ih, b_hh, h, c, y, grad_y, grad_h, grad_c, *, reverse):
    """The derivatives with respect to the first seven arguments of `_lstm`, of which `y` is the output.

    Since all hidden states are known, the gates of all times are one product, as are the gradients of weights: only the
    gradient of the hidden state is a product at each time.
    """
    hidden = _before(h, y, reverse)
    i, f, g, o = _gates(_times(x, w_ih) + b_ih + b_hh + _times(hidden, w_hh))

    def advance(c, gates):
        i, f, g = gates
        c = f * c + i * g
        return c, c

    _, cells = lax.scan(advance, c, (i, f, g), reverse=reverse)
    shown = lax.tanh(cells)
    # What the gradient of a gate is multiplied by to give that of its sum, for all times at once.
    of_cell = o * (1 - shown * shown)
    slopes = [g * i * (1 - i), _before(c, cells, reverse) * f * (1 - f), i * (1 - g * g)]
    of_sums = lax.concatenate(slopes, 2)
    of_output = shown * o * (1 - o)

    def step(state, at):
        grad_h, grad_c = state
        grad_y, of_cell, of_sums, of_output, f = at
        grad_h = grad_h + grad_y
        grad_c = grad_c + grad_h * of_cell
        sums = lax.concatenate((jnp.tile(grad_c, 3) * of_sums, grad_h * of_output), 1)
        return (of_matrices(sums, w_hh, (False, False)), grad_c * f), sums

    state, sums = lax.scan(step, (grad_h, grad_c), (grad_y, of_cell, of_sums, of_output, f), reverse=not reverse)
    flat = lax.reshape(sums, (sums.shape[0] * sums.shape[1], sums.shape[2]))
    grad_x = lax.reshape(of_matrices(flat, w_ih, (False, False)), x.shape)
    of_weights = [
        of_matrices(flat.T, lax.reshape(states, (flat.shape[0], states.shape[2])), (True, False))
        for states in (x, hidden)
    ]
    of_bias = flat.sum(0)
    return grad_x, *of_weights, of_bias, of_bias, *state


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
    """Recomputes the gates."""
    _checked_mode(mode, batch_sizes)
    dtype = opmath(input.dtype)
    operands = [cast(x, dtype) for x in (input, weight1, weight2, weight3, weight4, hx_, cx_tmp, output)]
    like = (operands[7], operands[5], operands[6])
    grads = (grad_output, grad_hy, grad_cy)
    given = [lax.full_like(y, 0) if g is None else cast(g, dtype) for g, y in zip(grads, like, strict=True)]
    return _lstm_backward(*operands, *given, reverse=reverse)
