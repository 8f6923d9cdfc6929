"""Bindings of the native kernels of `_fill.c`: float32 and bfloat16 fills, three to eight times as fast as PyTorch's.

They are available if the package was built with a C compiler, on x86-64 with AVX2. The caller has to check that they
give PyTorch's bits on this machine (`engine/sampler.py`): this package does not import PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from firstloss import c_library
from firstloss.rng.mt19937 import N, build_state, parse_state

if TYPE_CHECKING:
    from numpy.typing import NDArray

MIN_NORMAL = 16  # PyTorch draws fewer normals with another kernel


class _Cursor(ctypes.Structure):
    """`struct cursor`."""

    _fields_ = [("words", ctypes.c_uint32 * N), ("drawn", ctypes.c_uint32)]


_CURSOR, _MEMORY = ctypes.POINTER(_Cursor), ctypes.c_void_p
_COUNT, _LANES = ctypes.c_int64, ctypes.c_int
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double
_HARD_CASES = (_DOUBLE, _MEMORY, _MEMORY)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "normal": (None, (_CURSOR, _MEMORY, _COUNT, _DOUBLE, _DOUBLE, _LANES)),
    "uniform": (None, (_CURSOR, _MEMORY, _COUNT, _DOUBLE, _DOUBLE, _LANES)),
    "fill_columns": (
        None,
        (
            _CURSOR,
            ctypes.POINTER(_MEMORY),
            ctypes.POINTER(_COUNT),
            ctypes.c_int,
            ctypes.c_int,
            _COUNT,
            ctypes.c_int,
            _DOUBLE,
            _DOUBLE,
            _LANES,
        ),
    ),
    "mul_add_clamp": (None, (_MEMORY, _MEMORY, _COUNT, *[_FLOAT] * 4, _LANES)),
    "normals_outside": (_COUNT, (_CURSOR, _COUNT, *[_DOUBLE] * 4, _MEMORY, _LANES)),
    "normals_at": (None, (_CURSOR, _COUNT, _DOUBLE, _DOUBLE, _MEMORY, _COUNT, _MEMORY, _LANES)),
    "erfinv": (_COUNT, (_MEMORY, _COUNT, *_HARD_CASES)),
    "uniform_erfinv": (_COUNT, (_CURSOR, _MEMORY, _COUNT, _DOUBLE, _DOUBLE, *[_FLOAT] * 4, *_HARD_CASES)),
    "scatter": (None, (_MEMORY, _MEMORY, _MEMORY, _COUNT)),
    "lanes": (ctypes.c_int, ()),
}


_library = c_library.load(__file__, "_fill", {f"firstloss_{name}": types for name, types in _FUNCTIONS.items()})


def lanes() -> int:
    """The SIMD width of the kernels on this machine, in float32 lanes: 16, 8, or 0 if there are no kernels."""
    return 0 if _library is None else _library.firstloss_lanes()


def available() -> bool:
    """Whether there are kernels for this machine."""
    return lanes() > 0


def has_erfinv() -> bool:
    """Whether `erfinv` and `Cursor.uniform_erfinv` are available: they require 16 lanes."""
    return lanes() == 16


def may_round_to_end(low: float, high: float) -> bool:
    """Whether a uniform of [low, high) may round up to `high`: the largest of [0, 1), 1 - 2^-24, scaled by an FMA."""
    start, end = np.float32(low), np.float32(high)
    largest = (1 - 2.0**-24) * float(end - start) + float(start)  # in double, rounded once: not across the middle below
    return largest >= (float(np.nextafter(end, start)) + float(end)) / 2


def mul_add_clamp(
    to: int, source: int, count: int, factor: float, term: float, low: float, high: float, width: int | None = None
) -> None:
    """Apply `mul_(factor).add_(term).clamp_(low, high)` to `count` float32 elements at the address `source`.

    The result is written to the address `to` with non-temporal stores.
    """
    assert _library is not None
    _library.firstloss_mul_add_clamp(to, source, count, factor, term, low, high, lanes() if width is None else width)


PADDING = 16  # elements by which buffers for selected elements must exceed the number of elements


class HardCases(NamedTuple):
    """The elements whose inverse error function the kernel leaves to the caller, because it is hard to round.

    These are results within `margin` of the midpoint of two floats, as a fraction of their distance; and arguments that
    the kernel does not support: close to 1 or -1, tiny, outside [-1, 1], and NaN.

    Attributes:
        arguments: the address of a float32 buffer for their arguments, PADDING longer than the number of elements.
        indices: the address of an int32 buffer of the same length for their indices.
    """

    margin: float
    arguments: int
    indices: int


def erfinv(address: int, count: int, hard_cases: HardCases) -> int:
    """Apply `erfinv_()` to `count` < 2^31 - PADDING float32 elements; returns the number of hard cases left."""
    assert _library is not None
    return _library.firstloss_erfinv(address, count, *hard_cases)


def scatter(address: int, hard_cases: HardCases, count: int) -> None:
    """Write the first `count` numbers at `hard_cases.arguments` to the elements at `hard_cases.indices`."""
    assert _library is not None
    _library.firstloss_scatter(address, hard_cases.arguments, hard_cases.indices, count)


class Cursor:
    """A position in a stream, advanced by each draw. Not thread-safe.

    The kernels release the GIL and write `count` contiguous elements to a memory address; the elements are float32
    unless a method says bfloat16.
    """

    def __init__(self, state: NDArray[np.uint8], width: int | None = None) -> None:
        """
        Args:
            state: as `Stream.state_at` returns it.
            width: the SIMD width; by default `lanes()`, which is the maximum.
        """
        self._width = lanes() if width is None else width
        if _library is None or not 0 < self._width <= lanes():
            raise RuntimeError("there are no native kernels for this machine; check native.available() first")
        self._library = _library
        self._index_buffer: NDArray[np.int32] | None = None
        self._record = parse_state(state)
        # A freshly seeded state (`next` 0, `left` 1) holds the words before the first draw.
        self._cursor = _Cursor(drawn=N + 1 - int(self._record["left"]))
        np.frombuffer(self._cursor.words, np.uint32)[:] = self._record["words"]

    def normal(self, address: int, count: int, mean: float, std: float) -> None:
        """`normal_(mean, std)` on a whole tensor of `count` >= MIN_NORMAL elements."""
        if count < MIN_NORMAL:
            raise ValueError(f"the kernel draws at least {MIN_NORMAL} normals, not {count}")
        self._library.firstloss_normal(self._cursor, address, count, mean, std, self._width)

    def uniform(self, address: int, count: int, low: float, high: float) -> None:
        """`uniform_(low, high)` on a whole tensor of `count` elements."""
        self._library.firstloss_uniform(self._cursor, address, count, low, high, self._width)

    def normal_bfloat16(self, address: int, count: int, mean: float, std: float) -> None:
        """Like `normal`, in bfloat16. PyTorch computes each block of 16 in float32 and rounds it."""
        if count < MIN_NORMAL:
            raise ValueError(f"the kernel draws at least {MIN_NORMAL} normals, not {count}")
        whole = count - count % MIN_NORMAL
        self.columns("normal", [address], [whole], 1, mean, std, bfloat16=True)
        if whole < count:  # PyTorch redraws the last 16
            self.columns("normal", [address + 2 * (count - MIN_NORMAL)], [MIN_NORMAL], 1, mean, std, bfloat16=True)

    def uniform_bfloat16(self, address: int, count: int, low: float, high: float) -> None:
        """Like `uniform`, in bfloat16."""
        self.columns("uniform", [address], [count], 1, low, high, bfloat16=True)

    def uniform_erfinv(
        self,
        address: int,
        count: int,
        low: float,
        high: float,
        epilogue: tuple[float, float, float, float],
        hard_cases: HardCases,
    ) -> int:
        """`uniform`, `erfinv_()` and `mul_add_clamp(*epilogue)` in one pass, with non-temporal stores.

        Returns:
            The number of hard cases; the elements of these hold arbitrary numbers.
        """
        return self._library.firstloss_uniform_erfinv(self._cursor, address, count, low, high, *epilogue, *hard_cases)

    def normals_outside(self, count: int, mean: float, std: float, low: float, high: float) -> NDArray[np.int32]:
        """Draw `count` normals, a multiple of 16, and return the indices of those outside [low, high].

        The bounds must be float32 numbers.
        """
        self._check_blocks(count)
        if self._index_buffer is None or len(self._index_buffer) < count + PADDING:
            self._index_buffer = np.empty(count + PADDING, np.int32)
        count_outside = self._library.firstloss_normals_outside(
            self._cursor, count, mean, std, low, high, self._index_buffer.ctypes.data, self._width
        )
        return self._index_buffer[:count_outside].copy()

    def normals_at(self, count: int, mean: float, std: float, indices: NDArray[np.int32]) -> NDArray[np.float32]:
        """Draw `count` normals, a multiple of 16, and return those at `indices`, which must be ascending."""
        self._check_blocks(count)
        indices = np.ascontiguousarray(indices, np.int32)
        out = np.empty(len(indices), np.float32)
        self._library.firstloss_normals_at(
            self._cursor, count, mean, std, indices.ctypes.data, len(indices), out.ctypes.data, self._width
        )
        return out

    @staticmethod
    def _check_blocks(count: int) -> None:
        if count % MIN_NORMAL or count >= 1 << 31:
            raise ValueError(f"the number of normals must be a multiple of {MIN_NORMAL} below 2^31, but is {count}")

    def columns(
        self,
        kind: str,
        out: Sequence[int],
        widths: Sequence[int],
        rows: int,
        first: float,
        second: float,
        bfloat16: bool = False,
    ) -> None:
        """Rows of a "normal" or "uniform" fill, split by columns into parts, each written to its own memory.

        Args:
            out: the addresses of the parts, whose rows are contiguous.
            widths: the row length of each part, in elements.
            first, second: mean and standard deviation, or low and high; finite for bfloat16.
            bfloat16: whether the elements are bfloat16 instead of float32.
        """
        count = rows * sum(widths)
        if kind == "normal" and count % MIN_NORMAL:
            raise ValueError(f"the number of normals must be a multiple of {MIN_NORMAL}, but is {count}")
        parts = len(out)
        self._library.firstloss_fill_columns(
            self._cursor,
            (ctypes.c_void_p * parts)(*out),
            (ctypes.c_int64 * parts)(*widths),
            parts,
            bfloat16,
            count,
            kind == "normal",
            first,
            second,
            self._width,
        )

    def state(self) -> NDArray[np.uint8]:
        """The generator's state at this position, with the cached normal of the initial state."""
        record = self._record.copy()
        record["words"] = np.frombuffer(self._cursor.words, np.uint32)
        record["next"] = self._cursor.drawn
        record["left"] = N + 1 - self._cursor.drawn
        return build_state(record)
