"""How this PyTorch's CPU kernels fill tensors with random numbers, where versions differ: found by trying.

Since 2.12 a uniform that is rounded up to the end of its interval becomes the beginning, and the narrow dtypes are
drawn as float32 is, and then rounded.
"""

from __future__ import annotations

from functools import cache

import torch

from .torch_names import DisableTorchDispatch

_SEED = 20_261_124
_COUNT = 4096


@cache
def uniform_leaves_out_end() -> bool:
    """Whether `uniform_(low, high)` never gives `high`."""
    with torch.no_grad(), DisableTorchDispatch():  # four floats, and an eighth of all uniforms is rounded up to the end
        drawn = _filled(torch.float32, "uniform", 2.0**23, 2.0**23 + 4)
    return bool(drawn.max() < 2.0**23 + 4)


@cache
def rounds_single(dtype: torch.dtype) -> bool:
    """Whether fills of `dtype` are those of float32, rounded."""
    if dtype == torch.float32:
        return True
    with torch.no_grad(), DisableTorchDispatch():
        uniform, normal = (_filled(torch.float32, name, 0.0, 1.0).to(dtype) for name in ("uniform", "normal"))
        uniform[uniform == 1] = 0
        return torch.equal(_filled(dtype, "uniform", 0.0, 1.0), uniform) and torch.equal(
            _filled(dtype, "normal", 0.0, 1.0), normal
        )


def _filled(dtype: torch.dtype, name: str, first: float, second: float) -> torch.Tensor:
    out = torch.empty(_COUNT, dtype=dtype, device="cpu")
    generator = torch.Generator().manual_seed(_SEED)
    return getattr(out, f"{name}_")(first, second, generator=generator)
