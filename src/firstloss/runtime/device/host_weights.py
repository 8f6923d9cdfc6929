"""Weights materialized in host memory for PyTorch's kernels, and turned into XLA arrays later.

Either JAX is not imported yet, and arrays are later made of that memory without a copy, or they are sharded over a
mesh.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...engine.cpu_engine import materialize_values
from ...engine.huge_pages import allocate_huge
from ...program.graph import Value, is_contiguous
from .host_memory import has_other_owners
from .lazy_array import LazyArray
from .pages import LEAST_BYTES, OWNED_BYTES, Pages

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import MeshSharding
    from ..mesh.sharded_weights import WholeArrays


def materialize(values: list[Value], niceness: Sequence[int]) -> dict[Value, LazyArray]:
    """Run the recipes of `values`."""
    pages: dict[int, Pages] = {}

    def allocate(value: Value) -> torch.Tensor:  # called from several threads
        if value.nbytes < LEAST_BYTES:
            return value.empty()
        if not is_contiguous(value.shape, value.stride):
            return allocate_huge(value)
        memory = Pages(tuple(value.shape), value.dtype)
        pages[memory.tensor.data_ptr()] = memory
        return memory.tensor

    buffers = materialize_values(values, allocate=allocate, niceness=niceness)
    drawn = {value: HostWeight(value, buffer, pages.get(buffer.data_ptr())) for value, buffer in buffers.items()}
    pages.clear()  # also those of intermediate values
    return _lazy_arrays(drawn, _SingleDevice(list(drawn.values())))


def materialize_unsharded(shardings: Mapping[Value, MeshSharding], niceness: Sequence[int]) -> dict[Value, LazyArray]:
    """Like `make`, for weights to be sharded over CPU devices of this machine. The first loss needs the whole weights,
    and drawing them whole takes no longer than drawing the shards."""
    buffers = materialize_values(list(shardings), allocate=allocate_huge, niceness=niceness)
    drawn = {value: HostWeight(value, buffer) for value, buffer in buffers.items()}
    return _lazy_arrays(drawn, _OnMesh(shardings))


def _lazy_arrays(drawn: dict[Value, HostWeight], allocator: _SingleDevice | _OnMesh) -> dict[Value, LazyArray]:
    for each in drawn.values():
        each.allocator = allocator
    return {value: LazyArray(each.array, borrow=each.borrow) for value, each in drawn.items()}


class HostWeight:
    """The content of one weight until it becomes an XLA array."""

    def __init__(self, value: Value, content: torch.Tensor, pages: Pages | None = None) -> None:
        self.value = value
        self.pages = pages
        self.allocator: _SingleDevice | _OnMesh | None = None
        self._content: torch.Tensor | None = content
        self._array: jax.Array | None = None
        self._lock = threading.Lock()

    def borrow(self) -> torch.Tensor | None:
        """The content; None once there is an array. While it is borrowed, it stays where it is."""
        with self._lock:
            if self._content is None or self.pages is not None and self.pages.moved:
                return None
            return self._content.detach()

    def array(self) -> jax.Array:
        """The content as an array in memory allocated by XLA. After an interrupt it can be called again."""
        with self._lock:
            if self._array is None:
                self._array = self._to_array()
            if self.allocator is not None:
                self.allocator.forget(self)
            self._content = self.pages = self.allocator = None
            return self._array

    def _to_array(self) -> jax.Array:
        assert self._content is not None and self.allocator is not None
        return self.allocator.array(self, self._content)


class _SingleDevice:
    """Makes arrays on one device, allocated in one call because XLA takes some 20 ms for each new shape and dtype."""

    def __init__(self, drawn: list[HostWeight]) -> None:
        owned = [each.value for each in drawn if each.value.nbytes >= OWNED_BYTES]
        self._kinds = {value: (tuple(value.shape), value.dtype) for value in owned}
        self._made: dict[Value, tuple[jax.Array, torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def array(self, drawn: HostWeight, content: torch.Tensor) -> jax.Array:
        """The array of a weight, with its pages moved into the allocated memory if possible."""
        from ..jax_support import to_device

        if drawn.value not in self._kinds:
            return to_device(content)
        array, memory = self._allocate(drawn)
        pages = drawn.pages
        if pages is None:
            memory.copy_(content)
            return array
        pages.tensor = content  # one tensor rather than two, so that owners can be counted
        if not pages.moved and (has_other_owners(content) or not pages.move(memory)):
            memory.copy_(content)
        return array

    def _allocate(self, drawn: HostWeight) -> tuple[jax.Array, torch.Tensor]:
        """The allocated array for a weight, and its uninitialized memory."""
        from ..jax_support import empties

        with self._lock:
            if self._made is None:
                self._made = dict(zip(self._kinds, empties(list(self._kinds.values())), strict=True))
            return self._made[drawn.value]

    def forget(self, drawn: HostWeight) -> None:
        """Release the weight's allocation: it has its array."""
        with self._lock:
            if self._made is not None:
                self._made.pop(drawn.value, None)


class _OnMesh:
    """Makes arrays sharded over a mesh."""

    def __init__(self, shardings: Mapping[Value, MeshSharding]) -> None:
        self._shardings = shardings
        self._whole: WholeArrays | None = None
        self._lock = threading.Lock()

    def array(self, drawn: HostWeight, content: torch.Tensor) -> jax.Array:
        """The sharded array of a weight."""
        with self._lock:
            if self._whole is None:
                from ..mesh.sharded_weights import WholeArrays

                self._whole = WholeArrays(self._shardings)
        return self._whole.array(drawn.value, content)

    def forget(self, drawn: HostWeight) -> None:
        """Release the weight's data: it has its array."""
        if self._whole is not None:
            self._whole.forget(drawn.value)
