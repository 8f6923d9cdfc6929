"""A weight on the device: the array that holds it now, and how the host reads and edits it."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...capture.file_value import FileValue
from ...compat.torch_names import DisableTorchDispatch
from ...engine.huge_pages import allocate_huge
from ...errors import StateLostError
from ...program.graph import Value, is_contiguous
from ..lazy_jax import on_cpu
from . import dispatch
from .host_memory import HostMemory, ReadOnlyCopy, is_countable
from .lazy_array import LazyArray, ready

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding

    from ..mesh.mesh import MeshSharding

# Smaller weights are copied from host memory: asking the device for memory takes longer.
_DIRECT_BYTES = 1 << 16


def is_direct(value: Value) -> bool:
    """Whether a weight is made directly in the device's memory."""
    return on_cpu() and value.nbytes >= _DIRECT_BYTES and is_contiguous(value.shape, value.stride)


_edits = threading.Lock()  # of who brings an edit to the device
_last_edited: weakref.ref[DeviceBuffer] | None = None  # by the host


class OwnedPart(NamedTuple):
    """A part of a buffer's content, and the process that saves it."""

    owner: int  # its process
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]  # the content, on the host


class DeviceBuffer:
    """Owns the content of one storage on the device.

    Each step that changes the weight replaces the array. `host()` is a copy on the host; after `begin_edit()` that copy
    is the content, and is sent to the device before the next step. Once code that bypasses PyTorch's dispatcher has
    asked for the memory itself (`memory()`: `numpy()`, `data_ptr()`), no array is kept between steps: the content lives
    in host memory, which each step borrows, and into which its result is written before the call returns.

    Attributes:
        current: the array, if it exists and the host has neither read nor edited it since. A plain attribute and no
            property, because each step reads it for every weight.
    """

    # A step touches a thousand of these, none of them in the CPU's caches: keep them small, and what it reads together.
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
        sharding: MeshSharding | NamedSharding | None = None,
    ) -> None:
        """`sharding` is that of the content on a mesh; None for the default device."""
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

    # -- host memory, for code that bypasses PyTorch's dispatcher --

    @classmethod
    def from_host_memory(cls, value: Value, memory: torch.Tensor, lasting: bool) -> DeviceBuffer:
        """A buffer whose content lives in host memory that other code holds too, laid out as `value` is.

        Args:
            lasting: its holders cannot be counted.
        """
        buffer = cls(value)
        buffer._memory = HostMemory(memory, lasting, is_direct(value))
        return buffer

    def memory(self, lasting: bool) -> torch.Tensor:
        """Host memory, laid out as `value` is, in which the content lives from now on: the next step sees what is
        written there, and each step's result appears there. Where the content is on another device or on a mesh, a
        read-only copy of it, which lives as long as this buffer.

        Args:
            lasting: the caller keeps the address, so the content stays there as long as this buffer lives; otherwise,
                as long as a tensor of that memory exists.
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
        """The array that was set last, unless the content is on the host."""
        return self._array

    @property
    def in_host_memory(self) -> bool:
        """Whether the array is in host memory, so that its memory can be exported."""
        return self.sharding is None and on_cpu()

    @property
    def handed_out(self) -> HostMemory | None:
        """The exported memory that the content lives in, if any."""
        return self._memory

    @property
    def lent(self) -> bool:
        """Whether the content lives in exported memory."""
        return self._memory is not None

    def argument(self, donated: bool = False) -> jax.Array:
        """As `array`, as an argument of a step. If the content is `lent`, wait for the step and call `settle`.

        Args:
            donated: the step may overwrite the array.
        """
        dispatch.settled()
        memory = self._memory
        if memory is None:
            return self.array()
        tensor, held = memory.content(), memory.held()
        if held and not donated:
            from ..jax_support import share_memory

            return share_memory(tensor)
        array = memory.on_device()
        if array is None:
            array = self._put(tensor)
        if not held:
            self._memory, self._array, self.current = None, array, array
        return array

    def settle(self) -> None:
        """Write a step's result back to the exported memory."""
        if self._memory is not None:
            self._memory.content()

    def extent(self) -> tuple[int, int]:
        """The addresses at which the exported memory begins and ends."""
        assert self._memory is not None
        return self._memory.address, self._memory.address + self.value.nbytes

    def exchange(self, tensor: torch.Tensor) -> bool:
        """Take over the memory of the real `tensor`, with its content. Memory exported before stays as it is.

        Returns whether that was possible.
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

    def release_exported_memory(self) -> None:
        """Stop using the exported memory: its holders keep it, and the next content lives elsewhere."""
        self._memory = None

    def take_memory(self, memory: HostMemory) -> None:
        """Use exported memory that another buffer has left."""
        memory.arriving = self._array
        self._live_in(memory)
        memory.content()

    def _live_in(self, memory: HostMemory) -> None:
        self.fresh = False
        self._memory = memory  # first: while it is set, nothing else is read
        self._array = self.current = self._pending = self._host = self._written = None
        self._edited = False

    # -- the array --

    def array(self) -> jax.Array:
        """The content as an array of `value.shape`; waits for the materialization or first step that produces it."""
        dispatch.settled()
        if (memory := self._memory) is not None:
            return self._put(memory.content())
        while True:  # another thread may be here too: each attribute is read once
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
        """`use(array)`; repeated if another thread's step has donated the array meanwhile."""
        while True:
            array = self.array()
            try:
                return use(array)
            except (RuntimeError, ValueError) as error:
                from ..mesh.peers import lost

                if not array.is_deleted() or self.array() is array:
                    if (told := lost(error)) is not error:
                        raise told from error
                    raise

    def later(self) -> LazyArray | None:
        """The content that a pending materialization will produce, or that is on the host; None if it is in an array
        already."""
        pending, value, array = self._pending, self.value, self._array
        if type(array) is LazyArray and array.content is not None and not self._edited and self._memory is None:
            return array
        if self._edited or self._array is not None or pending is None or self._memory is not None:
            return None

        def borrow() -> torch.Tensor | None:
            made = pending.result()[value]
            return made.borrow() if type(made) is LazyArray else None

        return LazyArray(lambda: ready(pending.result()[value]), borrow=borrow)

    def snapshot(self) -> jax.Array:
        """A copy of the array that no step will donate. Does not wait for a running step."""
        import jax

        return self.array() if self._memory is not None else self.take(jax.numpy.copy)

    def set(self, array: jax.Array | LazyArray) -> None:
        """Replace the content by a step's result, which may still be computed."""
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
        self.current = None if type(array) is LazyArray else array  # last: once it is set, nothing else is read

    def lose(self, error: BaseException) -> None:
        """The device failed after the array had been donated: there is no content until it is written again."""

        def gone() -> jax.Array:
            raise StateLostError(
                "the device failed in the middle of a step, when it had been given the memory of weights and "
                "optimizer state, so there are none any more. Load a checkpoint (load_state_dict), or start again."
            ) from error

        self.set(LazyArray(gone))

    def replace_from(self, file: FileValue) -> None:
        """On a mesh: replace the content by a file's, of which each device reads its own shard."""
        from ..mesh import sharded_weights as mesh_placement

        assert self.sharding is not None
        self.set(mesh_placement.make({file: self.sharding})[file])

    def _put(self, tensor: torch.Tensor) -> jax.Array:
        from ..jax_support import to_device

        if self.sharding is None:
            return to_device(tensor)
        from ..mesh import sharded_arrays

        return sharded_arrays.put(tensor, self.sharding)

    def read(self) -> torch.Tensor:
        """As `host`, without keeping the copy."""
        dispatch.settled()
        if (memory := self._memory) is not None:
            return memory.content()
        if (host := self._host) is not None:
            return host
        if (content := self._content()) is not None:
            return content
        return self.take(self._read)

    def _read(self, array: jax.Array) -> torch.Tensor:
        from ..jax_support import to_host
        from ..mesh import sharded_arrays

        return laid_out(to_host(sharded_arrays.readable(array)), self.value)

    def _content(self) -> torch.Tensor | None:
        """The content, where it is on the host and there is no array of it yet."""
        array = self._array
        if type(array) is not LazyArray or array.content is None:
            return None
        return laid_out(array.content, self.value)

    def gathered(self) -> torch.Tensor:
        """As `read`, including the shards of other processes; a collective call of all of them."""
        if self.sharding is None or self._edited:
            return self.read()
        from ..jax_support import to_host
        from ..mesh import sharded_arrays

        return laid_out(to_host(sharded_arrays.readable(sharded_arrays.gather(self.array()))), self.value)

    def pieces(self) -> list[OwnedPart]:
        """The parts of the content, each with the process that saves it; together they are all of it, once."""
        shape = tuple(self.value.shape)
        if self.sharding is None or self._edited:
            return [OwnedPart(0, (0,) * len(shape), shape, self.read)]
        from ..mesh import sharded_weights as mesh_placement

        array = self.array()
        data = {shard.device: shard.data for shard in array.addressable_shards}
        boxes = mesh_placement.boxes(shape, array.sharding)
        return [
            OwnedPart(devices[0].process_index, *box, functools.partial(_read_part, data, devices[0]))
            for box, devices in boxes.items()
        ]

    def host(self) -> torch.Tensor:
        """The content on the host, laid out as `value` is. Not to be written, but after `begin_edit`."""
        dispatch.settled()
        if (memory := self._memory) is not None:
            return memory.content()
        host = self._host
        if host is None and (content := self._content()) is not None:
            return content
        if host is None:
            array, host = self.take(lambda array: (array, self._read(array)))
            if self._array is array:  # else another thread's step has made a new one meanwhile
                self._host, self.current = host, None
        return host

    def begin_edit(self, whole: bool = False) -> bool:
        """The host is about to write to `host()`. If it writes all of it (`whole`), the old content is not read.

        Returns whether it was skipped; then `cancel_edit` undoes this, should the write fail.
        """
        if self._edited or self._memory is not None:
            return False
        value = self.value
        self.fresh = False
        written = None
        if whole and self.sharding is None and is_direct(value):
            from ..jax_support import empty

            written, host = empty(tuple(value.shape), value.dtype)
        else:
            host = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
            if not whole:
                host.copy_(self.host())
        self._written, self._host, self._edited, self.current = written, host, True, None
        return whole

    def cancel_edit(self) -> None:
        """Go back to the content before an edit of the whole that failed."""
        self._host, self._edited, self._written = None, False, None
        if self._array is not None:
            self.set(self._array)

    def end_edit(self) -> None:
        """The host has written. An edit of another buffer goes to the device now: the host keeps one copy at a time."""
        global _last_edited
        if self._memory is not None:
            return
        last = None if _last_edited is None else _last_edited()
        if last is not self:
            if last is not None:
                last.array()
            _last_edited = weakref.ref(self)


def replace_arrays(buffers: Iterable[DeviceBuffer | None], arrays: Iterable[Any]) -> None:
    """`set` for many buffers, fast for those that have not been read or edited since the last step."""
    for buffer, array in zip(buffers, arrays, strict=True):
        if buffer is None:
            continue
        if type(array) is LazyArray or buffer.current is None:  # the lazy ones first: another thread may read `current`
            buffer.set(array)
        else:
            buffer.current = buffer._array = array


def _read_part(data: Mapping[jax.Device, jax.Array], device: jax.Device) -> torch.Tensor:
    from ..jax_support import to_host

    return to_host(data[device])


def laid_out(logical: torch.Tensor, value: Value) -> torch.Tensor:
    """`logical` with the strides of `value`."""
    if logical.stride() == value.stride:
        return logical
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype).copy_(logical)
