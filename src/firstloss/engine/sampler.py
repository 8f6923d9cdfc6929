"""Drawing from a stream, one fill or piece of a fill after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..rng import native
from ..rng.counter_stream import CounterStream
from ..rng.stream import Position, Stream
from . import counter_fill
from .native_check import Doubtful, erfinv_trusted, trusted

aten = torch.ops.aten

_ALONE = 1 << 15  # elements of which PyTorch starts no threads, which would be more than there are cores
_FLOAT32_MAX = torch.finfo(torch.float32).max
# The arguments of what has a native kernel, and their defaults.
_ARGUMENTS = {
    aten.normal_.default: {"mean": 0.0, "std": 1.0},
    aten.uniform_.default: {"from": 0.0, "to": 1.0},
}


class Pen:
    """Writes what a stream has at its place into tensors; goes on from there without a jump. One thread at a time.

    It writes with PyTorch's kernels, or with native ones where those are known to write the same.

    Attributes:
        at: where it is; None when that is not known.
    """

    def __init__(self) -> None:
        self.at: tuple[Stream, Position] | None = None
        self._generator = torch.Generator()
        self._cursor: native.Cursor | None = None  # if there is one, it is where we are, and the generator is not
        self._counter: tuple[CounterStream, Position] | None = None  # likewise
        self._doubtful: Doubtful | None = None  # room that is kept from draw to draw

    def move(self, stream: Stream, position: Position) -> None:
        """Go to a position, unless the pen is there."""
        if isinstance(stream, CounterStream):
            self._counter = self.at = stream, position
        elif self.at != (stream, position):
            self._counter = None
            self._generator.set_state(torch.from_numpy(stream.state_at(position)))
            self._cursor = None
            self.at = (stream, position)

    def draw(self, op: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run the random operation in place on `target`. Its caller knows how far that moves, and sets `at`."""
        self.at = None
        if self._counter is not None:
            self._count(op, target, args, kwargs, *self._counter)
            return
        numbers = _numbers(op, target, args, kwargs)
        if numbers is None:
            if self._cursor is not None:
                self._generator.set_state(torch.from_numpy(self._cursor.state()))
                self._cursor = None
            draw(op, [target, *args], dict(kwargs), self._generator)
            return
        cursor = self._native()
        kernel = cursor.normal if op is aten.normal_.default else cursor.uniform
        kernel(target.data_ptr(), target.numel(), *numbers)

    def has_erfinv(self, op: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether there is a kernel for this draw, of target or parts of it, with `erfinv_()` behind it."""
        return (
            op is aten.uniform_.default
            and self._counter is None
            and target.numel() < (1 << 31) - native.SPARE
            and is_native(op, target, args, kwargs)
            and erfinv_trusted()
        )

    def draw_erfinv(
        self,
        target: torch.Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        finish: tuple[float, float, float, float],
    ) -> None:
        """As `draw` of `uniform_`, then `erfinv_()` and `native.finish`, in one go, where `has_erfinv`."""
        numbers = _numbers(aten.uniform_.default, target, args, kwargs)
        assert numbers is not None
        self.at = None
        count = target.numel()
        room = self._doubtful
        if room is None or room.left.numel() < count + native.SPARE:
            room = self._doubtful = Doubtful(count)
        doubt = room.within()
        open_ = self._native().uniform_erfinv(target.data_ptr(), count, *numbers, finish, doubt)
        left = room.left[:open_]
        for part in left.split(_ALONE):
            part.erfinv_()
        native.finish(left.data_ptr(), left.data_ptr(), open_, *finish)
        native.put(target.data_ptr(), doubt, open_)

    def has_selection(self, count: int, dtype: torch.dtype) -> bool:
        """Whether the next two are there, for so many normals that are not their fill's end."""
        whole = dtype == torch.float32 and count % native.MIN_NORMAL == 0 and count < 1 << 31
        return whole and self._counter is None and native.has_selection() and trusted()

    def normals_outside(self, count: int, mean: float, std: float, low: float, high: float) -> NDArray[np.int32]:
        """As `draw` of `normal_`, but only says which are not in [low, high]: their indices, in ascending order."""
        self.at = None
        return self._native().normals_outside(count, mean, std, low, high)

    def normals_at(self, count: int, mean: float, std: float, where: NDArray[np.int32]) -> NDArray[np.float32]:
        """As `draw` of `normal_`, but only makes those at the ascending indices `where`."""
        self.at = None
        return self._native().normals_at(count, mean, std, where)

    def _native(self) -> native.Cursor:
        if self._cursor is None:
            self._cursor = native.Cursor(self._generator.get_state().numpy())
        return self._cursor

    def draw_columns(
        self, op: Any, rows: int, parts: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bool:
        """As `draw`, of so many rows that are cut into `parts` side by side; the rows of each lie one after another.

        Returns:
            Whether there is a kernel for it; if not, nothing has been drawn.
        """
        numbers = [_numbers(op, part, args, kwargs) for part in parts]
        if self._counter is not None or None in numbers or not native.has_columns():
            return False
        assert numbers[0] is not None
        self.at = None
        kind = "normal" if op is aten.normal_.default else "uniform"
        widths = [part.numel() // rows for part in parts]
        self._native().columns(kind, [part.data_ptr() for part in parts], widths, rows, *numbers[0])
        return True

    def _count(
        self, op: Any, target: torch.Tensor, args: Any, kwargs: Any, stream: CounterStream, position: Position
    ) -> None:
        everything = [target, *args]
        counter_fill.run(op, everything, kwargs, stream, position, lambda g: draw(op, everything, dict(kwargs), g))
        words = counter_fill.words_of(target.numel(), target.dtype)
        self._counter = stream, Position(position.words + words)


def is_native(op: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a pen draws this with a native kernel. Those gain nothing from pieces that fit into a cache."""
    return _numbers(op, target, args, kwargs) is not None


def _numbers(
    op: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float, float] | None:
    """The two arguments of the native kernel that does this; None if there is none."""
    names = _ARGUMENTS.get(op)
    if (
        names is None
        or target.dtype != torch.float32
        or target.device.type != "cpu"
        or target.numel() < native.MIN_NORMAL
        or not target.is_contiguous()
        or type(target) is not torch.Tensor
        or not trusted()
    ):
        return None
    given = {**names, **dict(zip(names, args, strict=False)), **kwargs}
    first, second = (float(given[name]) for name in names)
    # What PyTorch refuses is left to it, for the error.
    if op is aten.normal_.default:
        valid = first == first and second >= 0
    else:
        valid = -_FLOAT32_MAX <= first <= second <= _FLOAT32_MAX and second - first <= _FLOAT32_MAX
    return (first, second) if valid else None


def draw(op: Any, args: list, kwargs: dict, generator: torch.Generator) -> Any:
    """Call a random operation with `generator` in the place of its own, or of the global one."""
    if any(a.name == "generator" for a in op._schema.arguments):
        return op(*args, **{**kwargs, "generator": generator})
    # The overload has no generator argument (torch.rand and friends): its twin with one draws the same.
    twin = getattr(op.overloadpacket, "generator", None)
    if twin is not None and op._overloadname == "default":
        return twin(*args, **{**kwargs, "generator": generator})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.set_state(generator.get_state())
        result = op(*args, **kwargs)
        generator.set_state(torch.default_generator.get_state())
    return result
