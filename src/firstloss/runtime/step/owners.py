"""Owners of a step's inputs (tensors and storages), and their replacement by others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from ...capture.constants import owned_by_torch
from ...capture.exported_memory import overlapping_storages, storage_at
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...capture.step import StepTrace, storage_key
from ...compat.torch_names import storage_use_count
from ...program.compare import same_bytes
from ...program.graph import Geometry, Node, Ref, Value, geometry_of
from .arguments import Arguments, owner_of

Owner = DeferredStorage | torch.Tensor  # a storage on the backend, or a tensor outside it


def storage_or_itself(tensor: torch.Tensor) -> Owner:
    """The storage of a tensor on the backend, else the tensor itself."""
    return tensor._storage if type(tensor) is DeferredTensor else tensor


def memory_of(owner: Any) -> int:
    """A key that is equal for tensors and storages that share memory."""
    return memory_and_geometry(owner)[0] if isinstance(owner, torch.Tensor) else id(owner)


def memory_and_geometry(tensor: torch.Tensor) -> tuple[int, Geometry]:
    """A key that is equal for tensors that share memory, and the tensor's view of that memory."""
    exported = None if type(tensor) is DeferredTensor else storage_at(tensor)
    return (storage_key(tensor), geometry_of(tensor)) if exported is None else (id(exported[0]), exported[1])


