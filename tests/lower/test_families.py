"""Edge cases of single operator families: convolutions, embeddings, losses, attention, boolean masks."""

import itertools
import math

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from firstloss.lower.convolution import convolution
from firstloss.lower.rules import RULES

from .harness import assert_rule, assert_same, to_array, to_tensor

aten = torch.ops.aten


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("space, stride, padding, dilation, groups", [
    (1, [2], [1], [1], 1),
    (2, [1, 2], [2, 0], [2, 1], 2),
    (2, [3], [1], [1], 4),
    (3, [2, 1, 1], [0, 1, 1], [1, 2, 1], 2),
])  # fmt: skip
def test_convolution_matches_eager(space, stride, padding, dilation, groups, transposed):
    torch.manual_seed(0)
    x = torch.randn(2, 4, *[9, 8, 7][:space])
    weight = (
        torch.randn(4, 8 // groups, *[3, 2, 2][:space])
        if transposed
        else torch.randn(8, 4 // groups, *[3, 2, 2][:space])
    )
    extra = [s - 1 for s in stride] if transposed else [0] * len(stride)
    how = (stride, padding, dilation, transposed, extra, groups)
    y = aten.convolution(x, weight, torch.randn(8), *how)
    assert_rule(aten.convolution.default, (x, weight, None, *how), {}, aten.convolution(x, weight, None, *how))
    g = torch.randn_like(y)
    for mask in ([True, True, True], [False, True, False]):
        args = (g, x, weight, [8], *how, mask)
        assert_rule(aten.convolution_backward.default, args, {}, aten.convolution_backward(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lengths, kernel, stride, padding, dilation", [
    ([4, 4], [3, 3], [1], [1], [1]),
    ([5, 4], [3, 2], [2], [1, 0], [1]),  # the last row of windows ends before the padding does
    ([2, 2], [3, 3], [1], [1], [1]),  # windows larger than the input
    ([6, 6], [3, 1], [2, 3], [2, 0], [2, 1]),
    ([5, 5], [1, 1], [2], [0], [1]),
    ([2, 3, 2], [2, 3, 1], [1], [0, 1, 0], [1]),
])  # fmt: skip
def test_convolution_with_more_channels_than_pixels_matches_eager(lengths, kernel, stride, padding, dilation, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, *lengths, dtype=dtype), torch.randn(40, 3, *kernel, dtype=dtype)
    how = (stride, padding, dilation, False, [0] * len(stride), 1)
    y = aten.convolution(x, weight, None, *how)
    assert y.numel() <= 40 * 40  # so that it is a matrix product
    assert_rule(aten.convolution.default, (x, weight, None, *how), {}, y)
    for mask in ([True, True, True], [False, True, False]):
        args = (torch.randn_like(y), x, weight, [40], *how, mask)
        assert_rule(aten.convolution_backward.default, args, {}, aten.convolution_backward(*args))


def test_convolution_is_a_matrix_product_where_faster():
    weight = jax.ShapeDtypeStruct((40, 3, 3, 3), np.float32)
    rest = ([1], [1], [1], False, [0], 1)

    def code(*shape):
        x = jax.ShapeDtypeStruct(shape, np.float32)
        return jax.jit(lambda x, w: convolution(x, w, None, *rest)).lower(x, weight).as_text()

    assert "stablehlo.convolution" not in code(2, 3, 4, 5)  # 40 windows, 40 channels
    assert "stablehlo.convolution" in code(2, 3, 4, 6)


def test_embedding_padding_has_no_gradient():
    indices, g = torch.tensor([[0, 2, 2], [1, 3, 0]]), torch.randn(2, 3, 4)
    for padding, by_frequency in itertools.product((-1, 2), (False, True)):
        args = (g, indices, 5, padding, by_frequency)
        assert_rule(aten.embedding_dense_backward.default, args, {}, aten.embedding_dense_backward(*args))


def test_an_index_out_of_range_is_visible():
    """Eager raises; a compiled step gives a NaN row instead of some other row."""
    import jax

    with jax.enable_x64(True):
        row = RULES[aten.embedding.default](to_array(torch.ones(3, 2)), to_array(torch.tensor([5])))
    assert to_tensor(row, torch.float32).isnan().all()


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weight", [None, torch.tensor([0.5, 0.0, 2.0, 1.0])])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_nll_matches_eager(shape, weight, reduction):
    torch.manual_seed(0)
    spatial = len(shape) == 2
    shape_x = (shape[0], 4, shape[1], 2) if spatial else (*shape, 4)
    x = torch.randn(shape_x).log_softmax(1 if len(shape_x) > 1 else 0)
    target = torch.randint(0, 4, (*shape, 2) if spatial else shape)
    if target.ndim:
        target.view(-1)[0] = -100
    forward, backward = (
        (aten.nll_loss2d_forward, aten.nll_loss2d_backward)
        if spatial
        else (aten.nll_loss_forward, aten.nll_loss_backward)
    )
    loss, total = forward(x, target, weight, reduction, -100)
    assert_rule(forward.default, (x, target, weight, reduction, -100), {}, (loss, total))
    args = (torch.ones_like(loss), x, target, weight, reduction, -100, total)
    assert_rule(backward.default, args, {}, backward(*args))


def test_nll_with_all_targets_ignored_matches_eager():
    """0 / 0: PyTorch's mean over no targets is NaN, and so is the scale of its gradient."""
    x, target = torch.randn(2, 4), torch.tensor([-100, -100])
    loss, total = aten.nll_loss_forward(x, target, None, 1, -100)
    assert_rule(aten.nll_loss_forward.default, (x, target, None, 1, -100), {}, (loss, total))
    args = (torch.ones(()), x, target, None, 1, -100, total)
    assert_rule(aten.nll_loss_backward.default, args, {}, aten.nll_loss_backward(*args))


flash, flash_backward = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_matches_eager(dtype, mask, kv_heads):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 6, 8).to(dtype)
    k, v = (torch.randn(2, kv_heads, 5 if mask != "causal" else 6, 8).to(dtype) for _ in "kv")
    attn_mask = {"bool": torch.rand(2, 1, 6, 5) > 0.3, "float": torch.randn(6, 5).to(dtype)}.get(mask)
    if mask == "bool":
        attn_mask[..., 0] = True
        attn_mask = torch.zeros(attn_mask.shape, dtype=dtype).masked_fill(~attn_mask, -math.inf)
    how = {"attn_mask": attn_mask}
    repeat = 4 // kv_heads
    wide_k, wide_v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out, lse = flash(q, wide_k, wide_v, 0.0, mask == "causal", **how)
    assert_rule(flash.default, (q, k, v, 0.0, mask == "causal"), how, (out, lse))
    g = torch.randn_like(out)
    args = (g, q, wide_k, wide_v, out, lse, 0.0, mask == "causal")
    gradients = flash_backward(*args, **how)
    narrow = [x.float().unflatten(1, (kv_heads, repeat)).sum(2).to(dtype) if repeat > 1 else x for x in gradients[1:]]
    args = (g, q, k, v, out, lse, 0.0, mask == "causal")
    # Gradients in bfloat16 pass through weights rounded to bfloat16: errors in the last few bits.
    assert_rule(
        flash_backward.default, args, how, (gradients[0], *narrow), tolerance=4e-2 if dtype != torch.float32 else None
    )


def test_accelerator_attention_matches_eager():
    """The accelerator kernels do not run here; the expected results are from the formula."""
    import jax

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in "qkv")
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    out = F.scaled_dot_product_attention(q, k, v, bias)
    g = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v, bias), g)
    with jax.enable_x64(True):
        arrays = [to_array(x) for x in (q, k, v, bias)]
        efficient = RULES[aten._scaled_dot_product_efficient_attention.default](*arrays, True)
        assert_same(to_tensor(efficient[0], torch.float32), out)
        assert efficient[1].shape == (2, 4, 32)
        backward = RULES[aten._scaled_dot_product_efficient_attention_backward.default]
        result = backward(to_array(g), *arrays, efficient[0], efficient[1], None, None, 0.0, [True] * 4)
        for actual, eager in zip(result, expected, strict=True):
            assert_same(to_tensor(actual, torch.float32), eager)
        plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for name in ("flash", "cudnn"):
            forward = RULES[getattr(aten, f"_scaled_dot_product_{name}_attention").default]
            extra = (None, True) if name == "cudnn" else ()
            actual = forward(*arrays[:3], *extra, 0.0, True)
            assert_same(to_tensor(actual[0], torch.float32), plain)


