"""Behaviour of PyTorch's random CPU kernels that depends on the version or the processor, detected by running them.

Since PyTorch 2.12 a uniform that rounds up to the end of its interval becomes the beginning instead, and dtypes
narrower than float32 are drawn as float32 and rounded. Kernels for processors without AVX2 do not fuse multiply-adds.
"""

from __future__ import annotations

from functools import cache

import torch

from .torch_names import DisableTorchDispatch

_SEED = 20_261_124
_COUNT = 4096


@cache
def uniform_leaves_out_end() -> bool:
    """Whether `uniform_(low, high)` never returns `high`."""
    with torch.no_grad(), DisableTorchDispatch():  # only four floats: an eighth of the uniforms round up to the end
        drawn = _filled(torch.float32, "uniform", 2.0**23, 2.0**23 + 4)
    return bool(drawn.max() < 2.0**23 + 4)


@cache
def uniform_roundings() -> int | None:
    """How often `uniform_(low, high)` rounds u * (high - low) + low: once where PyTorch's kernels fuse it, twice where
    they do not, as on processors without AVX2; None if it computes something else."""
    low, high = -0.1, 0.27
    with torch.no_grad(), DisableTorchDispatch():
        drawn, u = _filled(torch.float32, "uniform", low, high), _filled(torch.float32, "uniform", 0.0, 1.0)
        begin, end = torch.tensor([low, high])
        twice = u * (end - begin) + begin
        once = (u.double() * (end - begin).double() + begin.double()).float()
        return next((n for n, values in ((1, once), (2, twice)) if torch.equal(drawn, values)), None)


@cache
def rounds_single(name: str, dtype: torch.dtype) -> bool:
    """Whether `uniform_` or `normal_` (`name`) of `dtype` draws the values of float32, rounded."""
    if dtype == torch.float32:
        return True
    pair = (0.0, 1.0) if name == "uniform" else (0.5, 0.02)
    with torch.no_grad(), DisableTorchDispatch():
        expected = _filled(torch.float32, name, *pair).to(dtype)
        if name == "uniform":
            expected[expected == 1] = 0
        return torch.equal(_filled(dtype, name, *pair), expected)


def _filled(dtype: torch.dtype, name: str, first: float, second: float) -> torch.Tensor:
    out = torch.empty(_COUNT, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(_SEED)
    return getattr(out, f"{name}_")(first, second, generator=generator)
