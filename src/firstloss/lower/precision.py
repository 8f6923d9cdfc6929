"""The precision of float32 products: on a GPU as set in PyTorch, elsewhere full.

PyTorch multiplies matrices in full precision unless `torch.set_float32_matmul_precision` says otherwise, and convolves
in TF32 unless `torch.backends.cudnn.allow_tf32` is False. XLA's default on a GPU is TF32 for both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import torch
from jax import lax


class Precisions(NamedTuple):
    """The precisions of matrix products and of convolutions."""

    products: lax.Precision
    convolutions: lax.Precision


_FULL = Precisions(lax.Precision.HIGHEST, lax.Precision.HIGHEST)


def is_for_gpus() -> bool:
    """Whether the code being lowered is for a GPU."""
    return jax.default_backend() == "gpu"


def now() -> Precisions:
    """The current settings."""
    if not is_for_gpus():
        return _FULL
    cudnn: Any = torch.backends.cudnn
    return Precisions(_of(torch.backends.cuda.matmul.fp32_precision), _of(cudnn.conv.fp32_precision))


def _of(setting: str) -> lax.Precision:
    return lax.Precision.DEFAULT if setting == "tf32" else lax.Precision.HIGHEST
