"""A step's inputs: their owners (tensors and storages), and the array passed for each of them at a call."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...capture import exported_memory
from ...capture.constants import owned_by_torch
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...capture.step import StepTrace, storage_key
from ...compat.torch_names import storage_use_count
from ...program.compare import same_bytes
from ...program.graph import Geometry, Node, Ref, Value, geometry_of
from ..backend import Backend
from ..device.buffer import DeviceBuffer, replace_arrays
from ..device.lazy_array import LazyArray, ready, share_later, to_device_later
from ..lazy_jax import is_imported
from .arguments import Arguments, owner_of
from .parameter_groups import GroupEntry

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import Mesh


Owner = DeferredStorage | torch.Tensor  # a storage on the backend, or a tensor outside it


def storage_or_itself(tensor: torch.Tensor) -> Owner:
    """The storage of a tensor on the backend, else the tensor itself."""
    return tensor._storage if type(tensor) is DeferredTensor else tensor


def memory_of(owner: Any) -> int:
    """A key that is equal for tensors and storages that share memory."""
    return memory_and_geometry(owner)[0] if isinstance(owner, torch.Tensor) else id(owner)


def memory_and_geometry(tensor: torch.Tensor) -> tuple[int, Geometry]:
    """A key that is equal for tensors that share memory, and the tensor's view of that memory."""
    exported = None if type(tensor) is DeferredTensor else exported_memory.storage_at(tensor)
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
            storages = []
            if type(leaf) is DeferredTensor:
                storages = [leaf._storage]
            elif exported_memory.begins:
                storages = [storage for storage, _ in exported_memory.overlapping_storages(leaf)]
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
                if exported_memory.storage_at(new) is not None or self._tracing.shares(new):
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


