"""`resize_`, `t_`, `set_` and `tensor.data = ...` with another shape in a traced step.

They are done while the step is traced, and undone afterwards. Such a step is traced at each call.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch
from ..errors import TraceError
from ..program.graph import Geometry, geometry_of
from ..program.source import here
from .exported_memory import is_exported
from .session import Tracing
from .storage_swap import set_storage, share_memory
from .tensor import DeferredTensor


class LayoutChanges:
    """The tensors that outlive a step and get another shape or storage in it."""

    def __init__(self, trace: Tracing) -> None:
        self._trace = trace
        self._before: list[tuple[torch.Tensor, Any, Geometry | None]] = []  # tensors, their storages and geometries

    def change(self, tensor: torch.Tensor) -> None:
        """Record that the step is about to change a tensor's shape or storage."""
        trace = self._trace
        if trace.retrace_reason is None:
            trace.retrace_reason = f"{here()} gives a tensor of shape {list(tensor.shape)} another shape or storage"
        if type(tensor) is DeferredTensor:
            self._before.append((tensor, tensor._storage, geometry_of(tensor)))
            return
        with DisableTorchDispatch(), torch.no_grad():
            original = tensor.detach()
        self._before.append((tensor, original, None))
        known = trace.as_input(tensor)
        if known is not None and known[1].value is not known[1].first:
            raise TraceError(
                f"{here()}: the step has edited a tensor from outside, of shape {list(tensor.shape)}, before it "
                "changes its shape or storage (resize_, t_, set_, .data = ...). Do that first, or create a new tensor: "
                "x = x.t()."
            )
        if known is not None and known[0] is tensor:
            trace.replace_input(tensor, original)

    def edit(self, storage: torch.UntypedStorage) -> None:
        """Record that the step is about to write to, resize or move a storage directly.

        Raises:
            TraceError: if the step uses a tensor with this storage.
        """
        trace = self._trace
        address = storage.data_ptr() if storage.device.type == "cpu" else 0
        if address and (trace.has_input_at(address) or is_exported(address)):
            raise TraceError(
                f"{here()}: the step edits, resizes or moves the storage of a tensor that it uses, which a compiled "
                "step cannot do. Edit the tensor, or assign a new tensor to the variable."
            )
        if trace.retrace_reason is None and storage.nbytes():
            trace.retrace_reason = f"{here()} edits a storage"

    def undo(self) -> None:
        """Restore the tensors' shapes and storages from before the step."""
        for tensor, before, geometry in reversed(self._before):
            if geometry is not None:
                set_storage(tensor, before, geometry)
            elif type(tensor) is DeferredTensor:
                share_memory(tensor, before)
            else:
                with DisableTorchDispatch():
                    tensor.data = before
        self._before.clear()
