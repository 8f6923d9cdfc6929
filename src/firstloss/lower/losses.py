"""Losses and their derivatives. `reduction` is PyTorch's enum: 0 none, 1 mean, 2 sum."""

from __future__ import annotations

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import cast, operands, opmath, where
from .registry import rule

MEAN, SUM = 1, 2


def _reduced(loss, reduction):
    if reduction not in (MEAN, SUM):
        return loss
    total = lax.reduce_sum(loss, range(loss.ndim))
    return total / loss.size if reduction == MEAN else total


def _loss_gradient(grad_output, like, reduction):
    """The gradient of each element's loss."""
    g = cast(grad_output, like.dtype)
    return g / like.size if reduction == MEAN else g


# --- Negative log likelihood ------------------------------------------------------------------------------------------


def _class_weights(self, target, weight, ignore_index):
    """Each target's weight (0 if ignored), whether it is counted, and the target, 0 if ignored."""
    counted = target != ignore_index
    safe = where(counted, target, 0)
    dtype = opmath(self.dtype)
    if weight is None:
        return cast(counted, dtype), counted, safe
    return where(counted, cast(weight, dtype)[safe], 0), counted, safe


def _at_target(shape, target, channel):
    """True where an element's class is the target."""
    classes = lax.broadcasted_iota(target.dtype, shape, channel)
    return classes == (lax.expand_dims(target, [channel]) if len(shape) > 1 else target)


def _channel(self) -> int:
    """The dimension of the classes: the first for a sample without a batch, else the second."""
    return 0 if self.ndim == 1 else 1


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(self, target, weight, reduction, ignore_index):
    """The loss, and the sum of the weights, by which the mean is divided."""
    x = cast(self, opmath(self.dtype))
    channel = _channel(self)
    target = lax.reshape(target, ()) if self.ndim == 1 else target
    weights, counted, safe = _class_weights(self, target, weight, ignore_index)
    # Selected by comparison and sum rather than a gather, which fuses with the log-softmax that computes `self`.
    chosen = lax.reduce_sum(where(_at_target(x.shape, safe, channel), x, 0), (channel,))
    chosen = where((safe >= 0) & (safe < x.shape[channel]), chosen, np.nan)  # eager PyTorch raises
    losses = where(counted, -chosen * weights, 0)
    total_weight = lax.reduce_sum(weights, range(weights.ndim))
    if reduction == MEAN:
        return lax.reduce_sum(losses, range(losses.ndim)) / total_weight, total_weight
    if reduction == SUM:
        return lax.reduce_sum(losses, range(losses.ndim)), total_weight
    return losses, lax.full((), 0, x.dtype) if losses.ndim else total_weight


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight):
    channel = _channel(self)
    target = lax.reshape(target, ()) if self.ndim == 1 else target
    weights, counted, safe = _class_weights(self, target, weight, ignore_index)
    g = cast(grad_output, weights.dtype)
    g = -weights * (g / cast(total_weight, g.dtype) if reduction == MEAN else g)
    g = where(counted, g, 0)
    return where(_at_target(self.shape, safe, channel), lax.expand_dims(g, [channel]), 0)


# --- Regression -------------------------------------------------------------------------------------------------------


@rule(aten.mse_loss.default)
def mse_loss(self, target, reduction=MEAN):
    x, y = operands(self, target)
    return _reduced((x - y) * (x - y), reduction)


@rule(aten.mse_loss_backward.default)
def mse_loss_backward(grad_output, self, target, reduction):
    x, y = operands(self, target)
    return 2 * (x - y) * _loss_gradient(grad_output, x, reduction)


@rule(aten.smooth_l1_loss.default)
def smooth_l1_loss(self, target, reduction=MEAN, beta=1.0):
    x, y = operands(self, target)
    z = lax.abs(x - y)
    return _reduced(where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta) if beta else z, reduction)


@rule(aten.smooth_l1_loss_backward.default)
def smooth_l1_loss_backward(grad_output, self, target, reduction, beta):
    x, y = operands(self, target)
    z = x - y
    slope = where(lax.abs(z) < beta, z / beta, lax.sign(z)) if beta else lax.sign(z)
    return slope * _loss_gradient(grad_output, x, reduction)


@rule(aten.huber_loss.default)
def huber_loss(self, target, reduction=MEAN, delta=1.0):
    x, y = operands(self, target)
    z = lax.abs(x - y)
    return _reduced(where(z < delta, 0.5 * z * z, delta * (z - 0.5 * delta)), reduction)


@rule(aten.huber_loss_backward.default)
def huber_loss_backward(grad_output, self, target, reduction, delta):
    x, y = operands(self, target)
    z = x - y
    return where(lax.abs(z) <= delta, z, delta * lax.sign(z)) * _loss_gradient(grad_output, x, reduction)


# --- Binary classification --------------------------------------------------------------------------------------------


