"""`LazyArray`: arrays that are still being computed, by a materialization or the rest of a first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..lazy_jax import is_imported

if TYPE_CHECKING:
    import jax

    from ..mesh.mesh import MeshSharding


class LazyArray:
    """Stands for a device array that is still being computed, or that is on the host only until somebody asks for it
    as an array.

    Attributes:
        content: the values, where they are on the host; not to be written.
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
            wait: returns the array, or raises the error that prevented it; it may be called again.
            borrow: as the method.
        """
        self.wait = wait
        self.content = content
        self._borrow = borrow

    def borrow(self) -> torch.Tensor | None:
        """The values, to be read and let go of, where there is no array yet: one is made without a copy only as long
        as nobody holds them. Waits for them."""
        return self.content if self._borrow is None else self._borrow()

    # -- as of an array: of results that are on the host --

    def is_ready(self) -> bool:
        """Whether the values are available."""
        return self.content is not None

    def is_deleted(self) -> bool:
        """It is never donated."""
        return False

    def block_until_ready(self) -> LazyArray:
        """Wait for the values."""
        if self.content is None:
            self.wait().block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """They are available."""


def ready(array: Any) -> Any:
    """The array itself; waits for a lazy one."""
    return array.wait() if type(array) is LazyArray else array


def copied_later(content: torch.Tensor) -> LazyArray:
    """`content`, which becomes an array by a copy."""

    def copied() -> jax.Array:
        from ..jax_support import to_device

        return to_device(content)

    return LazyArray(copied, content)


def share_later(content: torch.Tensor) -> LazyArray:
    """`content`, whose own bytes become an array; they must not change while that lives."""

    def lent() -> jax.Array:
        from ..jax_support import share_memory

        return share_memory(content)

    return LazyArray(lent, content)


def to_device_later(tensor: torch.Tensor, sharding: MeshSharding) -> jax.Array | LazyArray:
    """A copy of `tensor`, cut over a mesh; where there is no JAX yet, lazily."""
    if is_imported():
        from ..mesh.sharded_arrays import put

        return put(tensor, sharding)
    with torch.no_grad():
        own = tensor.detach().clone(memory_format=torch.contiguous_format)

    def placed() -> jax.Array:
        from ..mesh.sharded_arrays import put

        return put(own, sharding)

    return LazyArray(placed, own)
