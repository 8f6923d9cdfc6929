"""`Inputs`: the arrays that a compiled step is called with, and the way back: its new state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...capture.input_numbers import NumberInput
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...program.graph import Value
from ..backend import Backend
from ..device.buffer import DeviceBuffer, replace_arrays
from ..device.lazy_array import LazyArray, ready, share_later, to_device_later
from ..lazy_jax import is_imported, on_cpu
from .arguments import Arguments
from .owners import Owner, Owners

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import Mesh


_COPIED_BYTES = 1 << 16  # below, a tensor is passed to a call as a NumPy array
# From this size on, a tensor of the host's that is no argument, such as a data set, is not copied for a call.
_BORROWED_BYTES = 1 << 20
_ALIGNMENT = 64  # of memory that XLA takes as it is
# Dtypes that torch can convert to NumPy, and JAX from it.
_NUMPY_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


_NUMPY_SCALARS: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.int64: np.int64,
}


class Inputs:
    """The inputs of a step: storages on the backend, arguments of the call, numbers in parameter groups, and tensors
    outside the backend.

    Attributes:
        where: on a mesh, the sharding of each input.
        is_shared: whether, at this call, some are in memory that others may write to as soon as the call has returned:
            exported (`DeviceBuffer.memory`) or borrowed; see `export_results`.
    """

    def __init__(
        self,
        backend: Backend,
        owners: Owners,
        numbers: Mapping[Value, NumberInput],
    ) -> None:
        """`numbers` are the inputs that are numbers, read at each call. On a mesh, storages that are not on the backend
        yet are moved there."""
        self._backend = backend
        self._owners = owners.inputs
        self._read = owners.read
        self._argument_index = owners.arguments
        self._numbers = numbers
        self.where: dict[Value, Any] = {}
        if backend.mesh is not None:
            self.where = {value: self._sharding(value, backend.mesh) for value in (*owners.changed, *owners.read)}
        self.is_shared: bool = False
        self._may_borrow = False

    def state(
        self, changed: Mapping[Value, Owner], arguments: Arguments, wait: bool = True
    ) -> tuple[tuple[Any, ...], Sequence[DeviceBuffer | None]]:
        """The arrays of the state that the step changes, and the buffers for its new content; tensors outside the
        backend have no buffer. There may be a thousand arrays, most of them untouched since the last step: only for the
        others is anything computed."""
        self.is_shared = False
        self._may_borrow = wait and is_imported() and on_cpu()
        buffers = _buffers(changed)
        if self.where or not wait:
            arrays = self.arrays(changed, arguments, wait, donated=True)
        else:
            current = [buffer.current if buffer is not None else None for buffer in buffers]
            arrays = tuple(
                [self.array(v, arguments, True) if a is None else a for v, a in zip(changed, current, strict=True)]
            )
        return arrays, buffers if all(buffers) else _buffers(changed)  # some have been created since

    def arrays(
        self, values: Iterable[Value], arguments: Arguments, wait: bool = True, donated: bool = False
    ) -> tuple[Any, ...]:
        """The arrays of the inputs `values`; without `wait`, lazy ones for those still being computed."""
        return tuple(
            (None if wait else self._later(value, arguments.leaves)) or self.array(value, arguments, donated)
            for value in values
        )

    def _later(self, value: Value, leaves: list[Any]) -> LazyArray | None:
        index = self._argument_index.get(value)
        owner = self._owners[value] if index is None else leaves[index]
        if type(owner) is DeferredTensor and owner._ref().whole:
            storage = owner._storage
            if storage.resident is not None and storage.resident.sharding is self.where.get(
                value
            ):  # no resharding needed
                owner = storage
        return (
            owner.resident.lazy_array() if isinstance(owner, DeferredStorage) and owner.resident is not None else None
        )

    def array(self, value: Value, arguments: Arguments, donated: bool = False) -> Any:
        """The array of an input `value` at this call; `donated` if the step may write to it."""
        number = self._numbers.get(value)
        if number is not None:
            read = number.read(arguments.leaves, arguments.known)
            if isinstance(read, np.ndarray):
                return np.array(read, order="C")
            return _NUMPY_SCALARS[value.dtype](read)
        index = self._argument_index.get(value)
        owner = self._owners[value] if index is None else arguments.leaves[index]
        sharding = self.where.get(value)
        array: jax.Array
        if isinstance(owner, DeferredStorage):
            array = self._argument(self._buffer(owner), donated)
        elif type(owner) is DeferredTensor and owner._storage.resident is not None and owner._ref().whole:
            array = self._argument(owner._storage.resident)
        elif sharding is not None:
            return to_device_later(owner, sharding)
        elif index is None and not donated and self._may_borrow and _can_be_borrowed(owner):
            from ..jax_support import share_memory

            self.is_shared = True
            return share_memory(owner.detach())
        else:  # a copy, since the caller may write to the tensor while the step runs
            return _given(owner.detach().clone(memory_format=torch.contiguous_format))
        if sharding is None:
            return array
        from ..mesh.sharded_arrays import fit

        return fit(array, sharding)

    def _argument(self, buffer: DeviceBuffer, donated: bool = False) -> jax.Array:
        array = buffer.argument(donated)
        self.is_shared = self.is_shared or buffer.is_exported
        return array

    def export_results(self, buffers: Iterable[DeviceBuffer | None], arrays: Iterable[Any]) -> None:
        """After dispatch: if others may write to inputs once the call has returned, or read results in exported memory,
        wait for the step, and write its results `arrays` back there."""
        if not self.is_shared:
            return
        for array in arrays:
            ready(array).block_until_ready()
        for buffer in buffers:
            if buffer is not None:
                buffer.export_content()

    def described(self, state_owners: Mapping[Value, Owner], arguments: Arguments) -> list[Any]:
        """What the inputs are at this call, the state first: equal for the same input of another step."""
        described: list[Any] = []
        for value, owner in (*state_owners.items(), *((value, self._owners.get(value)) for value in self._read)):
            number, index = self._numbers.get(value), self._argument_index.get(value)
            if number is not None:
                read = number.read(arguments.leaves, arguments.known)
                described.append((value.dtype, repr(read)) if type(read) in (int, float, bool) else object())
            else:
                described.append(("argument", index) if index is not None else ("owner", id(owner)))
        return described

    @property
    def mesh(self) -> Mesh | None:
        """The backend's mesh."""
        return self._backend.mesh

    def on(self, mesh: Mesh) -> dict[Value, Any]:
        """The sharding of each input as it would be on another mesh."""
        return {value: self._sharding_on(mesh, value) for value in self.where}

    def _sharding_on(self, mesh: Mesh, value: Value) -> Any:
        owner = self._owners[value]
        if isinstance(owner, DeferredStorage) and value not in self._numbers:
            return mesh.storage_sharding(owner)
        return self._sharding(value, mesh)

    def same_shardings(self, other: Inputs) -> bool:
        """On a mesh: whether the inputs of an equivalent step have the same shardings."""
        from ..mesh.mesh import named

        return [*map(named, self.where.values())] == [*map(named, other.where.values())]

    def _sharding(self, value: Value, mesh: Mesh) -> Any:
        owner = self._owners[value]
        if value in self._numbers or value not in self._argument_index and not isinstance(owner, DeferredStorage):
            return mesh.whole
        if not isinstance(owner, DeferredStorage):
            return mesh.batch_sharding(tuple(value.shape))
        return self._buffer(owner).sharding or mesh.whole

    def _buffer(self, storage: DeferredStorage) -> DeviceBuffer:
        """The buffer of a storage, which is moved to the backend first if necessary."""
        if storage.resident is None:
            self._backend.move_to_device(_tensors_of(storage))
        return storage.resident


def _can_be_borrowed(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return False
    is_large = tensor.numel() * tensor.itemsize >= _BORROWED_BYTES
    return is_large and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


def _given(tensor: torch.Tensor) -> Any:
    """A tensor as an argument of one call; lazily before JAX is imported. A small one is a NumPy array: copying it is
    faster than `share_memory`."""
    if not is_imported():
        return share_later(tensor)
    if tensor.numel() * tensor.itemsize < _COPIED_BYTES and tensor.dtype in _NUMPY_DTYPES and not tensor.is_cuda:
        return tensor.numpy()
    from ..jax_support import share_memory

    return share_memory(tensor)


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
