"""What a traced step does to tensors that outlive it, beyond their values: other memory, another shape or storage.

`weight.data = tensor` gives a weight other memory (`DataAssignments`).

A compiled step writes a weight's new content to its old memory instead. That is equivalent only if the old and the new
memory have no other views: so other views of the old memory get a copy of it, and views of the new memory become views
of the weight.

`resize_`, `t_`, `set_` and `tensor.data = ...` with another shape (`LayoutChanges`) are done while the step is traced,
and undone afterwards. Such a step is traced at each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch

from ..compat.torch_names import DisableTorchDispatch, preserve_version_counter, storage_use_count
from ..errors import TraceError
from ..program.graph import Geometry, geometry_of
from ..program.source import here
from .exported_memory import is_exported
from .session import Tracing
from .storage_swap import set_storage, share_memory
from .tensor import DeferredStorage, DeferredTensor, TensorRef, is_pending


class InputView(TensorRef):
    """A reference to a tensor on a backend, and which part of which storage it is a view of."""

    __slots__ = ("storage", "geometry")
    among: dict[int, InputView]  # type: ignore[assignment]
    storage: DeferredStorage
    geometry: Geometry

    @classmethod
    def record(cls, tensor: DeferredTensor, among: dict[int, InputView]) -> None:
        """Add a reference to `tensor` to those by id."""
        ref = among[id(tensor)] = cls(tensor)
        ref.among, ref.storage, ref.geometry = among, tensor._storage, geometry_of(tensor)

    def drop(self) -> None:
        tensor = self()
        if tensor is not None and self.among.get(id(tensor)) is self:
            del self.among[id(tensor)]

    def changed(self) -> bool:
        """Whether the tensor views another storage now, or another part of it."""
        tensor = self()
        if tensor is None:
            return False
        here = type(tensor) is DeferredTensor and tensor._storage is self.storage
        return not here or geometry_of(tensor) != self.geometry


class OldMemory(NamedTuple):
    """The memory that a weight had when a step assigned other memory to it.

    Attributes:
        weight: the weight.
        copy: a traced tensor of the whole content; None if nothing else views or has exported the memory.
        exported: whether it was exported.
    """

    weight: torch.Tensor
    copy: DeferredTensor | None
    exported: bool


class DataAssignments:
    """The weights to which a step has assigned other memory.

    Attributes:
        weights: the old memory of weights, by their storages.
    """

    def __init__(self, trace: Tracing) -> None:
        self._trace = trace
        self.weights: dict[DeferredStorage, OldMemory] = {}
        # The other views of weights' memory, with their storages before and since.
        self._views: list[tuple[weakref.ref[DeferredTensor], DeferredStorage, DeferredStorage]] = []
        self._real: list[tuple[torch.Tensor, Any]] = []  # weights not on a backend, and the source lines

    def assign(self, weight: torch.Tensor, other: Any) -> None:
        """Record `weight.data = other`, of the same shape and dtype.

        Raises:
            TraceError: if the new memory has other views that the step cannot rebind.
        """
        source = other if type(other) is DeferredTensor and other._storage.trace is self._trace else None
        if source is not None and self._trace.is_external(source._storage):
            source = None
        if source is None and not self._is_constant(other):
            self.refuse(weight, "is memory from outside of the step")
        storage = weight._storage if type(weight) is DeferredTensor else self._trace.adopt_real(weight)
        if type(weight) is not DeferredTensor:
            self._real.append((weight, here()))
            _give_own_memory(storage, storage.alive())
        elif weight._ref().covers:
            self._give_viewers_own_memory(weight)
        elif len(weight._storage.alive()) > 1:
            self.refuse(weight, "takes it from the memory of a larger tensor")
        sharing = [] if source is None else source._storage.alive()
        same_geometry = source is not None and geometry_of(source) == geometry_of(weight)
        if len(sharing) > 1 and not (same_geometry and source._ref().covers):  # type: ignore[union-attr]
            self.refuse(weight, "is a part of a larger tensor")
        with torch.no_grad(), preserve_version_counter(weight):
            weight.copy_(other)
        for tensor in sharing:
            set_storage(tensor, storage, geometry_of(tensor) if len(sharing) > 1 else geometry_of(weight))

    def _is_constant(self, other: Any) -> bool:
        """Whether the step has computed `other` from constants."""
        return is_pending(other) and other._storage.value.known

    def _give_viewers_own_memory(self, weight: DeferredTensor) -> None:
        """Rebind other views of the memory of `weight` to a copy of it."""
        storage = weight._storage
        if storage.trace is not self._trace:
            self._trace.adopt(storage)
        others = [t for t in storage.alive() if t is not weight]
        exported = storage not in self.weights and storage.resident is not None and storage.resident.is_exported
        copy = _give_own_memory(storage, others) if others or exported else None
        self._views += [(weakref.ref(tensor), storage, tensor._storage) for tensor in others]
        self.weights.setdefault(storage, OldMemory(weight, copy, exported))

    def current_storage(self, storage: DeferredStorage) -> DeferredStorage:
        """The storage of a real tensor that shares the memory that a weight's `storage` had before the step."""
        old = self.weights.get(storage)
        return old.copy._storage if old is not None and old.exported and old.copy is not None else storage

    def refuse(self, weight: torch.Tensor, why: str) -> NoReturn:
        """
        Raises:
            TraceError: always.
        """
        raise TraceError(
            f"{here()}: the step assigns other memory to a tensor of shape {list(weight.shape)} by `.data = ...`, "
            f"which {why}, so that other tensors would share it. Use weight.data.copy_(...), or weight.data = "
            "....clone()."
        )

    def check(self) -> None:
        """Check the assignments, after the step has been traced.

        Raises:
            TraceError: if the memory of a weight that is not on a backend is shared.
        """
        for weight, line in self._real:
            storage = weight.untyped_storage()
            if self._trace.views_of(id(weight)) > 1 or storage_use_count(storage) > 2:
                raise TraceError(
                    f"{line}: the step assigns other memory to a tensor of shape {list(weight.shape)} by `.data = "
                    "...`, but another tensor or a NumPy array shares its memory. Use weight.data.copy_(...), which "
                    "the other one will see, too, or create the other one from a clone."
                )

    def restore_views(self) -> None:
        """Rebind the other views to the storages from before the step."""
        for ref, before, since in self._views:
            tensor = ref()
            if tensor is not None and tensor._storage is since:
                set_storage(tensor, before, geometry_of(tensor))
        self._views.clear()

    def views(self) -> Iterator[tuple[DeferredStorage, list[DeferredTensor]]]:
        """The storages of weights whose old memory is copied, with the other views of it that there are now."""
        for storage, old in self.weights.items():
            if old.copy is not None:
                yield storage, [tensor for tensor in storage.alive() if tensor is not old.weight]

    def outdated(self) -> bool:
        """Whether a weight's memory has other views, or has been exported, unlike when the step was traced."""
        return any(
            storage.resident.is_exported != old.exported or old.copy is None and len(storage.alive()) > 1
            for storage, old in self.weights.items()
        )


def _give_own_memory(storage: DeferredStorage, views: list[DeferredTensor]) -> Any:
    """Rebind `views` of a storage to a copy of its content; returns a tensor of the whole copy."""
    value = storage.value
    with torch.no_grad():
        copy: Any = DeferredTensor.wrap(storage, value.shape, value.stride, 0, value.dtype).clone()
    for tensor in views:
        set_storage(tensor, copy._storage, geometry_of(tensor))
    return copy


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
        as_input = trace.as_input(tensor)
        if as_input is not None and as_input[1].value is not as_input[1].first:
            raise TraceError(
                f"{here()}: the step has edited a tensor from outside, of shape {list(tensor.shape)}, before it "
                "changes its shape or storage (resize_, t_, set_, .data = ...). Do that first, or create a new tensor: "
                "x = x.t()."
            )
        if as_input is not None and as_input[0] is tensor:
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
