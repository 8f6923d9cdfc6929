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
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch

from ..compat.torch_names import DisableTorchDispatch, preserve_version_counter, storage_use_count
from ..errors import TraceError
from ..program.graph import Geometry, geometry_of
from ..program.source import here
from .exported_memory import is_exported
from .session import Tracing
from .storage_swap import set_storage, share_memory
from .tensor import DeferredStorage, DeferredTensor, is_pending


class Viewer(NamedTuple):
    """Another view of a weight's memory, when the weight was given other memory.

    Attributes:
        tensor: the view.
        before: the weight's storage, which it was a view of before the step.
        geometry: the view's.
        view: a traced tensor with the same geometry, on the copy of the old memory.
        whole: a traced tensor of that whole copy.
    """

    tensor: weakref.ref[DeferredTensor]
    before: DeferredStorage
    geometry: Geometry
    view: DeferredTensor
    whole: DeferredTensor


class DataAssignments:
    """The weights to which a step has assigned other memory.

    Attributes:
        weights: the storages of weights, each with a traced tensor of its old memory, or None if that is not exported.
        viewers: the other views of the old memory.
    """

    def __init__(self, trace: Tracing) -> None:
        self._trace = trace
        self.weights: dict[DeferredStorage, Any] = {}
        self.viewers: list[Viewer] = []
        self._exported: set[DeferredStorage] = set()
        # Tables that held views of a weight's memory when the step began, with their keys: see `views_before`.
        self._holders: dict[DeferredStorage, list[tuple[dict[Any, Any], Any]]] = {}
        self._held: list[weakref.ref[DeferredTensor]] = []
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
        is_exported = storage not in self.weights and storage.resident is not None and storage.resident.is_exported
        old_memory: Any = None
        if others or is_exported:
            old_memory = _give_own_memory(storage, others)
            for tensor in others:
                geometry = geometry_of(tensor)
                view = DeferredTensor.wrap(old_memory._storage, *geometry)
                self.viewers.append(Viewer(weakref.ref(tensor), storage, geometry, view, old_memory))
        if is_exported:
            self._exported.add(storage)
        self.weights.setdefault(storage, old_memory if is_exported else None)

    def current_storage(self, storage: DeferredStorage) -> DeferredStorage:
        """The storage of a real tensor that shares the memory that a weight's `storage` had before the step."""
        old_memory = self.weights.get(storage)
        return storage if old_memory is None else old_memory._storage

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
            if self._trace.views_of(weight) > 1 or storage_use_count(storage) > 2:
                raise TraceError(
                    f"{line}: the step assigns other memory to a tensor of shape {list(weight.shape)} by `.data = "
                    "...`, but another tensor or a NumPy array shares its memory. Use weight.data.copy_(...), which "
                    "the other one will see, too, or create the other one from a clone."
                )

    def restore_viewers(self) -> None:
        """Rebind the other views to the storages from before the step."""
        for tensor, before, geometry, view, _ in self.viewers:
            viewer = tensor()
            if viewer is not None and viewer._storage is view._storage:
                set_storage(viewer, before, geometry)

    def views_before(self, tables: Iterable[dict[Any, Any]]) -> None:
        """Record which of these dicts (an optimizer's state) hold views of the weights' memory before the step, which
        replaces them: `p.data = state["old_p"]` leaves one for the next step."""
        for table in tables:
            for key, held in table.items():
                if type(held) is DeferredTensor and held._storage in self.weights:
                    self._holders.setdefault(held._storage, []).append((table, key))
                    self._held.append(weakref.ref(held))

    def is_replaced(self, view: DeferredTensor) -> bool:
        """Whether a view that one of the dicts held before the step has been replaced by the step, so that no later
        step uses it."""
        holders = [holder for held in self._holders.values() for holder in held]
        return any(held() is view for held in self._held) and all(table.get(key) is not view for table, key in holders)

    def outdated(self) -> bool:
        """Whether a weight's memory has other views than when the step was traced."""
        return any(
            self._has_other_views(storage) or storage.resident.is_exported != (storage in self._exported)
            for storage in self.weights
        )

    def _has_other_views(self, storage: DeferredStorage) -> bool:
        views = storage.alive()
        if len(views) == 1:
            return False
        known = {id(table.get(key)) for table, key in self._holders.get(storage, ())}
        return sum(id(view) not in known for view in views) > 1


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
