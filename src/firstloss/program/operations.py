"""Firstloss's own operations, which a Program may contain besides ATen's."""

from __future__ import annotations

from typing import Any

import torch

from ..compat.patches import original

_LIBRARY = torch.library.Library("firstloss", "DEF")

_TRUNC_NORMAL = "torch.nn.init._no_grad_trunc_normal_"
# `torch.nn.init.trunc_normal_`, whose loop is data-dependent: see `capture/trunc_normal.py`.
_LIBRARY.define(
    "trunc_normal_(Tensor(a!) self, float mean, float std, float a, float b, *, Generator? generator=None)"
    " -> Tensor(a!)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.impl("trunc_normal_", lambda *args, **kwargs: original(_TRUNC_NORMAL)(*args, **kwargs), "CPU")
# An optimization barrier (see `capture/activation_checkpointing.py`); for PyTorch's kernels there is nothing to order.
_LIBRARY.define("barrier(Tensor[] xs, Tensor after) -> Tensor[]")
_LIBRARY.impl("barrier", lambda xs, after: [torch.empty_like(x) for x in xs], "Meta")
_LIBRARY.impl("barrier", lambda xs, after: [x.clone() for x in xs], "CompositeExplicitAutograd")

trunc_normal_: Any = torch.ops.firstloss.trunc_normal_.default
barrier: Any = torch.ops.firstloss.barrier.default
