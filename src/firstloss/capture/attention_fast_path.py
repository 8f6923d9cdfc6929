"""Patches of PyTorch's fast path for `nn.TransformerEncoder` and `nn.MultiheadAttention` in evaluation.

Its kernels take nested tensors, and decide by the values of a padding mask, so in a traced step the modules' ordinary
path is recorded. The results are the same to rounding, but for one thing that the fast path does: an encoder's output
is 0 where the input is padding, before its final norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat.patches import replaces
from ..compat.torch_names import canonical_mask, fast_path_is_enabled
from . import session

Tensor = torch.Tensor


@replaces("torch.backends.mha.get_fastpath_enabled")
def get_fastpath_enabled(original: Callable[[], bool]) -> bool:
    """As `get_fastpath_enabled`; False in a traced step."""
    return session.trace is None and original()


@replaces("torch.nn.TransformerEncoder.forward")
def encode(original: Callable[..., Tensor], self: Any, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As `TransformerEncoder.forward`."""
    mask, padding, is_causal = _arguments(*args, **kwargs)
    if session.trace is None or padding is None or not _takes_fast_path(self, src, mask):
        return original(self, src, *args, **kwargs)
    padding = canonical_mask(
        mask=padding, mask_name="src_key_padding_mask", other_type=None, other_name="mask", target_type=src.dtype
    )
    is_padding = padding == -torch.inf
    if getattr(self, "mask_check", True):  # only padding on the right is made nested
        is_padding = is_padding & (is_padding[:, 1:] >= is_padding[:, :-1]).all()
    output = src
    for layer in self.layers:
        output = layer(output, src_mask=None, is_causal=is_causal is True, src_key_padding_mask=padding)
    output = torch.where(is_padding[..., None], torch.zeros((), dtype=output.dtype), output)
    return output if self.norm is None else self.norm(output)


def _arguments(mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> tuple[Any, Any, Any]:
    return mask, src_key_padding_mask, is_causal


def _takes_fast_path(encoder: Any, src: Tensor, mask: Tensor | None) -> bool:
    """Whether eager PyTorch would make `src` a nested tensor, if its padding is on the right."""
    first = encoder.layers[0]
    if not fast_path_is_enabled(torch.backends.mha) or not getattr(encoder, "use_nested_tensor", False):
        return False
    if first.training or src.dim() != 3 or mask is not None or torch.is_autocast_enabled():
        return False
    attention = first.self_attn
    held = (attention.in_proj_weight, attention.in_proj_bias, *attention.out_proj.parameters())
    held += tuple(p for part in (first.norm1, first.norm2, first.linear1, first.linear2) for p in part.parameters())
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in (src, *held)))