def test_attention_refuses_dropout():
    x = to_array(torch.zeros(1, 1, 2, 2))
    with pytest.raises(NotImplementedError, match="dropout"):
        RULES[flash.default](x, x, x, 0.1)


def test_boolean_masks_match_eager():
    x = torch.arange(12.0).reshape(3, 4)
    mask = x > 5
    assert_rule(aten.index_put.default, (x, [mask], torch.tensor(-1.0)), {}, x.index_put([mask], torch.tensor(-1.0)))
    values = -torch.arange(6.0)
    assert_rule(aten.index_put.default, (x, [mask], values), {}, x.index_put([mask], values))
    rows = torch.tensor([True, False, True])
    assert_rule(aten.index_put.default, (x, [rows], x[:2]), {}, x.index_put([rows], x[:2]))
    with pytest.raises(NotImplementedError, match="torch.where"):
        RULES[aten.index.Tensor](to_array(x), [to_array(mask)])


@pytest.mark.parametrize("places", [(0,), (1,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_indexed_dimensions_match_eager(places):
    """Adjacent indices leave their dimensions in place; others move them to the front."""
    x = torch.arange(60.0).reshape(3, 4, 5)
    index = [torch.tensor([[0, -1], [1, 2]]) if d in places else None for d in range(3)]
    assert_rule(aten.index.Tensor, (x, index), {}, aten.index(x, index))
    values = torch.randn_like(aten.index(x, index))
    for accumulate in (False, True):
        args = (x, index, values, accumulate)
        assert_rule(aten.index_put.default, args, {}, aten.index_put(*args))


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pooling_at_the_edges_matches_eager(ceil_mode):
    x = torch.randint(0, 3, (2, 3, 9, 10)).float()  # many ties
    x[0, 0, 3, 3] = math.nan
    how = ([3, 2], [2, 2], [1, 0], [1, 2], ceil_mode)
    expected = aten.max_pool2d_with_indices(x, *how)
    assert_rule(aten.max_pool2d_with_indices.default, (x, *how), {}, expected)
    g = torch.randn_like(expected[0])
    args = (g, x, *how, expected[1])
    assert_rule(aten.max_pool2d_with_indices_backward.default, args, {}, aten.max_pool2d_with_indices_backward(*args))
    x = torch.randn(2, 3, 9, 10)
    for include, divisor in ((True, None), (False, None), (True, 5)):
        how = ([3, 2], [2, 2], [1, 1], ceil_mode, include, divisor)
        y = aten.avg_pool2d(x, *how)
        assert_rule(aten.avg_pool2d.default, (x, *how), {}, y)
        assert_rule(aten.avg_pool2d_backward.default, (y, x, *how), {}, aten.avg_pool2d_backward(y, x, *how))


@pytest.mark.parametrize("kernel, stride, padding, dilation", [
    ([3, 3], [2, 2], [1, 1], [1, 1]),
    # windows with gaps between them, offsets with every remainder modulo the stride, and with only one
    ([2, 1], [3, 2], [0, 0], [1, 1]),
    ([4, 3], [3, 1], [2, 0], [2, 3]),  # offsets of every remainder by the stride, and of one alone
])  # fmt: skip
def test_max_pooling_backward_matches_eager(kernel, stride, padding, dilation):
    x = torch.randn(2, 3, 11, 10)
    how = (kernel, stride, padding, dilation, False)
    y, indices = aten.max_pool2d_with_indices(x, *how)
    args = (torch.randn_like(y), x, *how, indices)
    assert_rule(aten.max_pool2d_with_indices_backward.default, args, {}, aten.max_pool2d_with_indices_backward(*args))


def test_foreach_in_half_precision_matches_eager():
    """The tensors are computed together as matrices; roundings and shapes must be eager's."""
    torch.manual_seed(0)
    xs, ys, zs = ([torch.randn(s).bfloat16() for s in ((3, 4, 3, 3), (2, 3, 5), (0, 2, 2), (4,))] for _ in range(3))
    for op, args in (
        (aten._foreach_add.List, (xs, ys)),
        (aten._foreach_mul.Scalar, (xs, 0.9)),
        (aten._foreach_mul.Tensor, (xs, torch.tensor(0.9))),
        (aten._foreach_lerp.Scalar, (xs, ys, 0.1)),
        (aten._foreach_addcmul.Scalar, (xs, ys, zs, 0.3)),
        (aten._foreach_sqrt.default, ([x.abs() for x in xs],)),
        (aten._foreach_add.List, (xs, [y.float() for y in ys])),
    ):
        assert_rule(op, args, {}, op(*args))
    assert_rule(aten._foreach_max.default, (xs[:2],), {}, aten._foreach_max(xs[:2]))


def test_grouped_products_match_eager():
    torch.manual_seed(0)
    offs = torch.tensor([2, 2, 7, 8], dtype=torch.int32)
    kinds = [((8, 16), (4, 16, 24)), ((4, 16, 24), (24, 8)), ((16, 8), (8, 24))]
    for left, right in kinds:
        x, y = torch.randn(left), torch.randn(right)
        bounds = [0, *offs.tolist()]
        parts = list(itertools.pairwise(bounds))
        if len(left) == 2 and len(right) == 3:
            expected = torch.cat([x[a:b] @ y[i] for i, (a, b) in enumerate(parts)])
        elif len(left) == 3:
            expected = torch.cat([x[i] @ y[:, a:b] for i, (a, b) in enumerate(parts)], 1)
        else:
            expected = torch.stack([x[:, a:b] @ y[a:b] for a, b in parts])
        assert_rule(aten._grouped_mm.default, (x, y, offs), {}, expected)