class Inputs:
    """The inputs of a step: storages on the backend, arguments of the call, numbers in parameter groups, and tensors
    outside the backend.

    Attributes:
        where: on a mesh, the sharding of each input.
        exported: whether, at this call, some are in exported memory (`DeviceBuffer.memory`); see `settle`.
    """

    def __init__(
        self,
        backend: Backend,
        owners: Owners,
        numbers: Mapping[Value, GroupEntry],
    ) -> None:
        """`numbers` are the inputs that are numbers, read at each call. On a mesh, storages that are not on the backend
        yet are moved there."""
        self._backend = backend
        self._owners = owners.inputs
        self._places = owners.arguments
        self._numbers = numbers
        self.where: dict[Value, Any] = {}
        if backend.mesh is not None:
            self.where = {value: self._sharding(value, backend.mesh) for value in (*owners.changed, *owners.read)}
        self.exported = False

    def state(
        self, changed: Mapping[Value, Owner], leaves: list[Any], wait: bool = True
    ) -> tuple[tuple, Sequence[DeviceBuffer | None]]:
        """The arrays of the state that the step changes, and the buffers for its new content; tensors outside the
        backend have no buffer. There may be a thousand arrays, most of them untouched since the last step: only for the
        others is anything computed."""
        self.exported = False
        buffers = _buffers(changed)
        if self.where or not wait:
            arrays = self.arrays(changed, leaves, wait, donated=True)
        else:
            found = [buffer.current if buffer is not None else None for buffer in buffers]
            arrays = tuple(
                [self.array(v, leaves, True) if a is None else a for v, a in zip(changed, found, strict=True)]
            )
        return arrays, buffers if all(buffers) else _buffers(changed)  # some have been created since

    def arrays(self, values: Iterable[Value], leaves: list[Any], wait: bool = True, donated: bool = False) -> tuple:
        """The arrays of the inputs `values`; without `wait`, lazy ones for those still being computed."""
        return tuple(
            (None if wait else self._later(value, leaves)) or self.array(value, leaves, donated) for value in values
        )

    def _later(self, value: Value, leaves: list[Any]) -> LazyArray | None:
        place = self._places.get(value)
        owner = self._owners[value] if place is None else leaves[place]
        if type(owner) is DeferredTensor and owner._ref().whole:
            storage = owner._storage
            if storage.resident is not None and storage.resident.sharding is self.where.get(
                value
            ):  # no resharding needed
                owner = storage
        return (
            owner.resident.lazy_array() if isinstance(owner, DeferredStorage) and owner.resident is not None else None
        )

    def array(self, value: Value, leaves: list[Any], donated: bool = False) -> Any:
        """The array of an input `value` at this call; `donated` if the step may write to it."""
        number = self._numbers.get(value)
        if number is not None:
            return np.float64(number.read())
        place = self._places.get(value)
        owner = self._owners[value] if place is None else leaves[place]
        sharding = self.where.get(value)
        array: jax.Array
        if isinstance(owner, DeferredStorage):
            array = self._argument(self._buffer(owner), donated)
        elif type(owner) is DeferredTensor and owner._storage.resident is not None and owner._ref().whole:
            array = self._argument(owner._storage.resident)
        elif sharding is not None:
            return to_device_later(owner, sharding)
        else:  # a copy, since the caller may write to the tensor while the step runs
            return _given(owner.detach().clone(memory_format=torch.contiguous_format))
        if sharding is None:
            return array
        from ..mesh.sharded_arrays import fit

        return fit(array, sharding)

    def _argument(self, buffer: DeviceBuffer, donated: bool = False) -> jax.Array:
        array = buffer.argument(donated)
        self.exported = self.exported or buffer.is_exported
        return array

    def settle(self, buffers: Iterable[DeviceBuffer | None], arrays: Iterable[Any]) -> None:
        """After dispatch: if inputs are in exported memory, which others may access once the call has returned, wait
        for the step and write its results `arrays` back there."""
        if not self.exported:
            return
        for array in arrays:
            ready(array).block_until_ready()
        for buffer in buffers:
            if buffer is not None:
                buffer.settle()

    def same_shardings(self, other: Inputs) -> bool:
        """On a mesh: whether the inputs of an equivalent step have the same shardings."""
        from ..mesh.mesh import named

        return [*map(named, self.where.values())] == [*map(named, other.where.values())]

    def _sharding(self, value: Value, mesh: Mesh) -> Any:
        owner = self._owners[value]
        if value in self._numbers or value not in self._places and not isinstance(owner, DeferredStorage):
            return mesh.whole
        if not isinstance(owner, DeferredStorage):
            return mesh.batch_sharding(tuple(value.shape))
        return self._buffer(owner).sharding or mesh.whole

    def _buffer(self, storage: DeferredStorage) -> DeviceBuffer:
        """The buffer of a storage, which is moved to the backend first if necessary."""
        if storage.resident is None:
            self._backend.move_to_device(_tensors_of(storage))
        return storage.resident


def _given(tensor: torch.Tensor) -> Any:
    """A tensor as an argument of one call; lazily before JAX is imported."""
    if is_imported():
        from ..jax_support import as_argument

        return as_argument(tensor)

    return share_later(tensor)


def _tensors_of(storage: DeferredStorage) -> list[DeferredTensor]:
    """The tensors in a storage; if the step has loaded it from a file and not kept any, a tensor of all of it."""
    value = storage.value
    return storage.alive() or [DeferredTensor.wrap(storage, value.shape, value.stride, 0, value.dtype)]


def _buffers(owners: Mapping[Value, Owner]) -> list[DeviceBuffer | None]:
    return [owner.resident if type(owner) is DeferredStorage else None for owner in owners.values()]


def write_back(owners: Iterable[Owner], buffers: Sequence[DeviceBuffer | None], arrays: Sequence[Any]) -> None:
    """Write `arrays` back as the new content of `owners` with these buffers; some may be lazy."""
    if not all(buffers):
        with torch.no_grad():
            for owner, array in zip(owners, arrays, strict=True):
                if isinstance(owner, torch.Tensor):  # outside the backend
                    from ..jax_support import to_host

                    owner.copy_(to_host(ready(array)))
    replace_arrays(buffers, arrays)
