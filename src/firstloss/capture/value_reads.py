"""Values of real tensors that a traced step's Python reads: guards of the compiled step."""

from __future__ import annotations

import torch

from ..compat.torch_names import version_of
from ..program.compare import same_bytes
from .tensor import DeferredTensor

# Of larger tensors PyTorch's count of the edits is compared, which edits through numpy do not change.
_COPIED_BYTES = 1 << 20


class ValueRead:
    """A tensor from outside the step, and what it held when it was read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else version_of(tensor)
        self._copy = tensor.detach().clone() if tensor.numel() * tensor.itemsize <= _COPIED_BYTES else None

    def outdated(self) -> bool:
        """Whether it holds something else now, or has come to live on a backend, so that it would be an input."""
        if type(self._tensor) is DeferredTensor:
            return True
        if self._copy is None:
            return self._version is not None and version_of(self._tensor) != self._version
        now = self._tensor.detach()
        return now.shape != self._copy.shape or now.dtype != self._copy.dtype or not same_bytes(now, self._copy)
