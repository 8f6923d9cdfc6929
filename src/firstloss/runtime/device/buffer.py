"""Device buffers: the content of a weight on the device, and how the host reads and edits it."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...capture.recorder import DeferredStorage, DeferredTensor
from ...compat.torch_names import DisableTorchDispatch, InferenceMode
from ...engine.huge_pages import allocate_huge
from ...errors import StateLostError
from ...program.graph import FileValue, Value, contiguous_stride, is_contiguous
from ..lazy_jax import on_cpu, process_count
from . import dispatch
from .host_memory import HostMemory, ReadOnlyCopy, is_countable
from .lazy_array import LazyArray, ready
from .pages import OWNED_BYTES

if TYPE_CHECKING:
    import jax
    from jax.sharding import NamedSharding

    from ..mesh.mesh import MeshSharding


def is_direct(value: Value) -> bool:
    """Whether a weight is materialized directly in the device's memory."""
    return on_cpu() and value.nbytes >= OWNED_BYTES and is_contiguous(value.shape, value.stride)


# How often a buffer's state is read anew, since other threads change it.
_TRIES = 1000

_edits = threading.Lock()  # held while an edit is transferred to the device
_last_edited: weakref.ref[DeviceBuffer] | None = None  # by the host


class OwnedPart(NamedTuple):
    """A part of a buffer's content and the process that saves it."""

    owner: int  # the index of that process
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]  # the content, on the host


