"""A weight on the device: the array that holds it now, and how the host reads and edits it."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import torch
from jax.sharding import NamedSharding

from ...capture.file_value import FileValue
from ...compat.torch_names import DisableTorchDispatch
from ...engine.memory import allocate_huge
from ...errors import StateLostError
from ...program.graph import Value, is_contiguous
from ..jaxlib import empty, lend, on_cpu, to_device, to_host
from ..mesh import mesh
from ..mesh import placement as mesh_placement
from . import dispatch
from .host_memory import HostMemory, ReadOnlyCopy, is_countable
from .lazy import LazyArray

# Smaller weights go through host memory: a buffer of the device's own costs a call.
_DIRECT_BYTES = 1 << 16


def is_direct(value: Value) -> bool:
    """Whether a weight is written by the host straight into memory that the device owns."""
    return on_cpu() and value.nbytes >= _DIRECT_BYTES and is_contiguous(value.shape, value.stride)


_edits = threading.Lock()  # of who brings an edit to the device
_last_edited: weakref.ref[DeviceBuffer] | None = None  # by the host


class Piece(NamedTuple):
    """A box of a buffer's content that one process saves."""

    owner: int  # its process
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]  # the content, on the host


class DeviceBuffer:
    """Owns the content of one storage on the device.

    The array is replaced by each step that changes it. The host sees it through `host()`; after `edit()` what the host
    has is what counts, and goes to the device before the next step. Once code past PyTorch's dispatcher has asked for
    the memory itself (`memory()`: `numpy()`, `data_ptr()`), there is no array between steps: the content lives in
    memory of the host, which each step is lent, and to which its result is written before the call returns.

    Attributes:
        current: the array, if it is there and the host has neither read nor edited it since; a step asks this of each
            weight, so it is no property.
    """

    # A step looks at a thousand of these that have long left the caches: few bytes, and what it asks for together.
    __slots__ = (
        "current",
        "_array",
        "value",
        "sharding",
        "_pending",
        "_host",
        "_edited",
        "_written",
        "_memory",
        "_copy",
        "fresh",
        "__weakref__",
    )

    def __init__(
        self,
        value: Value,
        array: jax.Array | None = None,
        pending: Future | None = None,
        sharding: NamedSharding | None = None,
    ) -> None:
        """`sharding` says where on a mesh the content is to lie; None for the default device."""
        self.value = value  # for its geometry
        self.sharding = sharding
        self._array = self.current = array
        self._pending = pending  # gives {Value: array} when the materialization under way is through
        self._host: torch.Tensor | None = None
        self.fresh = pending is not None  # what its recipe makes of it, not read from a file, is what is here
        self._edited = False
        self._written: jax.Array | None = None  # of an edit, what `_host` looks at, if that is the device's own memory
        self._memory: HostMemory | None = None  # where the content lives, if its memory was handed out
        self._copy: ReadOnlyCopy | None = None  # what was handed out where the memory is elsewhere

    # -- the memory itself, past PyTorch's dispatcher --

    @classmethod
    def of_memory(cls, value: Value, memory: torch.Tensor, lasting: bool) -> DeviceBuffer:
        """A buffer whose content lives in `memory` of the host, laid out as `value` is, that somebody else holds too.

        Args:
            lasting: who holds it cannot be counted.
        """
        buffer = cls(value)
        buffer._memory = HostMemory(memory, lasting, is_direct(value))
        return buffer

    def memory(self, lasting: bool) -> torch.Tensor:
        """Memory on the host, laid out as `value` is, that is the content's own from now on: what is written there
        counts at the next step, and shows what each step makes of it. On another device or a mesh a read-only copy of
        what the content is now, which lives as long as this buffer.

        Args:
            lasting: it is known by its address, and stays the content's as long as this buffer lives; else, as long as
                somebody holds a tensor of it.
        """
        if not self.in_host_memory:
            if self._copy is None:
                self._copy = ReadOnlyCopy(self.value)
            return self._copy.showing(self.read())
        memory = self._memory
        if memory is None:
            tensor = self._host if self._edited and self._written is None else None
            if tensor is None:
                tensor = allocate_huge(self.value).copy_(self.host())
            memory = HostMemory(tensor, lasting, is_direct(self.value))
            self._live_in(memory)
        memory.lasting |= lasting
        return memory.content()

    @property
    def newest(self) -> jax.Array | LazyArray | None:
        """What was set last, if the content is not the host's."""
        return self._array

    @property
    def in_host_memory(self) -> bool:
        """Whether the memory is the host's, so that it can be handed out."""
        return self.sharding is None and on_cpu()

    @property
    def handed_out(self) -> HostMemory | None:
        """The memory that was handed out, where the content lives in that."""
        return self._memory

    @property
    def lent(self) -> bool:
        """Whether the content lives in memory that was handed out."""
        return self._memory is not None

    def argument(self, donated: bool = False) -> jax.Array:
        """As `array`, for a step. If it is `lent`, the step has to be waited for, and `settle` called.

        Args:
            donated: the step may write to the array.
        """
        dispatch.settled()
        memory = self._memory
        if memory is None:
            return self.array()
        tensor, held = memory.content(), memory.held()
        if held and not donated:
            return lend(tensor)
        array = memory.on_device()
        if array is None:
            array = self._put(tensor)
        if not held:
            self._memory, self._array, self.current = None, array, array
        return array

    def settle(self) -> None:
        """Write what a step has made of the content to where it lives."""
        if self._memory is not None:
            self._memory.content()

    def extent(self) -> tuple[int, int]:
        """Of memory that was handed out: its address, and where it ends."""
        assert self._memory is not None
        return self._memory.address, self._memory.address + self.value.nbytes

    def exchange(self, tensor: torch.Tensor) -> bool:
        """Hold what the real `tensor` holds, in its memory, from now on; whoever was handed ours keeps it as it is.

        Returns whether it could be done.
        """
        value = self.value
        fits = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if (
            not self.in_host_memory
            or not fits
            or tensor.stride() != value.stride
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return False
        with DisableTorchDispatch(), torch.no_grad():
            memory = HostMemory(tensor.detach(), not is_countable(tensor), is_direct(value))
        if self._memory is not None:
            self._memory.content()
        self._live_in(memory)
        return True

    def leave_memory(self) -> None:
        """Whoever was handed the memory has it to himself: what is set next is somewhere else."""
        self._memory = None

    def take_memory(self, memory: HostMemory) -> None:
        """Live in memory that another buffer has left, from now on."""
        memory.arriving = self._array
        self._live_in(memory)
        memory.content()

    def _live_in(self, memory: HostMemory) -> None:
        self.fresh = False
        self._memory = memory  # first: where there is one, nothing else is looked at
        self._array = self.current = self._pending = self._host = self._written = None
        self._edited = False

    # -- the array --

    def array(self) -> jax.Array:
        """The content as an array of `value.shape`; waits for the materialization or the first step under way."""
        dispatch.settled()
        if (memory := self._memory) is not None:
            return self._put(memory.content())
        while True:  # another thread may do the same: what is asked of the buffer is asked once
            array, pending = self._array, self._pending
            if self._edited:
                with _edits:
                    host, written = self._host, self._written
                    if self._edited and host is not None:
                        self._array = self._put(host) if written is None else written
                        self._host, self._edited, self._written = None, False, None
            elif array is None and pending is not None:
                made = pending.result()[self.value]
                if self._pending is pending and self._array is None:
                    self._array, self._pending = made, None
            elif type(array) is LazyArray:
                made = array.wait()
                if self._array is array:
                    self._array = made
            elif array is not None:
                self.current = array if self._host is None else None
                return array

    def take(self, use: Callable[[jax.Array], Any]) -> Any:
        """`use(array)`, of the array as it is now: again, if another thread's step has taken its memory meanwhile."""
        while True:
            array = self.array()
            try:
                return use(array)
            except (RuntimeError, ValueError):
                if not array.is_deleted() or self.array() is array:
                    raise

    def later(self) -> LazyArray | None:
        """The content as it is to be when the materialization under way is through; None if it is there."""
        pending, value = self._pending, self.value
        if self._edited or self._array is not None or pending is None or self._memory is not None:
            return None
        return LazyArray(lambda: pending.result()[value])

    def snapshot(self) -> jax.Array:
        """As `array`, in memory that no step will write to. Does not wait for a step under way."""
        return self.array() if self._memory is not None else self.take(jax.numpy.copy)

    def set(self, array: jax.Array | LazyArray) -> None:
        """What a step has made of it, or is still to make."""
        self.fresh = False
        if self._memory is not None:
            if self._memory.held():
                self._memory.arriving = array
                return
            self._memory = None
        self._array = array
        self._pending = None
        self._host = self._written = None
        self._edited = False
        self.current = None if type(array) is LazyArray else array  # last: with it, nothing else is looked at

    def lose(self, error: BaseException) -> None:
        """The device has failed when it had been given the array: until it is written anew, nothing is here."""

        def lost() -> jax.Array:
            raise StateLostError(
                "the device failed in the middle of a step, when it had been given the memory of weights and "
                "optimizer state, so there are none any more. Load a checkpoint (load_state_dict), or start again."
            ) from error

        self.set(LazyArray(lost))

    def replace_from(self, file: FileValue) -> None:
        """Of a buffer on a mesh: hold what lies in a file from now on; each device's part is read alone."""
        assert self.sharding is not None
        self.set(mesh_placement.make({file: self.sharding})[file])

    def _put(self, tensor: torch.Tensor) -> jax.Array:
        return to_device(tensor) if self.sharding is None else mesh.put(tensor, self.sharding)

    def read(self) -> torch.Tensor:
        """As `host`, without keeping a copy of what is on another device than the host."""
        dispatch.settled()
        if (memory := self._memory) is not None:
            return memory.content()
        if (host := self._host) is not None:
            return host
        return self.take(lambda array: laid_out(to_host(mesh.readable(array)), self.value))

    def gathered(self) -> torch.Tensor:
        """As `read`, of parts that lie in other processes too; all of them have to ask for it."""
        if self.sharding is None or self._edited:
            return self.read()
        return laid_out(to_host(mesh.readable(mesh.gather(self.array()))), self.value)

    def pieces(self) -> list[Piece]:
        """What of the content is saved by whom: all of it, once."""
        shape = tuple(self.value.shape)
        if self.sharding is None or self._edited:
            return [Piece(0, (0,) * len(shape), shape, self.read)]
        array = self.array()
        data = {shard.device: shard.data for shard in array.addressable_shards}
        boxes = mesh_placement.boxes(shape, array.sharding)
        return [
            Piece(devices[0].process_index, *box, functools.partial(_read_part, data, devices[0]))
            for box, devices in boxes.items()
        ]

    def host(self) -> torch.Tensor:
        """The content laid out as `value` is. Not to be written, but after `edit`."""
        dispatch.settled()
        if (memory := self._memory) is not None:
            return memory.content()
        host = self._host
        if host is None:

            def read(array: jax.Array) -> tuple[jax.Array, torch.Tensor]:
                return array, laid_out(to_host(mesh.readable(array)), self.value)

            array, host = self.take(read)
            if self._array is array:  # else another thread's step has made a new one meanwhile
                self._host, self.current = host, None
        return host

    def edit(self, whole: bool = False) -> bool:
        """The host is about to write to `host()`; if to all of it (`whole`), what was there need not be read.

        Returns whether it was not: `leave` then undoes this, if nothing was written after all.
        """
        if self._edited or self._memory is not None:
            return False
        value = self.value
        self.fresh = False
        written = None
        if whole and self.sharding is None and is_direct(value):
            written, host = empty(tuple(value.shape), value.dtype)
        else:
            host = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
            if not whole:
                host.copy_(self.host())
        self._written, self._host, self._edited, self.current = written, host, True, None
        return whole

    def leave(self) -> None:
        """Of a whole edit that failed: what was there counts."""
        self._host, self._edited, self._written = None, False, None
        if self._array is not None:
            self.set(self._array)

    def edited(self) -> None:
        """The host has written. What it wrote before, elsewhere, goes to the device: it holds one copy at a time."""
        global _last_edited
        if self._memory is not None:
            return
        last = None if _last_edited is None else _last_edited()
        if last is not self:
            if last is not None:
                last.array()
            _last_edited = weakref.ref(self)


def replace_arrays(buffers: Iterable[DeviceBuffer | None], arrays: Iterable[Any]) -> None:
    """What a step has made of `buffers`: as `set`, for a thousand of which few were touched since the last step."""
    for buffer, array in zip(buffers, arrays, strict=True):
        if buffer is None:
            continue
        if type(array) is LazyArray or buffer.current is None:  # lazy first: another thread may read it meanwhile
            buffer.set(array)
        else:
            buffer.current = buffer._array = array


def _read_part(data: Mapping[jax.Device, jax.Array], device: jax.Device) -> torch.Tensor:
    return to_host(data[device])


def laid_out(logical: torch.Tensor, value: Value) -> torch.Tensor:
    """`logical` with the strides of `value`."""
    if logical.stride() == value.stride:
        return logical
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype).copy_(logical)
