"""`LazyArray`: device arrays that are still being computed; `BackgroundWork`: the rest of a step that computes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from ... import timeline
from ...interpreter import gc_thresholds
from ..lazy_jax import is_imported

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import MeshSharding


class LazyArray:
    """Stands in for a device array that is still being computed, or that stays on the host until it is needed as an
    array.

    Attributes:
        content: the values, if they are on the host; read-only.
    """

    __slots__ = ("wait", "content", "_borrow")

    def __init__(
        self,
        wait: Callable[[], jax.Array],
        content: torch.Tensor | None = None,
        borrow: Callable[[], torch.Tensor | None] | None = None,
    ) -> None:
        """
        Args:
            wait: returns the array, or raises the error that prevented it; may be called repeatedly.
            borrow: implements the method of that name.
        """
        self.wait: Callable[[], Any] = wait
        self.content: torch.Tensor | None = content
        self._borrow = borrow

    def borrow(self) -> torch.Tensor | None:
        """Wait for the values and return them if there is no array yet. Release them soon: the array is made without a
        copy only if nobody holds them."""
        return self.content if self._borrow is None else self._borrow()

    # -- methods of jax.Array, for results on the host --

    def is_ready(self) -> bool:
        """Whether the values are available."""
        return self.content is not None

    def is_deleted(self) -> bool:
        """False: it is never donated."""
        return False

    def block_until_ready(self) -> LazyArray:
        """Wait for the values."""
        if self.content is None:
            self.wait().block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Nothing to do."""


def ready(array: Any) -> Any:
    """The array itself, after waiting if it is lazy."""
    return array.wait() if type(array) is LazyArray else array


def copied_later(content: torch.Tensor) -> LazyArray:
    """A LazyArray of `content`, which is copied to the device when an array is needed."""

    def copied() -> jax.Array:
        from ..jax_support import to_device

        return to_device(content)

    return LazyArray(copied, content)


def share_later(content: torch.Tensor) -> LazyArray:
    """A LazyArray of `content`, whose memory becomes the array without a copy; it must not change while that lives."""

    def shared_array() -> jax.Array:
        from ..jax_support import share_memory

        return share_memory(content)

    return LazyArray(shared_array, content)


def to_device_later(tensor: torch.Tensor, sharding: MeshSharding) -> jax.Array | LazyArray:
    """Shard a copy of `tensor` over a mesh; lazily if JAX is not imported yet."""
    if is_imported():
        from ..mesh.sharded_arrays import put

        return put(tensor, sharding)
    with torch.no_grad():
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)

    def placed() -> jax.Array:
        from ..mesh.sharded_arrays import put

        return put(copy, sharding)

    return LazyArray(placed, copy)


class BackgroundWork(Future[Any]):
    """A future of the results of the rest of a step, by key.

    Attributes:
        failed: called when a result is requested and computing it has failed.
    """

    failed: Callable[[BaseException], None] = staticmethod(lambda error: None)

    def __init__(self, finish: Callable[[], dict[Any, Any]]) -> None:
        """`finish` computes the results; it is called in the thread."""
        super().__init__()
        self._finish: Callable[[], dict[Any, Any]] | None = finish

    def begin(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="firstloss-first-step").start()

    def _work(self) -> None:
        finish, self._finish = self._finish, None  # freed when it has run
        assert finish is not None
        try:
            with gc_thresholds.changed():  # no full collections, which take as long as importing JAX
                from ..jax_support import x64

                with timeline.span(timeline.REST), x64():
                    result = finish()
        except BaseException as error:  # re-raised where the state is needed
            self.set_exception(error)
        else:
            self.set_result(result)

    def of(self, key: Any) -> Any:
        """Wait for a result."""
        try:
            return self.result()[key]
        except BaseException:
            if self.done() and (error := self.exception()) is not None:
                self.failed(error)
            raise
