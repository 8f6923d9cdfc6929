"""A step's inputs: their device buffers, and the array passed for each of them at a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...capture.recorder import DeferredStorage, DeferredTensor
from ...program.graph import Value
from ..backend import Backend
from ..device.buffer import DeviceBuffer, replace_arrays
from ..device.lazy_array import LazyArray, ready, share_later, to_device_later
from ..lazy_jax import is_imported
from .owners import Owner, Owners
from .parameter_groups import GroupEntry

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import Mesh


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
