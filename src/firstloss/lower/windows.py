"""Windows of poolings and convolutions; the elements at one offset in all windows are a strided slice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from .dtypes import cast


def each(values: Sequence[int], count: int) -> tuple[int, ...]:
    """One value for each spatial dimension; a single value stands for all."""
    return tuple(values) * count if len(values) == 1 else tuple(values)


def pooled_length(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """The number of windows along a dimension; with `ceil_mode` the last may extend past the end."""
    room = length + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= length + padding else count


class Windows:
    """The windows of a pooling or a convolution over the last `len(kernel)` dimensions of a shape.

    A kernel given as one number is square.
    """

    def __init__(
        self, shape: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
    ) -> None:
        kernel = list(kernel)
        n = self.space = len(kernel) if len(kernel) > 1 else 2
        self.kernel: tuple[int, ...] = each(kernel, n)
        self.stride: tuple[int, ...] = each(stride, n) if len(stride) else self.kernel
        self.padding, self.dilation = each(padding, n), each(dilation, n)
        self.lead, self.lengths = tuple(shape[: len(shape) - n]), tuple(shape[len(shape) - n :])
        per_dim = zip(self.lengths, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        self.counts = tuple(pooled_length(*numbers, ceil_mode) for numbers in per_dim)

    def extents(self) -> list[int]:
        """The extents of the windows, from the first padded element."""
        return [
            (c - 1) * s + d * (k - 1) + 1
            for c, s, d, k in zip(self.counts, self.stride, self.dilation, self.kernel, strict=True)
        ]

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """The offsets within a window, in memory order."""
        return itertools.product(*([i * d for i in range(k)] for k, d in zip(self.kernel, self.dilation, strict=True)))

    def padded(self, x: Any, value: Any) -> Any:
        edges = [(p, max(0, e - n - p), 0) for p, e, n in zip(self.padding, self.extents(), self.lengths, strict=True)]
        return lax.pad(x, cast(value, x.dtype), [(0, 0, 0)] * len(self.lead) + edges)

    def slice(self, padded: Any, offset: Any) -> Any:
        """The elements at one offset of all windows."""
        zeros, ones = (0,) * len(self.lead), (1,) * len(self.lead)
        limits = [o + (c - 1) * s + 1 for o, c, s in zip(offset, self.counts, self.stride, strict=True)]
        return lax.slice(padded, zeros + tuple(offset), self.lead + tuple(limits), ones + self.stride)

    def unsliced(self, parts: Iterable[Any]) -> Any:
        """The transpose of padding and `slice`: the parts of all `offsets()`, put back where they came from and added.

        Offsets with the same remainder modulo the stride share a grid as coarse as the windows; the grids are
        interleaved at the end. (Put back separately, with gaps between its elements, each part would be evaluated for
        every element of the input.)
        """
        lead, space = len(self.lead), range(self.space)
        lengths = [-(-e // s) for e, s in zip(self.extents(), self.stride, strict=True)]
        grids: dict[tuple[int, ...], Any] = {}
        for offset, part in zip(self.offsets(), parts, strict=True):
            begins = [o // s for o, s in zip(offset, self.stride, strict=True)]
            edges = [(b, n - b - c, 0) for b, n, c in zip(begins, lengths, self.counts, strict=True)]
            grid = lax.pad(part, cast(0, part.dtype), [(0, 0, 0)] * lead + edges)
            remainder = tuple(o % s for o, s in zip(offset, self.stride, strict=True))
            grids[remainder] = grids[remainder] + grid if remainder in grids else grid
        remainders = itertools.product(*map(range, self.stride))
        interleaved = jnp.stack([grids.get(r, lax.full_like(grid, 0)) for r in remainders])
        interleaved = lax.reshape(interleaved, (*self.stride, *grid.shape))
        order = [self.space + d for d in range(lead)]
        order += [d for i in space for d in (self.space + lead + i, i)]
        shape = [n * s for n, s in zip(lengths, self.stride, strict=True)]
        interleaved = lax.reshape(interleaved, (*self.lead, *shape), order)
        edges = [(-p, n + p - reach, 0) for p, n, reach in zip(self.padding, self.lengths, shape, strict=True)]
        return lax.pad(interleaved, cast(0, interleaved.dtype), [(0, 0, 0)] * lead + edges)

    def _along(self, offset) -> Iterator[np.ndarray]:
        """The input indices of the elements of `slice` along each dimension, to be broadcast against each other."""
        for d, (o, c, s, p) in enumerate(zip(offset, self.counts, self.stride, self.padding, strict=True)):
            yield (np.arange(c) * s + o - p).reshape((-1,) + (1,) * (self.space - d - 1))

    def positions(self, offset: Any) -> np.ndarray:
        """The flat indices, in the unpadded plane, of the elements of `slice`; in 32 bits if they fit."""
        flat = np.zeros(self.counts, np.int32 if math.prod(self.lengths) < 2**31 else np.int64)
        for d, along in enumerate(self._along(offset)):
            flat += (along * math.prod(self.lengths[d + 1 :])).astype(flat.dtype)
        return flat

    def inside(self, offset: Any) -> np.ndarray:
        """Whether the elements of `slice` are in the input, rather than in its padding."""
        inside = np.ones(self.counts, bool)
        for along, n in zip(self._along(offset), self.lengths, strict=True):
            inside &= (along >= 0) & (along < n)
        return inside

    def sizes(self, count_include_pad: bool) -> np.ndarray:
        """The number of elements that each window averages over."""
        total = np.ones(self.counts, np.int64)
        for d, (c, s, p, k, n) in enumerate(
            zip(self.counts, self.stride, self.padding, self.kernel, self.lengths, strict=True)
        ):
            start = np.arange(c) * s - p
            end = np.minimum(start + k, n + p)
            inside = np.minimum(end, n) - np.maximum(start, 0)
            size = end - start if count_include_pad else inside
            total *= size.reshape((-1,) + (1,) * (self.space - d - 1))
        return total