@rule(aten.binary_cross_entropy.default)
def binary_cross_entropy(self, target, weight=None, reduction=MEAN):
    """Logarithms are clamped to -100, as documented by PyTorch, so that losses are finite."""
    x, y = operands(self, target)
    floor = lax.full_like(x, -100)
    loss = (y - 1) * lax.max(lax.log1p(-x), floor) - y * lax.max(lax.log(x), floor)
    valid = (x >= 0) & (x <= 1) & (y >= 0) & (y <= 1)
    loss = where(valid, loss, np.nan)  # eager PyTorch raises
    return _reduced(loss if weight is None else loss * cast(weight, x.dtype), reduction)


@rule(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(grad_output, self, target, weight=None, reduction=MEAN):
    x, y = operands(self, target)
    spread = lax.max((1 - x) * x, lax.full_like(x, 1e-12))
    g = (x - y) / spread
    return (g if weight is None else g * cast(weight, x.dtype)) * _loss_gradient(grad_output, x, reduction)


@rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(self, target, weight=None, pos_weight=None, reduction=MEAN):
    x, y = operands(self, target)
    log_sigmoid = lax.min(x, lax.full_like(x, 0)) - lax.log1p(lax.exp(-lax.abs(x)))
    factor = 1 if pos_weight is None else (cast(pos_weight, x.dtype) - 1) * y + 1
    loss = (1 - y) * x - factor * log_sigmoid
    return _reduced(loss if weight is None else loss * cast(weight, x.dtype), reduction)


@rule(aten.soft_margin_loss.default)
def soft_margin_loss(self, target, reduction=MEAN):
    x, y = operands(self, target)
    return _reduced(lax.log1p(lax.exp(-x * y)), reduction)


@rule(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(grad_output, self, target, reduction):
    x, y = operands(self, target)
    return -y * lax.logistic(-x * y) * _loss_gradient(grad_output, x, reduction)


# --- Margins ----------------------------------------------------------------------------------------------------------


@rule(aten.multi_margin_loss.default)
def multi_margin_loss(self, target, p=1, margin=1, weight=None, reduction=MEAN):
    return _multi_margin(cast(self, opmath(self.dtype)), target, p, margin, weight, reduction)


def _multi_margin(x, target, p, margin, weight, reduction):
    rows = lax.reshape(x, (x.size // x.shape[-1], x.shape[-1])) if x.ndim else lax.reshape(x, (1, 1))
    t = lax.reshape(target, (rows.shape[0],))
    is_target = _at_target(rows.shape, t, 1)
    at_target = lax.reduce_sum(where(is_target, rows, 0), (1,))
    z = lax.max(margin - lax.expand_dims(at_target, [1]) + rows, lax.full_like(rows, 0))
    z = z if p == 1 else z * z
    z = z if weight is None else z * lax.expand_dims(cast(weight, z.dtype)[t], [1])
    losses = lax.reduce_sum(where(is_target, 0, z), (1,)) / rows.shape[1]
    return _reduced(losses if x.ndim > 1 else lax.reshape(losses, ()), reduction)


@rule(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(grad_output, self, target, p, margin, weight=None, reduction=MEAN):
    x = cast(self, opmath(self.dtype))
    _, transpose = jax.vjp(lambda x: _multi_margin(x, target, p, margin, weight, reduction), x)
    return transpose(cast(grad_output, x.dtype))[0]


def _label_mask(x, target):
    """True for the classes that a row of `target` lists before its first -1."""
    listed = lax.cumsum(cast(target < 0, np.dtype(np.int64)), 1) == 0
    classes = lax.broadcasted_iota(target.dtype, (*target.shape, x.shape[1]), 2)
    return lax.reduce_or((classes == lax.expand_dims(target, [2])) & lax.expand_dims(listed, [2]), (1,)), listed


def _multilabel_margin(x, target, reduction):
    rows = lax.reshape(x, (x.size // x.shape[-1], x.shape[-1])) if x.ndim else lax.reshape(x, (1, 1))
    t = lax.reshape(target, rows.shape)
    is_target, listed = _label_mask(rows, t)
    at_targets = where(listed, jnp.take_along_axis(rows, where(listed, t, 0), axis=1), 0)
    z = 1 - lax.expand_dims(at_targets, [2]) + lax.expand_dims(rows, [1])
    counted = lax.expand_dims(listed, [2]) & ~lax.expand_dims(is_target, [1])
    losses = lax.reduce_sum(where(counted, lax.max(z, lax.full_like(z, 0)), 0), (1, 2)) / rows.shape[1]
    losses = losses if x.ndim > 1 else lax.reshape(losses, ())
    return _reduced(losses, reduction), lax.reshape(cast(is_target, x.dtype), target.shape)


@rule(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss_forward(self, target, reduction):
    return _multilabel_margin(cast(self, opmath(self.dtype)), target, reduction)


@rule(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(grad_output, self, target, reduction, is_target):
    x = cast(self, opmath(self.dtype))
    _, transpose = jax.vjp(lambda x: _multilabel_margin(x, target, reduction)[0], x)
    return transpose(cast(grad_output, x.dtype))[0]


# --- Connectionist temporal classification ----------------------------------------------------------------------------


def _padded_targets(targets, lengths, longest: int):
    """The targets as rows of length `longest`; they may be given concatenated."""
    if targets.ndim == 2:
        return targets
    starts = lax.cumsum(lengths) - lengths
    positions = lax.expand_dims(starts, [1]) + lax.broadcasted_iota(starts.dtype, (lengths.shape[0], longest), 1)
    return targets[lax.min(positions, lax.full_like(positions, max(targets.shape[0] - 1, 0)))]


def _ctc(log_probs, targets, input_lengths, target_lengths, *, blank):
    """The negative log likelihood of each sample (Graves et al., 2006, by forward variables, in logarithms).

    log_probs is (time, batch, classes), targets (batch, longest). The states are the target with blanks around each
    symbol; each state is followed by itself, the next, or the one after that unless that skips a required blank.
    """
    time, batch, _ = log_probs.shape
    states = 2 * targets.shape[1] + 1
    symbols = lax.full((batch, states), blank, targets.dtype).at[:, 1::2].set(targets)
    two_before = jnp.pad(symbols, ((0, 0), (2, 0)), constant_values=blank)[:, :states]
    can_skip = (symbols != blank) & (symbols != two_before)
    never = lax.full((batch, states), -np.inf, log_probs.dtype)

    def emission(frame):
        return jnp.take_along_axis(frame, symbols, axis=1)

    def shifted(alpha, by):
        return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=-np.inf)[:, :states]

    def step(alpha, now):
        frame, t = now
        paths = jnp.stack([alpha, shifted(alpha, 1), where(can_skip, shifted(alpha, 2), -np.inf)])
        # Impossible states are -inf in every path; kept out of the logarithm so that their derivative is 0, not NaN.
        possible = jnp.any(paths > -np.inf, 0)
        summed = jax.nn.logsumexp(where(possible, paths, 0.0), axis=0)
        new = where(possible, summed + emission(frame), -np.inf)
        return where(lax.expand_dims(t < input_lengths, [1]), new, alpha), None

    first = where(lax.broadcasted_iota(np.int32, never.shape, 1) < 2, emission(log_probs[0]), never)
    first = where(lax.expand_dims(target_lengths == 0, [1]) & (symbols != blank), -np.inf, first)
    alpha, _ = lax.scan(step, first, (log_probs[1:], lax.iota(input_lengths.dtype, time)[1:]))
    # The last symbol, or the blank after it.
    ends = jnp.stack([2 * target_lengths, lax.max(2 * target_lengths - 1, lax.full_like(target_lengths, 0))], 1)
    last = jnp.take_along_axis(alpha, ends, axis=1)
    last = where(jnp.stack([target_lengths >= 0, target_lengths > 0], 1), last, -np.inf)
    reached = jnp.any(last > -np.inf, 1)
    return where(reached, -jax.nn.logsumexp(where(lax.expand_dims(reached, [1]), last, 0.0), axis=1), np.inf)


def _ctc_operands(log_probs, targets, input_lengths, target_lengths):
    x = cast(log_probs, opmath(log_probs.dtype))
    lengths = [jnp.asarray(n, np.int64) for n in (input_lengths, target_lengths)]
    # Lengths given as numbers determine the longest target; given as a tensor, they may be anything.
    joined = targets.size if hasattr(target_lengths, "shape") else max([*target_lengths, 0])
    return x, _padded_targets(cast(targets, np.dtype(np.int64)), lengths[1], joined), *lengths


@rule(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """The forward variables are recomputed in the backward pass, so here they are a single zero, which broadcasts.

    `zero_infinity` concerns the backward pass only: eager PyTorch zeroes the losses in a separate operation.
    """
    losses = _ctc(*_ctc_operands(log_probs, targets, input_lengths, target_lengths), blank=blank)
    return losses, np.zeros((), losses.dtype)


@rule(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def _ctc_loss_backward(
    grad, log_probs, targets, input_lengths, target_lengths, neg_log_likelihood, log_alpha, blank, zero_infinity=False
):
    """The derivative with respect to logits, as in PyTorch: the probabilities minus the occupancies."""
    x, rows, lengths, target_lengths = _ctc_operands(log_probs, targets, input_lengths, target_lengths)
    losses, transpose = jax.vjp(lambda x: _ctc(x, rows, lengths, target_lengths, blank=blank), x)
    g = cast(grad, x.dtype)
    occupancies = transpose(g)[0]
    g = g.reshape(1, -1, 1)
    inside = lax.broadcasted_iota(np.int64, x.shape, 0) < lengths.reshape(1, -1, 1)
    gradient = where(inside, lax.exp(x) * g + occupancies, 0)
    impossible = (losses == np.inf).reshape(1, -1, 1)
    return where(impossible & inside, 0 if zero_infinity else np.nan, gradient)
