"""Core ATen, and the other operations that the lowering promises to cover."""

from __future__ import annotations

import re
from typing import Any

import torch

CORE = {
    getattr(getattr(torch.ops.aten, name), overload or "default")
    for name, _, overload in (
        n[6:].partition(".") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")
    )
    if torch.Tag.core in getattr(getattr(torch.ops.aten, name), overload or "default").tags
}
CORE_NAMES = {overload._schema.name.removeprefix("aten::").strip("_") for overload in CORE}

# The families in addition to Core ATen: their names in PyTorch's table.
_FAMILIES = re.compile(
    r"attention|cross_entropy|nll_loss|(layer|group|batch|instance|rms)_norm|conv|embedding|pool|interpolate|upsample"
    r"|grid_sample|^scatter|^index|gather|^take|^put|sort$|topk|kthvalue|^cum|cumsum|^fft\.|^linalg\.|^qr$|cholesky"
    r"|svd|eigh|inverse|solve|norm(\.|$)|^lu|det$|complex|^polar|^real$|^imag$|^angle|conj|bitwise|logical|shift(_|$)"
    r"|^(div|floor_divide|true_divide|remainder|fmod|gcd|lcm)|foreach|optim"
)


def aten_names(op: Any) -> set[str]:
    """The ATen names of an operation in PyTorch's table."""
    return {
        op.name,
        op.name.rpartition(".")[2],
        op.aten_name or "",
        (op.aten_backward_name or "").removesuffix("_backward"),
    }


def is_listed(op: Any) -> bool:
    """Whether `op` is in Core ATen or one of the families above."""
    return op.name.startswith("core.") or bool(aten_names(op) & CORE_NAMES) or bool(_FAMILIES.search(op.full_name))
