"""`torch.nn.init.trunc_normal_`, a data-dependent loop, recorded as one operation.

Since torch 2.12 it draws by rejection. If no normal can be out of bounds (in most vision transformers: a standard
deviation of 0.02 between -2 and 2), it is recorded as a `normal_`. Else it becomes one node, and the stream position
after it is resolved later (`engine/rejection.py`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..compat.patches import original, replaces
from ..compat.torch_names import DisableTorchDispatch, local_tensor_or
from ..program import operations
from ..program.graph import is_contiguous
from ..rng.counter_stream import CounterStream
from . import session
from .constants import constant_tensor
from .dtensor import fill_as_one_process, shards_a_deferred_tensor
from .tensor import DeferredTensor, Hooks, is_pending

_NAME = "torch.nn.init._no_grad_trunc_normal_"

# Upper bounds of the normals that PyTorch's kernels can draw, in standard deviations: Box-Muller's radius
# sqrt(-2 log u) at the smallest uniform u, 2^-24 for blocks of float32 (5.77) and 2^-53 otherwise (8.57), rounded up.
_MAX_BLOCK, _MAX = 6.0, 9.0
# A narrower interval has too few float32 uniforms for inverse transform sampling.
_MIN_WIDTH = 2.0**-8
_HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


@replaces(_NAME)
def trunc_normal_(
    original: Callable[..., torch.Tensor],
    tensor: torch.Tensor,
    mean: float,
    std: float,
    a: float,
    b: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """As `torch.nn.init._no_grad_trunc_normal_`."""
    if shards_a_deferred_tensor(tensor):
        return fill_as_one_process(tensor, lambda whole: trunc_normal_(original, whole, mean, std, a, b, generator))
    if is_pending(local := local_tensor_or(tensor, None)):  # drawn again only where it was out of bounds, on any rank
        with torch.no_grad():
            trunc_normal_(original, local, mean, std, a, b, generator)
        return tensor
    if not _by_rejection(original):  # before torch 2.12: ordinary operations
        return original(tensor, mean, std, a, b, generator=generator)
    if session.trace is not None or not is_pending(tensor):
        return original(tensor, mean, std, a, b, generator=generator)
    if (mean < a - 2 * std) or (mean > b + 2 * std):
        warnings.warn(
            "mean is more than 2 std from [a, b] in nn.init.trunc_normal_. "
            "The distribution of values may be incorrect.",
            stacklevel=4,
        )
    with torch.no_grad():
        source = torch.default_generator if generator is None else generator
        if tensor.device.type == "cuda" and session.generators.policy != "counter":
            return original(tensor, mean, std, a, b, generator=generator)  # run now: the loop reads values
        if isinstance(session.generators.locate(source)[0], CounterStream):
            return _counted(tensor, mean, std, a, b, generator)
        from ..engine.rejection import can_be_split  # not before the first use: most captures do without it

        blocks = is_contiguous(tensor.shape, tensor.stride()) and can_be_split(tensor.numel(), tensor.dtype)
        if not _mostly_in_bounds(mean, std, a, b):
            return _now(tensor, mean, std, a, b, generator)
        largest = std * (_MAX_BLOCK if blocks and tensor.dtype in _HALF_AND_SINGLE else _MAX)
        low, high = rounded(a, tensor.dtype), rounded(b, tensor.dtype)
        if mean - largest >= low and mean + largest <= high:
            return tensor.normal_(mean, std, generator=generator)
        if not blocks:
            return _now(tensor, mean, std, a, b, generator)
        args = (tensor, float(mean), float(std), float(a), float(b))
        return Hooks.dispatch(operations.trunc_normal_, args, {"generator": generator})


def rounded(bound: float, dtype: torch.dtype) -> float:
    """A bound rounded to `dtype`."""
    with DisableTorchDispatch():
        return torch.tensor(bound, dtype=dtype).item()


def _mostly_in_bounds(mean: float, std: float, a: float, b: float) -> bool:
    """Whether PyTorch draws normals, instead of uniforms that are accepted by the normal's density."""
    return _normal_cdf((b - mean) / std) - _normal_cdf((a - mean) / std) > 0.3


def _normal_cdf(x: float) -> float:
    return (1.0 + math.erf(x / math.sqrt(2.0))) / 2.0


def _counted(tensor: DeferredTensor, mean: float, std: float, a: float, b: float, generator: Any) -> torch.Tensor:
    """Under the counter policy: inverse transform sampling, with one uniform per element.

    With rejection, the number of words would depend on whether a value is out of bounds, and so on its last bit, in
    which engines differ.
    """
    low, high = (2 * _normal_cdf((bound - mean) / std) - 1 for bound in (a, b))
    if high - low < _MIN_WIDTH:
        return _now(tensor, mean, std, a, b, generator)
    if max(-low, high) == 1.0 and min(-low, high) == 1.0:
        return tensor.normal_(mean, std, generator=generator)
    single = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    values = torch.empty(tensor.shape, dtype=single, device=tensor.device)
    values.uniform_(low, high, generator=generator).erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)
    return tensor.copy_(values)


def _now(tensor: DeferredTensor, mean: float, std: float, a: float, b: float, generator: Any) -> torch.Tensor:
    """Draw now: for tensors that are small or not contiguous, or a normal's tail."""
    session.generators.load(torch.default_generator if generator is None else generator)
    with DisableTorchDispatch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        real = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        original(_NAME)(real, mean, std, a, b, generator=generator)
        values = constant_tensor(real, copy=False)
    tensor.copy_(values)
    return tensor


def _by_rejection(function: Any) -> bool:
    return "erfinv_" not in function.__code__.co_names
