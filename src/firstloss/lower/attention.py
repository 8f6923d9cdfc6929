"""Scaled dot product attention: one forward and one backward rule, under the names of each of PyTorch's kernels.

Scores are kept in float32 for half precisions, as in the kernels. Shapes: query (batch, heads, length, width); key and
value may have fewer heads, each shared by a group of query heads.
"""

from __future__ import annotations

import math

import numpy as np
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from . import aten as kernels
from .activations import gelu, relu
from .dtypes import cast, opmath, where
from .matmul import linear, matmul
from .norms import native_layer_norm, safe_softmax, total
from .registry import rule


def _swap(x):
    return lax.transpose(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))


def _shared(x, heads: int):
    """Repeat each head of a key or value for the group of query heads that shares it."""
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)


def _unshared(gradient, heads: int):
    """Sum the gradients of the query heads that share a head."""
    b, h, *rest = gradient.shape
    return gradient if h == heads else lax.reduce_sum(lax.reshape(gradient, (b, heads, h // heads, *rest)), (2,))


def _scores(query, key, attn_mask, is_causal, scale):
    scores = matmul(query, _swap(key)) * scale
    if is_causal:
        rows = lax.broadcasted_iota("int32", scores.shape, scores.ndim - 2)
        columns = lax.broadcasted_iota("int32", scores.shape, scores.ndim - 1)
        scores = where(columns > rows, -math.inf, scores)
    if attn_mask is not None:
        scores = (
            where(attn_mask, scores, -math.inf) if attn_mask.dtype == bool else scores + cast(attn_mask, scores.dtype)
        )
    return scores


def _scale(query, scale):
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _refuse_dropout(dropout_p):
    if dropout_p:
        raise NotImplementedError(
            "Dropout inside fused attention draws random numbers, which this lowering does not support. Set the "
            "attention dropout to 0, or apply torch.nn.functional.dropout to the weights of an attention written out."
        )


def attention(query, key, value, attn_mask, is_causal, scale):
    """Output and log-sum-exp of the scores (batch, heads, length); a row without any key to attend to is zero."""
    heads = query.shape[1]
    key, value = _shared(key, heads), _shared(value, heads)
    scores = _scores(query, key, attn_mask, is_causal, _scale(query, scale))
    top = lax.expand_dims(lax.reduce_max(scores, (3,)), [3])
    top = where(top == -math.inf, 0, top)
    e = lax.exp(scores - top)
    norm = total(e, (3,))
    weights = e / where(norm == 0, 1, norm)
    output = matmul(cast(weights, value.dtype), value)
    return output, lax.squeeze(lax.log(norm) + top, [3])


def attention_backward(grad_out, query, key, value, out, logsumexp, attn_mask, is_causal, scale):
    """Gradients of query, key, value and scores, with the weights recomputed from the log-sum-exp.

    The row sum of gradient times weights is computed from the output (Dao et al., FlashAttention, 2022, appendix B.2).
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    dtype, scale = query.dtype, _scale(query, scale)
    k, v = _shared(key, heads), _shared(value, heads)
    lse = lax.expand_dims(cast(logsumexp, opmath(dtype)), [3])
    scores = _scores(query, k, attn_mask, is_causal, scale)
    weights = where(lse == -math.inf, 0, lax.exp(scores - lse))
    g = cast(grad_out, dtype)
    grad_value = matmul(_swap(cast(weights, dtype)), g)
    grad_weights = matmul(g, _swap(v))
    along = total(cast(grad_out, weights.dtype) * cast(out, weights.dtype), (3,))
    grad_scores = weights * (grad_weights - along)
    d = cast(grad_scores, dtype)
    grad_query = matmul(d, k) * scale
    grad_key = matmul(_swap(d), query) * scale
    return grad_query, _unshared(grad_key, kv_heads), _unshared(grad_value, kv_heads), grad_scores


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def _scaled_dot_product_flash_attention_for_cpu(
    query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None
):
    _refuse_dropout(dropout_p)
    if kernels.attends(query, key, value, attn_mask):
        return kernels.attention(query, key, value, attn_mask, is_causal, _scale(query, scale))
    return attention(query, key, value, attn_mask, is_causal, scale)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _scaled_dot_product_flash_attention_for_cpu_backward(
    grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    _refuse_dropout(dropout_p)
    if kernels.attends(query, key, value, attn_mask):
        arrays = cast(grad_out, query.dtype), query, key, value, cast(out, query.dtype), cast(logsumexp, np.dtype("f4"))
        return kernels.attention_backward(*arrays, attn_mask, is_causal, _scale(query, scale))
    return attention_backward(grad_out, query, key, value, out, logsumexp, attn_mask, is_causal, scale)[:3]


# --- The kernels that PyTorch chooses on accelerators -----------------------------------------------------------------
# Their other results (sequence limits, random state) are unused here, and zero.


def _nothing(dtype=np.int64, shape=()):
    return lax.full(shape, 0, dtype)


@rule(aten._scaled_dot_product_flash_attention.default)
def _scaled_dot_product_flash_attention(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    _refuse_dropout(dropout_p)
    results = attention(query, key, value, None, is_causal, scale)
    seed = _nothing(np.uint64, (2,)), _nothing(np.uint64), _nothing(query.dtype, (0,))
    return *results, None, None, query.shape[2], key.shape[2], *seed


@rule(aten._scaled_dot_product_flash_attention_backward.default)
def _scaled_dot_product_flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    _refuse_dropout(dropout_p)
    return attention_backward(grad_out, query, key, value, out, logsumexp, None, is_causal, scale)[:3]


@rule(aten._scaled_dot_product_efficient_attention.default)
def _scaled_dot_product_efficient_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    """The kernel stores its log-sum-exp for a multiple of 32 rows, or for none."""
    _refuse_dropout(dropout_p)
    output, lse = attention(query, key, value, attn_bias, is_causal, scale)
    rows = lse.shape[2]
    lse = lax.pad(lse, cast(math.inf, lse.dtype), [(0, 0, 0)] * 2 + [(0, -rows % 32, 0)])
    return output, lse if compute_log_sumexp else lse[:, :, :0], _nothing(), _nothing()


@rule(aten._scaled_dot_product_efficient_attention_backward.default)
def _scaled_dot_product_efficient_attention_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    _refuse_dropout(dropout_p)
    lse = logsumexp[:, :, : query.shape[2]]
    *gradients, scores = attention_backward(grad_out_, query, key, value, out, lse, attn_bias, is_causal, scale)
    if grad_input_mask[3]:
        shared = tuple(d for d in range(4) if attn_bias.shape[d] == 1 and scores.shape[d] > 1)
        scores = lax.reshape(lax.reduce_sum(scores, shared), attn_bias.shape)
    return tuple(g if needed else None for g, needed in zip((*gradients, scores), grad_input_mask, strict=True))


@rule(aten._scaled_dot_product_cudnn_attention.default)
def _scaled_dot_product_cudnn_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False,
    *, scale=None,
):  # fmt: skip
    _refuse_dropout(dropout_p)
    output, lse = attention(query, key, value, attn_bias, is_causal, scale)
    seed = _nothing(), _nothing(), _nothing(query.dtype, (0,))
    return output, lax.expand_dims(lse, [3]), None, None, query.shape[2], key.shape[2], *seed


@rule(aten._scaled_dot_product_cudnn_attention_backward.default)
def _scaled_dot_product_cudnn_attention_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q,
    max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    _refuse_dropout(dropout_p)
    lse = lax.reshape(logsumexp, logsumexp.shape[:3])
    return attention_backward(grad_out, query, key, value, out, lse, attn_bias, is_causal, scale)[:3]


@rule(aten._scaled_dot_product_attention_math.default)
def _scaled_dot_product_attention_math(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, dropout_mask=None, *, scale=None,
    enable_gqa=False,
):  # fmt: skip
    _refuse_dropout(dropout_p)
    key, value = _shared(key, query.shape[-3]), _shared(value, query.shape[-3])
    weights = safe_softmax(_scores(query, key, attn_mask, is_causal, _scale(query, scale)), -1)
    return matmul(cast(weights, value.dtype), value), weights


# --- A whole encoder layer, PyTorch's fast path for evaluation --------------------------------------------------------


@rule(aten._transformer_encoder_layer_fwd.default)
def _transformer_encoder_layer_fwd(
    src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps, norm_weight_1,
    norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask=None,
    mask_type=None,
):  # fmt: skip
    """Mask types: 0 for (length, length), 1 for padding (batch, length), 2 for (batch, heads, length, length)."""
    batch, length, _ = src.shape

    def self_attention(x):
        qkv = lax.reshape(linear(x, qkv_weight, qkv_bias), (batch, length, 3, num_heads, embed_dim // num_heads))
        q, k, v = (qkv[:, :, i].transpose(0, 2, 1, 3) for i in range(3))
        bias = None
        if mask is not None:
            shape = {0: (1, 1, length, length), 1: (batch, 1, 1, length)}.get(mask_type, mask.shape)
            bias = lax.reshape(mask == 0, shape)  # the kernel masks every other value
        y = attention(q, k, v, bias, False, None)[0].transpose(0, 2, 1, 3)
        return linear(cast(lax.reshape(y, src.shape), src.dtype), proj_weight, proj_bias)

    def feed_forward(x):
        inner = linear(x, ffn_weight_1, ffn_bias_1)
        return linear(cast(gelu(inner) if use_gelu else relu(inner), src.dtype), ffn_weight_2, ffn_bias_2)

    def norm_1(x):
        return native_layer_norm(x, [embed_dim], norm_weight_1, norm_bias_1, eps)[0]

    def norm_2(x):
        return native_layer_norm(x, [embed_dim], norm_weight_2, norm_bias_2, eps)[0]

    if norm_first:
        x = src + self_attention(cast(norm_1(src), src.dtype))
        return x + feed_forward(cast(norm_2(x), src.dtype))
    x = norm_1(src + self_attention(src))
    return norm_2(x + feed_forward(cast(x, src.dtype)))
