"""The native kernels of `_fill.c`: float32 and bfloat16 fills, three to eight times as fast as PyTorch's own.

They are there if a C compiler was when the package was built, and run on x86-64 with AVX2. That they give PyTorch's
bits on this machine is for the caller to check: this package does not know PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from firstloss import c_library
from firstloss.rng.mt19937 import N, build_state, parse_state

MIN_NORMAL = 16  # PyTorch makes fewer normals in another way


class _Cursor(ctypes.Structure):
    """`struct cursor`."""

    _fields_ = [("words", ctypes.c_uint32 * N), ("drawn", ctypes.c_uint32)]


_CURSOR, _MEMORY = ctypes.POINTER(_Cursor), ctypes.c_void_p
_COUNT, _LANES = ctypes.c_int64, ctypes.c_int
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double
_DOUBT = (_DOUBLE, _MEMORY, _MEMORY)
_FUNCTIONS: dict[str, tuple[Any, tuple]] = {
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
    "finish": (None, (_MEMORY, _MEMORY, _COUNT, *[_FLOAT] * 4, _LANES)),
    "normals_outside": (_COUNT, (_CURSOR, _COUNT, *[_DOUBLE] * 4, _MEMORY, _LANES)),
    "normals_at": (None, (_CURSOR, _COUNT, _DOUBLE, _DOUBLE, _MEMORY, _COUNT, _MEMORY, _LANES)),
    "erfinv": (_COUNT, (_MEMORY, _COUNT, *_DOUBT)),
    "uniform_erfinv": (_COUNT, (_CURSOR, _MEMORY, _COUNT, _DOUBLE, _DOUBLE, *[_FLOAT] * 4, *_DOUBT)),
    "put": (None, (_MEMORY, _MEMORY, _MEMORY, _COUNT)),
    "lanes": (ctypes.c_int, ()),
}


@cache
def _library() -> ctypes.CDLL | None:
    return c_library.load(__file__, "_fill", {f"firstloss_{name}": types for name, types in _FUNCTIONS.items()})


def lanes() -> int:
    """How many numbers the kernels make at once on this machine: 16, 8, or 0 where there are no kernels."""
    library = _library()
    return 0 if library is None else library.firstloss_lanes()


def available() -> bool:
    """Whether there are kernels for this machine."""
    return lanes() > 0


def has_erfinv() -> bool:
    """Whether `erfinv` and `Cursor.uniform_erfinv` are there: they are written for 16 numbers at once."""
    return lanes() == 16


def finish(
    to: int, source: int, count: int, factor: float, term: float, low: float, high: float, width: int | None = None
) -> None:
    """What `mul_(factor).add_(term).clamp_(low, high)` makes of `count` float32 elements at the address `source`.

    They are written to the address `to`, past the cache.
    """
    library = _library()
    assert library is not None
    library.firstloss_finish(to, source, count, factor, term, low, high, lanes() if width is None else width)


SPARE = 16  # what the room for a selection of numbers is longer than there are numbers


class Doubt(NamedTuple):
    """Which inverse error functions the kernel leaves to its caller, and where it puts what it leaves.

    In doubt is what lies within `share` of the middle between two floats, as a fraction of their distance; and what the
    kernel is not made for: arguments close to 1 or -1, tiny ones, what has no inverse, and no number.
    """

    share: float
    left: int  # the address of room for SPARE more float32 than there are numbers: the arguments in doubt
    where: int  # the address of room for as many int32: their indices


def erfinv(address: int, count: int, doubt: Doubt) -> int:
    """What `erfinv_()` makes of `count` < 2^31 - SPARE float32 elements, but for those in doubt; returns how many."""
    library = _library()
    assert library is not None
    return library.firstloss_erfinv(address, count, *doubt)


def put(address: int, doubt: Doubt, count: int) -> None:
    """Write the first `count` of what is at `doubt.left` by now to the elements where they belong."""
    library = _library()
    assert library is not None
    library.firstloss_put(address, doubt.left, doubt.where, count)


class Cursor:
    """A place in a stream, moved on by what is drawn there. One thread at a time.

    The kernels run without the interpreter's lock, and write to memory by its address: `count` float32 elements, side
    by side, or bfloat16 elements where a method says so.
    """

    def __init__(self, state: NDArray[np.uint8], width: int | None = None) -> None:
        """`state` is what `Stream.state_at` returns; `width`, at most `lanes()`, how many numbers to make at once."""
        library = _library()
        self._width = lanes() if width is None else width
        if library is None or not 0 < self._width <= lanes():
            raise RuntimeError("there are no native kernels for this machine; ask native.available() first")
        self._library = library
        self._room: NDArray[np.int32] | None = None
        self._record = parse_state(state)
        # The words of a state that was seeded and not yet drawn from, `next` 0 and `left` 1, are all before the first.
        self._cursor = _Cursor(drawn=N + 1 - int(self._record["left"]))
        np.ctypeslib.as_array(self._cursor.words)[:] = self._record["words"]

    def normal(self, address: int, count: int, mean: float, std: float) -> None:
        """What `normal_(mean, std)` makes of a whole tensor of `count` >= MIN_NORMAL elements."""
        if count < MIN_NORMAL:
            raise ValueError(f"{count} normals: the kernel makes {MIN_NORMAL} or more")
        self._library.firstloss_normal(self._cursor, address, count, mean, std, self._width)

    def uniform(self, address: int, count: int, low: float, high: float) -> None:
        """What `uniform_(low, high)` makes of a whole tensor of `count` elements."""
        self._library.firstloss_uniform(self._cursor, address, count, low, high, self._width)

    def normal_bfloat16(self, address: int, count: int, mean: float, std: float) -> None:
        """As `normal`, in bfloat16. PyTorch makes each block of 16 in float32, and then rounds it."""
        if count < MIN_NORMAL:
            raise ValueError(f"{count} normals: the kernel makes {MIN_NORMAL} or more")
        whole = count - count % MIN_NORMAL
        self.columns("normal", [address], [whole], 1, mean, std, bfloat16=True)
        if whole < count:  # the last 16 are drawn again
            self.columns("normal", [address + 2 * (count - MIN_NORMAL)], [MIN_NORMAL], 1, mean, std, bfloat16=True)

    def uniform_bfloat16(self, address: int, count: int, low: float, high: float) -> None:
        """As `uniform`, in bfloat16."""
        self.columns("uniform", [address], [count], 1, low, high, bfloat16=True)

    def uniform_erfinv(
        self, address: int, count: int, low: float, high: float, then: tuple[float, float, float, float], doubt: Doubt
    ) -> int:
        """As `uniform`, then `erfinv_()` and `finish(*then)`, but for those in doubt; returns how many.

        They are written past the cache, and those in doubt are in none of what is written.
        """
        return self._library.firstloss_uniform_erfinv(self._cursor, address, count, low, high, *then, *doubt)

    def normals_outside(self, count: int, mean: float, std: float, low: float, high: float) -> NDArray[np.int32]:
        """Draws `count` normals, a multiple of 16, as `normal` does; returns the indices of those not in [low, high].

        The bounds are float32 numbers.
        """
        self._check_whole(count)
        if self._room is None or len(self._room) < count + SPARE:
            self._room = np.empty(count + SPARE, np.int32)
        found = self._library.firstloss_normals_outside(
            self._cursor, count, mean, std, low, high, self._room.ctypes.data, self._width
        )
        return self._room[:found].copy()

    def normals_at(self, count: int, mean: float, std: float, where: NDArray[np.int32]) -> NDArray[np.float32]:
        """Draws `count` normals, a multiple of 16, as `normal` does; makes those at the ascending indices `where`."""
        self._check_whole(count)
        where = np.ascontiguousarray(where, np.int32)
        out = np.empty(len(where), np.float32)
        self._library.firstloss_normals_at(
            self._cursor, count, mean, std, where.ctypes.data, len(where), out.ctypes.data, self._width
        )
        return out

    @staticmethod
    def _check_whole(count: int) -> None:
        if count % MIN_NORMAL or count >= 1 << 31:
            raise ValueError(f"a selection of {count} normals: the kernel draws a multiple of {MIN_NORMAL} below 2^31")

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
        """Rows of a "normal" or "uniform" fill, cut into parts side by side, each written to its own memory.

        Args:
            out: the parts' addresses; the rows of each lie one after another.
            widths: elements in a row of each part.
            first, second: mean and standard deviation, or low and high; finite for bfloat16.
            bfloat16: whether the elements are that, and not float32.
        """
        count = rows * sum(widths)
        if kind == "normal" and count % MIN_NORMAL:
            raise ValueError(f"{count} normals in columns: the kernel makes a multiple of {MIN_NORMAL}")
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
        """The generator's state here, in the form it was given; a cached normal is still there."""
        record = self._record.copy()
        record["words"] = np.ctypeslib.as_array(self._cursor.words)
        record["next"] = self._cursor.drawn
        record["left"] = N + 1 - self._cursor.drawn
        return build_state(record)