class DeviceBuffer:
    """The content of one storage on the device.

    Each step that changes the weight replaces the array. `host()` is a copy on the host; after `begin_edit()` that copy
    is the content, and is transferred to the device before the next step. Once code that bypasses PyTorch's dispatcher
    has asked for the memory itself (`memory()`: `numpy()`, `data_ptr()`), no array is kept between steps: the content
    lives in host memory, which each step borrows, and to which its result is written back before the call returns.

    Attributes:
        current: the array, if it exists and the host has neither read nor edited it since. A plain attribute, not a
            property, because each step reads it for every weight.
    """

    # A step touches a thousand of these, none in the CPU's caches: keep them small, and what it reads together.
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
        pending: Future[Any] | None = None,
        sharding: MeshSharding | NamedSharding | None = None,
    ) -> None:
        """`sharding` is the content's sharding on a mesh; None for the default device."""
        self.value: Value = value  # for its geometry
        self.sharding: MeshSharding | NamedSharding | None = sharding
        self._array = self.current = array
        self._pending = pending  # resolves to {Value: array}
        self._host: torch.Tensor | None = None
        self.fresh: bool = pending is not None  # the content is what the recipe makes (not read from a file)
        self._edited = False
        self._written: jax.Array | None = None  # of an edit: the array whose memory `_host` is
        self._memory: HostMemory | None = None  # where the content lives, if its memory was exported
        self._copy: ReadOnlyCopy | None = None  # exported if the memory itself is elsewhere

    # -- host memory, for code that bypasses PyTorch's dispatcher --

    def use_memory(self, tensor: torch.Tensor, lasting: bool) -> None:
        """Let the content live in the memory of `tensor`, with its content; it has the layout of `value`.

        Args:
            lasting: whether those who hold that memory cannot be counted.
        """
        is_direct_here = self.sharding is None and is_direct(self.value)
        self._use_memory(HostMemory(tensor, lasting, is_direct_here))

    def memory(self, lasting: bool) -> torch.Tensor:
        """Host memory with the layout of `value`, in which the content lives from now on: the next step sees writes to
        it, and each step's result is written to it. If it `can_export` none, a read-only copy of the content, which
        lives as long as this buffer.

        Args:
            lasting: whether the caller keeps the address, so that the content stays there as long as this buffer lives;
                otherwise, as long as a tensor of that memory exists.
        """
        if not self.can_export(lasting):
            if self._copy is None:
                self._copy = ReadOnlyCopy(self.value)
            return self._copy.updated(self.read())
        memory = self._memory
        if memory is None:
            tensor = self._host if self._edited and self._written is None else None
            if tensor is None:
                with InferenceMode(False):  # a weight stays an ordinary tensor
                    tensor = allocate_huge(self.value).copy_(self.host())
            self.use_memory(tensor, lasting)
            return tensor
        memory.lasting |= lasting
        return memory.content()

    @property
    def newest(self) -> jax.Array | LazyArray | None:
        """The array that was set last, unless the content is on the host."""
        return self._array

    @property
    def in_host_memory(self) -> bool:
        """Whether the array is in host memory."""
        return self.sharding is None and on_cpu()

    def can_export(self, lasting: bool) -> bool:
        """Whether the content may live in host memory that others hold. On a mesh or another device each step copies it
        there and back, which only holders that can be counted, and so come to an end, are worth; and one process must
        have all of it."""
        return self.in_host_memory or (not lasting and process_count() == 1)

    @property
    def exported_memory(self) -> HostMemory | None:
        """The exported memory in which the content lives, if any."""
        return self._memory

    @property
    def is_exported(self) -> bool:
        """Whether the content lives in exported memory."""
        return self._memory is not None

    def argument(self, donated: bool = False) -> jax.Array:
        """The array as an argument of a step. If `is_exported`, wait for the step afterwards and call `export_content`.

        Args:
            donated: whether the step may overwrite the array.
        """
        dispatch.wait()
        memory = self._memory
        if memory is None:
            return self.array()
        tensor, held = memory.content(), memory.held()
        if held and not donated and self.in_host_memory:
            from ..jax_support import share_memory

            return share_memory(tensor)
        array = memory.on_device()
        if array is None:
            array = self._put(tensor)
        if not held:
            self._memory, self._array, self.current = None, array, array
        return array

    def export_content(self) -> None:
        """Write a step's result back to the exported memory."""
        if self._memory is not None:
            self._memory.content()

    def extent(self) -> tuple[int, int]:
        """The addresses at which the exported memory begins and ends."""
        assert self._memory is not None
        return self._memory.address, self._memory.address + self.value.nbytes

    def exchange(self, tensor: torch.Tensor) -> bool:
        """Adopt the memory of the real `tensor`, with its content. Memory exported before keeps its content.

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
            tensor = tensor.detach()
        if self._memory is not None:
            self._memory.content()
        self.use_memory(tensor, not is_countable(tensor))
        return True

    def release_exported_memory(self) -> None:
        """Stop using the exported memory: it stays with its holders, and the next content lives elsewhere."""
        self._memory = None

    def take_memory(self, memory: HostMemory) -> None:
        """Use exported memory that another buffer has released."""
        memory.arriving = self._array
        self._use_memory(memory)
        memory.content()

    def _use_memory(self, memory: HostMemory) -> None:
        self.fresh = False
        self._memory = memory  # set first: while it is set, no other attribute is read
        self._array = self.current = self._pending = self._host = self._written = None
        self._edited = False

    # -- the array --

    def array(self) -> jax.Array:
        """The content as an array of `value.shape`; waits for the materialization or first step that produces it."""
        dispatch.wait()
        for _ in range(_TRIES):  # other threads may be here too: read each attribute once
            if (memory := self._memory) is not None:
                return self._put(memory.content())
            array, pending = self._array, self._pending
            if self._edited:
                with _edits:
                    host, written = self._host, self._written
                    if self._edited and host is not None:
                        self._array = self._put(host) if written is None else written
                        self._host, self._edited, self._written = None, False, None
            elif array is None and pending is not None:
                new = pending.result()[self.value]
                if self._pending is pending and self._array is None:
                    self._array, self._pending = new, None
            elif type(array) is LazyArray:
                new = array.wait()
                if self._array is array:
                    self._array = new
            elif array is not None:
                self.current = array if self._host is None else None
                return array
        raise AssertionError("a buffer without content is read, which its tensors have left")

    def with_array(self, use: Callable[[jax.Array], Any]) -> Any:
        """Return `use(array)`; repeated if another thread's step donates the array meanwhile."""
        while True:
            array = self.array()
            try:
                return use(array)
            except (RuntimeError, ValueError) as error:
                from ..mesh.peers import explain_loss

                if not array.is_deleted() or self.array() is array:
                    if (explained := explain_loss(error)) is not error:
                        raise explained from error
                    raise

    def lazy_array(self) -> LazyArray | None:
        """The content as a LazyArray, if it is still being materialized or on the host; None if there is an array."""
        pending, value, array = self._pending, self.value, self._array
        if type(array) is LazyArray and array.content is not None and not self._edited and self._memory is None:
            return array
        if self._edited or self._array is not None or pending is None or self._memory is not None:
            return None

        def borrow() -> torch.Tensor | None:
            result = pending.result()[value]
            return result.borrow() if type(result) is LazyArray else None

        return LazyArray(lambda: ready(pending.result()[value]), borrow=borrow)

    def snapshot(self) -> jax.Array:
        """A copy of the array, which no step will donate. Does not wait for a running step."""
        import jax

        return self.array() if self._memory is not None else self.with_array(jax.numpy.copy)

    def set(self, array: jax.Array | LazyArray) -> None:
        """Replace the content by a step's result, which may still be being computed."""
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
        self.current = None if type(array) is LazyArray else array  # set last: other attributes are not read then

    def lose(self, error: BaseException) -> None:
        """Drop the content, lost in a failed step to which it was donated; reading raises until it is set again."""

        def gone() -> jax.Array:
            raise StateLostError(
                "the device failed during a step, after weights and optimizer state had been donated to it, so their "
                "content is lost. Load a checkpoint (load_state_dict), or start again."
            ) from error

        self.set(LazyArray(gone))

    def replace_from(self, file: FileValue) -> None:
        """On a mesh: replace the content by a file's, of which each device reads its own shard."""
        from ..mesh import sharded_weights

        assert self.sharding is not None
        self.set(sharded_weights.materialize({file: self.sharding})[file])

    def set_from(self, tensor: torch.Tensor) -> None:
        """Replace the content by a copy of `tensor`."""
        self.set(self._put(tensor))

    def _put(self, tensor: torch.Tensor) -> jax.Array:
        from ..jax_support import to_device

        if self.sharding is None:
            return to_device(tensor)
        from ..mesh import sharded_arrays

        return sharded_arrays.put(tensor, self.sharding)

    def read(self) -> torch.Tensor:
        """Like `host`, without keeping the copy."""
        dispatch.wait()
        if (memory := self._memory) is not None:
            return memory.content()
        if (host := self._host) is not None:
            return host
        if (content := self._content()) is not None:
            return content
        return self.with_array(self._read)

    def _read(self, array: jax.Array) -> torch.Tensor:
        from ..jax_support import to_host

        if self.sharding is not None:
            from ..mesh.sharded_arrays import readable

            array = readable(array)
        return laid_out(to_host(array), self.value)

    def _content(self) -> torch.Tensor | None:
        """The content, if it is on the host and there is no array yet."""
        array = self._array
        if type(array) is not LazyArray or array.content is None:
            return None
        return laid_out(array.content, self.value)

    def gathered(self) -> torch.Tensor:
        """Like `read`, including the shards of other processes; a collective call of all of them."""
        if self.sharding is None or self._edited:
            return self.read()
        from ..jax_support import to_host
        from ..mesh import sharded_arrays

        return laid_out(to_host(sharded_arrays.readable(sharded_arrays.gather(self.array()))), self.value)

    def owned_parts(self) -> list[OwnedPart]:
        """Partition the content into parts, each with the process that saves it."""
        shape = tuple(self.value.shape)
        if self.sharding is None or self._edited:
            return [OwnedPart(0, (0,) * len(shape), shape, self.read)]
        from ..mesh import sharded_weights

        array = self.array()
        data = {shard.device: shard.data for shard in array.addressable_shards}
        boxes = sharded_weights.boxes(shape, array.sharding)
        return [
            OwnedPart(devices[0].process_index, *box, functools.partial(_read_part, data, devices[0]))
            for box, devices in boxes.items()
        ]

    def host(self) -> torch.Tensor:
        """The content on the host, with the layout of `value`. It must not be written to except after `begin_edit`."""
        dispatch.wait()
        if (memory := self._memory) is not None:
            return memory.content()
        host = self._host
        if host is None and (content := self._content()) is not None:
            return content
        if host is None:
            array, host = self.with_array(lambda array: (array, self._read(array)))
            if self._array is array:  # otherwise another thread's step has set a new one meanwhile
                self._host, self.current = host, None
        return host

    def begin_edit(self, whole: bool = False) -> bool:
        """Prepare for a write to `host()`. If all of it is overwritten (`whole`), the old content is not read.

        If the device is this host, the content lives in host memory from the first write to the next step, so that
        training without a traced step copies nothing.

        Returns whether reading was skipped; then `cancel_edit` must undo this if the write fails.
        """
        if not whole and self.in_host_memory and not self._edited:
            self.memory(lasting=False)
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
        """Restore the content after a failed edit with `whole`."""
        self._host, self._edited, self._written = None, False, None
        if self._array is not None:
            self.set(self._array)

    def end_edit(self) -> None:
        """Finish a write. A pending edit of another buffer goes to the device now: the host keeps one copy only."""
        global _last_edited
        if self._memory is not None:
            return
        last = None if _last_edited is None else _last_edited()
        if last is not self:
            if last is not None:
                last.array()
            _last_edited = weakref.ref(self)


