"""Weights in host memory, for PyTorch's kernels: before JAX is imported, which later makes arrays of that memory
without a copy, or on a mesh, over whose devices they are sharded later.
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
from .pages import LEAST_BYTES, Pages

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import MeshSharding
    from ..mesh.sharded_weights import WholeArrays


def make(values: list[Value], niceness: Sequence[int]) -> dict[Value, LazyArray]:
    """Run the recipes of `values`."""
    pages: dict[int, Pages] = {}

    def allocate(value: Value) -> torch.Tensor:  # called from several threads
        if value.nbytes < LEAST_BYTES or not is_contiguous(value.shape, value.stride):
            return allocate_huge(value)
        own = Pages(tuple(value.shape), value.dtype)
        pages[own.tensor.data_ptr()] = own
        return own.tensor

    buffers = materialize_values(values, allocate=allocate, niceness=niceness)
    drawn = {value: HostWeight(value, buffer, pages.get(buffer.data_ptr())) for value, buffer in buffers.items()}
    pages.clear()  # of what is no weight, too
    return _lazily(drawn, _Together([each for each in drawn.values() if each.pages is not None]))


def make_whole(shardings: Mapping[Value, MeshSharding], niceness: Sequence[int]) -> dict[Value, LazyArray]:
    """As `make`, of weights that go to several devices of this machine's CPU. The first loss needs all of each weight;
    to draw it so takes no longer than to draw its parts."""
    buffers = materialize_values(list(shardings), allocate=allocate_huge, niceness=niceness)
    drawn = {value: HostWeight(value, buffer) for value, buffer in buffers.items()}
    return _lazily(drawn, _OnMesh(shardings))


def _lazily(drawn: dict[Value, HostWeight], together: _Together | _OnMesh) -> dict[Value, LazyArray]:
    for each in drawn.values():
        each.together = together
    return {value: LazyArray(each.array, borrow=each.borrow) for value, each in drawn.items()}


class HostWeight:
    """The content of one weight, until it is an array of XLA's."""

    def __init__(self, value: Value, content: torch.Tensor, pages: Pages | None = None) -> None:
        self.value = value
        self.pages = pages
        self.together: _Together | _OnMesh | None = None
        self._content: torch.Tensor | None = content
        self._array: jax.Array | None = None
        self._lock = threading.Lock()

    def borrow(self) -> torch.Tensor | None:
        """The content; None once there is an array. While anybody holds it, it stays where it is."""
        with self._lock:
            if self._content is None or self.pages is not None and self.pages.moved:
                return None
            return self._content.detach()

    def array(self) -> jax.Array:
        """The content as an array, in memory that XLA has allocated. Where this was interrupted, it goes on."""
        with self._lock:
            if self._array is None:
                self._array = self._made()
            if self.together is not None:
                self.together.forget(self)
            self._content = self.pages = self.together = None
            return self._array

    def _made(self) -> jax.Array:
        assert self._content is not None and self.together is not None
        return self.together.array(self, self._content)


class _Together:
    """Arrays for several weights, allocated in one call, of which each new kind takes XLA some 20 ms."""

    def __init__(self, drawn: list[HostWeight]) -> None:
        self._kinds = {
            id(each): (tuple(each.pages.tensor.shape), each.pages.tensor.dtype) for each in drawn if each.pages
        }
        self._made: dict[int, tuple[jax.Array, torch.Tensor]] | None = None
        self._lock = threading.Lock()

    def array(self, drawn: HostWeight, content: torch.Tensor) -> jax.Array:
        """The array of one, which is small, or one of them."""
        from ..jax_support import to_device

        pages = drawn.pages
        if pages is None:
            return to_device(content)
        array, memory = self._allocate(drawn)
        pages.tensor = content  # one tensor, and not two, so that others can be counted
        if not pages.moved and (has_other_owners(content) or not pages.move(memory)):
            memory.copy_(content)
        return array

    def _allocate(self, drawn: HostWeight) -> tuple[jax.Array, torch.Tensor]:
        """The array for one of them, and its memory, which nobody has written."""
        from ..jax_support import empties

        with self._lock:
            if self._made is None:
                self._made = dict(zip(self._kinds, empties(list(self._kinds.values())), strict=True))
            return self._made[id(drawn)]

    def forget(self, drawn: HostWeight) -> None:
        """It has its array."""
        with self._lock:
            if self._made is not None:
                self._made.pop(id(drawn), None)


class _OnMesh:
    """As `_Together`, on a mesh."""

    def __init__(self, shardings: Mapping[Value, MeshSharding]) -> None:
        self._shardings = shardings
        self._whole: WholeArrays | None = None
        self._lock = threading.Lock()

    def array(self, drawn: HostWeight, content: torch.Tensor) -> jax.Array:
        """The array of one."""
        with self._lock:
            if self._whole is None:
                from ..mesh.sharded_weights import WholeArrays

                self._whole = WholeArrays(self._shardings)
        return self._whole.array(drawn.value, content)

    def forget(self, drawn: HostWeight) -> None:
        """It has its array."""
        if self._whole is not None:
            self._whole.forget(drawn.value)
