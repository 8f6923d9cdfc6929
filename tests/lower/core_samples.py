"""Samples for overloads of Core ATen that PyTorch's own samples do not reach.

Each is an operation in PyTorch's sense (an `OpInfo`) that calls the overload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_dtype import _dispatch_dtypes

from tests.op_db import OpInfo, SampleInput

aten = torch.ops.aten

FLOATS = (torch.float32, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int64)
ALL = (*NUMBERS, torch.bool, torch.complex64)
F32 = (torch.float32,)


def _made(shape: tuple[int, ...], dtype: torch.dtype, grad: bool = False) -> torch.Tensor:
    """Nonzero numbers of both signs, distinct up to eight elements."""
    count = torch.Size(shape).numel()
    x = (torch.arange(count) * 5 % 17 - 8.5) / 2
    x = x.round() + 1 if dtype == torch.int64 else x
    x = (x > 0) if dtype == torch.bool else x.to(dtype)
    return x.reshape(shape).requires_grad_(grad and x.is_floating_point())


def _direct(overload: Any, dtypes: tuple, *calls: Callable, grad: bool = True, of: Callable = lambda x: x) -> OpInfo:
    """An `OpInfo` of `overload`: each of `calls` gets a function that creates tensors and returns arguments; `of` the
    result is compared."""

    def samples(op: Any, device: Any, dtype: torch.dtype, requires_grad: bool, **_: Any) -> Any:
        for call in calls:
            arguments = call(lambda *shape: _made(shape, dtype, requires_grad))
            first, *rest = arguments if isinstance(arguments, tuple) else (arguments,)
            keywords = rest.pop() if rest and isinstance(rest[-1], dict) else {}
            yield SampleInput(first, args=tuple(rest), kwargs=keywords)

    return OpInfo(
        f"core.{overload}",
        op=lambda *args, **kwargs: of(overload(*args, **kwargs)),
        dtypes=_dispatch_dtypes(dtypes),
        sample_inputs_func=samples,
        supports_autograd=grad,
        supports_out=False,
        inplace_variant=None,
        method_variant=None,
    )


_places = torch.tensor


def _bounds(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.detach() - 1, x.detach() + 1


_IMAGE = (1, 2, 6, 6)

# Comparisons and arithmetic with a number, which Python's operators never call: they wrap the number in a tensor.
_SCALARS = [
    _direct(
        getattr(getattr(aten, name), overload), dtypes, lambda t: (t(2, 4), 2), lambda t: (t(0), 3), lambda t: (t(), 1)
    )
    for names, overload, dtypes in (
        (("add", "sub", "mul", "div", "fmod", "remainder"), "Scalar", NUMBERS),
        (("eq", "ne", "ge", "gt", "le", "lt"), "Scalar", (*NUMBERS, torch.bool)),
        (("bitwise_and", "bitwise_or", "bitwise_xor"), "Scalar", (torch.int64,)),
        (("pow",), "Tensor_Scalar", NUMBERS),
    )
    for name in names
]

_VIEWS = [
    _direct(aten.alias.default, ALL, lambda t: t(2, 4)),
    _direct(aten.as_strided.default, ALL, lambda t: (t(8), (2, 3), (1, 2), 1)),
    _direct(aten.diagonal.default, ALL, lambda t: t(3, 4), lambda t: (t(2, 3, 4), 1, 0, 2)),
    _direct(aten.expand.default, ALL, lambda t: (t(3, 1), (2, 3, 4)), lambda t: (t(1), (-1,))),
    _direct(aten.permute.default, ALL, lambda t: (t(2, 3, 4), (2, 0, 1)), lambda t: (t(), ())),
    _direct(aten.select.int, ALL, lambda t: (t(3, 4), 1, -2), lambda t: (t(3), 0, 1)),
    _direct(aten.slice.Tensor, ALL, lambda t: (t(3, 8), 1, 1, -1, 3), lambda t: (t(3), 0, 2, 1)),
    _direct(aten.split_with_sizes.default, ALL, lambda t: (t(3, 6), (1, 5, 0), 1)),
    _direct(aten.squeeze.dim, ALL, lambda t: (t(1, 3, 1), 2), lambda t: (t(3), 0)),
    _direct(aten.squeeze.dims, ALL, lambda t: (t(1, 3, 1), (0, 1, 2))),
    _direct(aten.unsqueeze.default, ALL, lambda t: (t(3), -1), lambda t: (t(), 0)),
    _direct(aten.view.default, ALL, lambda t: (t(2, 4), (-1, 2)), lambda t: (t(), (1, 1))),
]

_REDUCTIONS = [
    _direct(aten.any.default, ALL, lambda t: t(2, 4), lambda t: t(0)),
    _direct(aten.any.dim, ALL, lambda t: (t(2, 4), 1, True), lambda t: (t(2, 0), -1)),
    _direct(aten.any.dims, ALL, lambda t: (t(2, 3, 2), (0, 2)), lambda t: (t(2, 3), None, True)),
    _direct(aten.sum.dim_IntList, ALL, lambda t: (t(2, 4), (1,)), lambda t: (t(2, 0), (1,)), lambda t: (t(2, 3), None)),
    _direct(aten.var.dim, FLOATS, lambda t: (t(2, 4), (1,)), lambda t: (t(2, 4), (0, 1), False, True)),
    _direct(aten.var.correction, FLOATS, lambda t: (t(2, 4), (1,), {"correction": 0.5})),
    _direct(aten._cdist_forward.default, F32, lambda t: (t(3, 4), t(2, 4) + 1, 2.0, None), grad=False),
    _direct(aten._pdist_forward.default, F32, lambda t: (t(4, 3), 2.0), lambda t: (t(4, 3), 1.0), grad=False),
]

_NETWORKS = [
    _direct(aten.adaptive_avg_pool1d.default, F32, lambda t: (t(2, 3, 8), (4,)), lambda t: (t(3, 8), (3,))),
    _direct(aten._adaptive_avg_pool2d.default, FLOATS, lambda t: (t(*_IMAGE), (2, 4))),
    _direct(aten._adaptive_avg_pool3d.default, FLOATS, lambda t: (t(1, 2, 4, 4, 4), (2, 3, 1))),
    _direct(aten.avg_pool1d.default, F32, lambda t: (t(2, 3, 8), (3,), (2,), (1,)), lambda t: (t(3, 8), (2,))),
    _direct(
        aten._embedding_bag.default,
        F32,
        *(lambda t, mode=mode: (t(5, 3), _places([0, 2, 4, 2]), _places([0, 3]), False, mode) for mode in (0, 1)),
        of=lambda found: found[0],  # the rest is for its backward pass, and partly uninitialized
    ),
    _direct(aten.embedding.default, FLOATS, lambda t: (t(5, 3), _places([[0, 4], [2, 2]]), 2)),
    _direct(
        aten._native_batch_norm_legit.default,
        F32,
        lambda t: (t(3, 2, 4), t(2), t(2), _made((2,), torch.float32), t(2).detach().abs(), True, 0.1, 1e-5),
    ),
    _direct(aten._native_batch_norm_legit.no_stats, F32, lambda t: (t(3, 2, 4), t(2), t(2), True, 0.1, 1e-5)),
    _direct(
        aten._native_batch_norm_legit_no_training.default,
        F32,
        lambda t: (t(3, 2, 4), t(2), t(2), t(2).detach(), t(2).detach().abs(), 0.1, 1e-5),
        grad=False,
    ),
    _direct(aten.upsample_bilinear2d.vec, FLOATS, lambda t: (t(*_IMAGE), (3, 9), False, None)),
    _direct(aten.upsample_nearest2d.vec, FLOATS, lambda t: (t(*_IMAGE), None, (1.5, 2.0))),
    _direct(aten.grid_sampler_2d.default, F32, lambda t: (t(*_IMAGE), t(1, 3, 3, 2) / 5, 0, 1, False)),
    _direct(aten.col2im.default, F32, lambda t: (t(1, 8, 9), (4, 4), (2, 2), (1, 1), (0, 0), (1, 1))),
]

_ROUNDED = tuple(lambda t, how=how: (t(8), 3, {"rounding_mode": how}) for how in ("floor", "trunc"))
_GRADIENT = (lambda t: (t(4, 3), _places([0, 4, 2, 2]), 5, 4, False),)
_REST = [
    _direct(aten.embedding_dense_backward.default, FLOATS, *_GRADIENT, grad=False),
    _direct(aten.atan2.default, FLOATS, lambda t: (t(2, 4), t(4) + 1)),
    _direct(aten.clamp.default, NUMBERS, lambda t: (t(8), -1, 2), lambda t: (t(8), None, 1)),
    _direct(aten.clamp.Tensor, NUMBERS, lambda t: (t(2, 4), *_bounds(t(4)))),
    _direct(aten.copy.default, ALL, lambda t: (t(2, 4), t(4)), grad=False),
    _direct(aten.div.Scalar_mode, NUMBERS, *_ROUNDED),
    _direct(aten.fill.Scalar, ALL, lambda t: (t(2, 4), 1)),
    _direct(aten.full_like.default, ALL, lambda t: (t(2, 4), 1), grad=False),
    _direct(aten.pow.Scalar, FLOATS, lambda t: (2.5, t(2, 4)), lambda t: (0, t(4).abs())),
    _direct(aten.resize_.default, ALL, lambda t: (t(2, 4).clone(), (2, 2)), grad=False),
    _direct(aten.scalar_tensor.default, F32, lambda t: (2.5,), grad=False),
    _direct(aten.scatter.value, ALL, lambda t: (t(2, 4), 1, _places([[0, 3], [1, 1]]), 1)),
    _direct(
        aten.scatter_reduce.two,
        F32,
        *(lambda t, how=how: (t(2, 4), 1, _places([[0, 3], [1, 2]]), t(2, 2), how) for how in ("sum", "amax", "mean")),
    ),
    _direct(aten.index_put.default, ALL, lambda t: (t(4, 3), (_places([0, 2]), None), t(3).detach())),
    _direct(aten._fft_r2c.default, F32, lambda t: (t(2, 8), (1,), 0, True)),
    _direct(aten._fft_c2r.default, (torch.complex64,), lambda t: (t(2, 5), (1,), 2, 8)),
    _direct(aten.native_dropout.default, FLOATS, lambda t: (t(2, 4), 0.5, True), lambda t: (t(2, 4), 0.5, False)),
    _direct(aten.rand.default, F32, lambda t: ((2, 4),), grad=False),
    _direct(aten.randn.default, F32, lambda t: ((2, 4),), grad=False),
    _direct(aten.randperm.default, F32, lambda t: (8,), grad=False),
]

DIRECT: list[OpInfo] = [*_SCALARS, *_VIEWS, *_REDUCTIONS, *_NETWORKS, *_REST]