class Owners:
    """The owners of a traced step's inputs.

    Attributes:
        inputs: the owner of each input; for arguments, that of the trace.
        arguments: the index of an argument's leaf, by the input that stands in for it.
        changed: the state that the step changes, by input; it is updated in place.
        read: the inputs that are only read.
        edited: the indices of arguments that the step changes.
        stand_in: the current tensor, by the id of the tensor at the time of the trace.
    """

    def __init__(self, tracing: StepTrace, arguments: dict[Value, int]) -> None:
        self._tracing = tracing
        self.inputs = tracing.inputs
        self.arguments = arguments
        self.changed: dict[Value, Owner] = {}
        self.read: list[Value] = []
        self.edited: list[int] = []
        self.stand_in: dict[int, torch.Tensor] = {}
        self._storages: set[int] | None = None  # the ids of the inputs' owners, without arguments
        self._origins: dict[int, int] = {}  # by the id of the current owner, that of the traced one
        self._writes_external = False

    def settle_changed(self, move_to_device: Callable[[list[torch.Tensor]], None] | None) -> None:
        """Determine what the traced step changes. Without `move_to_device` everything stays where it is."""
        changes = self._tracing.changes
        for value in changes:
            found = self.inputs[value]
            outside = value not in self.arguments
            if move_to_device is not None and isinstance(found, torch.Tensor) and outside and _is_sole_owner(found):
                # It moves to the backend; otherwise each step would have to be waited for.
                move_to_device([found])
                found = self.inputs[value] = found._storage  # type: ignore[attr-defined]
            self.changed[value] = found._storage if type(found) is DeferredTensor else found
        self.edited = [self.arguments[value] for value in changes if value in self.arguments]
        self._writes_external = bool(self.edited) or any(isinstance(h, torch.Tensor) for h in self.changed.values())

    def settle_read(self, nodes: Iterable[Node], outputs: Iterable[Ref]) -> None:
        """Determine the other inputs that the Program needs."""
        needed = {ref.value for ref in outputs}
        for node in nodes:
            needed.update(ref.value for ref in node.refs())
            needed.update(ref.value for ref in node.writes)
        self.read = [v for v in self.inputs if v in needed and v not in self.changed]

    def forget_arguments(self) -> None:
        """Drop the arguments of the trace: each call has its own."""
        for value in self.arguments:
            self.inputs[value] = torch.empty(value.shape, dtype=value.dtype, device="meta")

    def order(self) -> tuple[list[int], list[int]]:
        """The indices of inputs that are changed, and of those that are only read."""
        order = {value: i for i, value in enumerate(self.inputs)}
        return [order[v] for v in self.changed], [order[v] for v in self.read]

    def owners_at_call(self, leaves: list[Any]) -> Mapping[Value, Owner]:
        """The owners of the state that a call changes, including its own arguments."""
        if not self.edited:
            return self.changed
        return {v: owner_of(leaves[self.arguments[v]]) if v in self.arguments else h for v, h in self.changed.items()}

    def moved(self) -> None:
        """Note that owners in `inputs` have been replaced."""
        self._storages = None

    # -- identification --

    def reads(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether one of `tensors`, or its gradient, is an input."""
        ids = {id(t) for tensor in tensors for t in (tensor, tensor.grad) if t is not None}
        storages = {id(t._storage) for tensor in tensors for t in (tensor, tensor.grad) if type(t) is DeferredTensor}
        return any(id(found) in ids or id(found) in storages for found in self.inputs.values())

    def external_inputs(self, given: Container[Value]) -> list[Owner | None]:
        """The inputs, changed ones first; None for those `given` at each call."""
        values = (*self.changed, *self.read)
        return [None if v in given or v in self.arguments else self.inputs[v] for v in values]

    def shared(self, arguments: Arguments) -> set[int]:
        """The indices of arguments that the step also reaches in another way, or that share memory with others, if any
        of them is written to."""
        found: set[int] = set()
        data = list(arguments.data())
        for i, leaf in data:
            storages = (
                [leaf._storage]
                if type(leaf) is DeferredTensor
                else [storage for storage, _ in overlapping_storages(leaf)]
            )
            if storages:
                if self._storages is None:
                    self._storages = {id(h) for v, h in self.inputs.items() if v not in self.arguments}
                if not self._storages.isdisjoint(map(id, storages)):
                    found.add(i)
        if not self._writes_external:
            return found
        by_memory: dict[int, list[int]] = {}
        for i, leaf in data:
            by_memory.setdefault(storage_key(leaf), []).append(i)
        written = {storage_key(arguments.leaves[i]) for i in self.edited}
        for key, numbers in by_memory.items():
            alone = len({id(arguments.leaves[i]) for i in numbers}) == 1
            if key in written and not alone or self._tracing.shares(arguments.leaves[numbers[0]]):
                found.update(numbers)
        return found

    # -- replacement --

    def move(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Replace the first tensor of each pair by the second, which is like it; returns whether the step can continue
        with that."""
        owners = {id(found): value for value, found in self.inputs.items()}
        moved: list[tuple[Value, torch.Tensor]] = []
        for old, new in pairs:
            if id(self._origin(old)) in self._tracing.read or old is new:
                return False
            value = owners.get(id(storage_or_itself(old)))
            if type(new) is DeferredTensor and not (new._ref().whole and new._storage.trace is None):
                return False
            if value is None:
                if id(self._origin(old)) in self._tracing.outside:  # a view of an input
                    return False
                continue
            if type(old) is DeferredTensor and len(old._storage.alive()) > 1:  # other tensors view the same memory
                return False
            if type(old) is not DeferredTensor and self._tracing.views_of(self._origin(old)) > 1:
                return False
            if type(old) is DeferredTensor and not old._ref().whole or tuple(value.shape) != tuple(new.shape):
                return False
            if type(new) is not DeferredTensor and memory_of(new) != memory_of(old):
                if storage_at(new) is not None or self._tracing.shares(new):
                    return False
            if id(storage_or_itself(new)) in owners and owners[id(storage_or_itself(new))] is not value:
                if not any(storage_or_itself(other) is storage_or_itself(new) for other, _ in pairs):
                    return False
            moved.append((value, new))
        storages = [id(storage_or_itself(new)) for _, new in moved]
        if len(set(storages)) != len(storages):
            return False
        self._storages = None
        for value, new in moved:
            self.inputs[value] = storage_or_itself(new)
            if value in self.changed:
                self.changed[value] = storage_or_itself(new)
        renamed = {id(new): self._origins.pop(id(old), id(old)) for old, new in pairs}
        for _, new in pairs:
            self.stand_in[renamed[id(new)]] = new
        self._origins.update(renamed)
        return True

    def _origin(self, tensor: torch.Tensor) -> Any:
        """The object at the time of the trace."""
        known = self._tracing.outside.get(self._origins.get(id(tensor), id(tensor)))
        return tensor if known is None else known[0]


def differ(a: Owner, b: Owner) -> bool:
    """Whether two tensors of the same shape and dtype are different objects with different bytes."""
    if a is b or not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.data_ptr() != b.data_ptr() and not same_bytes(a, b)


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether nothing but `tensor` holds its memory: no view, no NumPy array."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_inference() or not owned_by_torch(tensor):
        return False
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.itemsize and tensor.is_contiguous()
    return whole and storage_use_count(storage) <= 2  # the tensor's own, and `storage`