def replace_arrays(buffers: Iterable[DeviceBuffer | None], arrays: Iterable[Any]) -> None:
    """`set` for many buffers, fast for those that were not read or edited since the last step."""
    for buffer, array in zip(buffers, arrays, strict=True):
        if buffer is None:
            continue
        if type(array) is LazyArray or buffer.current is None:  # lazy first: another thread may read `current`
            buffer.set(array)
        else:
            buffer.current = buffer._array = array


def _read_part(data: Mapping[jax.Device, jax.Array], device: jax.Device) -> torch.Tensor:
    from ..jax_support import to_host

    return to_host(data[device])


def laid_out(logical: torch.Tensor, value: Value) -> torch.Tensor:
    """`logical`, with the strides of `value`."""
    if logical.stride() == value.stride:
        return logical
    return torch.empty_strided(value.shape, value.stride, dtype=value.dtype).copy_(logical)


def resident(
    array: Any, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, sharding: Any = None
) -> DeferredTensor:
    """A tensor on the backend that holds `array`; a LazyArray needs shape, dtype and, on a mesh, sharding."""
    shape = tuple(array.shape) if shape is None else shape
    if dtype is None:
        from ...lower.dtypes import to_torch

        dtype = to_torch(array.dtype)
    value = Value(shape, contiguous_stride(shape), dtype, torch.device("cpu"))
    return DeferredTensor.wrap(deferred_storage_of(array, value, sharding), shape, value.stride, 0, dtype)


def deferred_storage_of(array: Any, like: Value, sharding: Any = None) -> DeferredStorage:
    """A storage on the backend with the layout of `like` that holds `array`; on a mesh, a LazyArray needs sharding."""
    value = Value(like.shape, like.stride, like.dtype, like.device)
    storage = DeferredStorage(value)
    storage.resident = DeviceBuffer(value, sharding=mesh_sharding(array) if sharding is None else sharding)
    storage.resident.set(array)
    return storage


def mesh_sharding(array: Any) -> Any:
    """An array's sharding on a mesh; None on one device."""
    if type(array) is LazyArray:
        return None
    return array.sharding if len(array.sharding.device_set) > 1 else None
