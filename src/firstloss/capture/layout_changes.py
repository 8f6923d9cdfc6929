"""`resize_`, `t_`, `set_` and `tensor.data = ...` of another shape in a traced step: done while it is traced, and
undone afterwards. Such a step is traced at each call.
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
    """The tensors that outlive a step, and that it gives another shape or storage."""

    def __init__(self, trace: Tracing) -> None:
        self._trace = trace
        self._before: list[tuple[torch.Tensor, Any, Geometry | None]] = []  # tensors, and how they looked at what

    def change(self, tensor: torch.Tensor) -> None:
        """The step is about to give a tensor another shape or storage, which is done to the tensor itself."""
        trace = self._trace
        if trace.retrace_reason is None:
            trace.retrace_reason = f"{here()} gives a tensor of shape {list(tensor.shape)} another shape or storage"
        if type(tensor) is DeferredTensor:
            self._before.append((tensor, tensor._storage, geometry_of(tensor)))
            return
        with DisableTorchDispatch(), torch.no_grad():
            as_it_lies = tensor.detach()
        self._before.append((tensor, as_it_lies, None))
        known = trace.as_input(tensor)
        if known is not None and known[1].value is not known[1].first:
            raise TraceError(
                f"{here()}: the step has edited a tensor from outside, of shape {list(tensor.shape)}, and gives it "
                "another shape or storage now (resize_, t_, set_, .data = ...). Do that first, or make a new tensor: "
                "kept = kept.t()."
            )
        if known is not None and known[0] is tensor:
            trace.replace_input(tensor, as_it_lies)

    def edit(self, storage: torch.UntypedStorage) -> None:
        """The step is about to write to a storage, to resize or to move it, past all tensors.

        Raises:
            TraceError: if the step has met a tensor that has it.
        """
        trace = self._trace
        address = storage.data_ptr() if storage.device.type == "cpu" else 0
        if address and (trace.has_input_at(address) or is_exported(address)):
            raise TraceError(
                f"{here()}: the step edits, resizes or moves the storage of a tensor that it uses, which a compiled "
                "step cannot do. Edit the tensor, or give the name a new one."
            )
        if trace.retrace_reason is None and storage.nbytes():
            trace.retrace_reason = f"{here()} edits a storage"

    def undo(self) -> None:
        """Each looks again at what it looked at before the step."""
        for tensor, before, geometry in reversed(self._before):
            if geometry is not None:
                set_storage(tensor, before, geometry)
            elif type(tensor) is DeferredTensor:
                share_memory(tensor, before)
            else:
                with DisableTorchDispatch():
                    tensor.data = before
        self._before.clear()
