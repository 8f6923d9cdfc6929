"""Stream samplers: fill tensors with uniforms and normals from a position of a random stream on.

They use PyTorch's kernel, or a native one that is known to give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import MaterializeError
from ..program.schemas import with_generator
from ..rng import native
from ..rng.counter_stream import CounterStream
from ..rng.stream import Position, Stream
from . import counter_fill
from .native_check import HardCaseBuffers, bfloat16_trusted, erfinv_trusted, trusted

_UNTHREADED = 1 << 15  # up to this many elements PyTorch starts no threads, which would oversubscribe the cores
_FLOAT32_MAX = torch.finfo(torch.float32).max
_BFLOAT16_MAX = torch.finfo(torch.bfloat16).max


class StreamSampler:
    """Fills tensors from a stream, without a jump between adjacent fills. Not thread-safe.

    A fill is "uniform" (low, high) or "normal" (mean, std).

    Attributes:
        at: the position in the stream; None if unknown.
    """

    def __init__(self) -> None:
        self.at: tuple[Stream, Position] | None = None
        self._generator = torch.Generator()
        self._cursor: native.Cursor | None = None  # if set, it has the position instead of the generator
        self._counter: tuple[CounterStream, Position] | None = None  # likewise
        self._hard_case_buffers: HardCaseBuffers | None = None  # reused

    def seek(self, stream: Stream, position: Position) -> None:
        """Move to a position; free if the sampler is already there."""
        if isinstance(stream, CounterStream):
            self._counter = self.at = stream, position
        elif self.at != (stream, position):
            self._counter = None
            self._generator.set_state(torch.from_numpy(stream.state_at(position)))
            self._cursor = None
            self.at = (stream, position)

    def fill(self, name: str, target: torch.Tensor, first: float, second: float) -> None:
        """Fill `target`. The caller has to set `at` to the position after it."""
        self.at = None
        if self._counter is not None:
            counter_fill.fill(name, target, first, second, *self._counter)
            stream, position = self._counter
            self._counter = stream, Position(position.words + counter_fill.words_of(target.numel(), target.dtype))
        elif is_native(name, target, first, second):
            cursor = self._native()
            if target.dtype == torch.bfloat16:
                kernel = cursor.normal_bfloat16 if name == "normal" else cursor.uniform_bfloat16
            else:
                kernel = cursor.normal if name == "normal" else cursor.uniform
            kernel(target.data_ptr(), target.numel(), first, second)
        else:
            if self._cursor is not None:
                self._generator.set_state(torch.from_numpy(self._cursor.state()))
                self._cursor = None
            fill_with(name, target, first, second, self._generator)

    def fill_erfinv(
        self, target: torch.Tensor, low: float, high: float, epilogue: tuple[float, float, float, float]
    ) -> None:
        """`fill` with uniforms, `erfinv_()` and `native.mul_add_clamp` in one pass; requires `has_erfinv`."""
        self.at = None
        count = target.numel()
        buffers = self._hard_case_buffers
        if buffers is None or buffers.arguments.numel() < count + native.PADDING:
            buffers = self._hard_case_buffers = HardCaseBuffers(count)
        hard_cases = buffers.hard_cases()
        count_left = self._native().uniform_erfinv(target.data_ptr(), count, low, high, epilogue, hard_cases)
        arguments = buffers.arguments[:count_left]
        for part in arguments.split(_UNTHREADED):
            part.erfinv_()
        native.mul_add_clamp(arguments.data_ptr(), arguments.data_ptr(), count_left, *epilogue)
        native.scatter(target.data_ptr(), hard_cases, count_left)

    def fill_columns(self, name: str, rows: int, parts: Sequence[torch.Tensor], first: float, second: float) -> bool:
        """Like `fill`, of `rows` rows that are split by columns into `parts`, each contiguous.

        Returns:
            Whether there is a kernel for it; otherwise nothing has been drawn.
        """
        if self._counter is not None or not native.available():
            return False
        if not all(is_native(name, part, first, second) for part in parts):
            return False
        self.at = None
        widths = [part.numel() // rows for part in parts]
        bfloat16 = parts[0].dtype == torch.bfloat16
        self._native().columns(name, [part.data_ptr() for part in parts], widths, rows, first, second, bfloat16)
        return True

    def has_selection(self, count: int, dtype: torch.dtype) -> bool:
        """Whether `normals_outside` and `normals_at` support this many normals, not at the ragged end of a fill."""
        whole = dtype == torch.float32 and count % native.MIN_NORMAL == 0 and count < 1 << 31
        return whole and self._counter is None and trusted()

    def normals_outside(self, count: int, mean: float, std: float, low: float, high: float) -> NDArray[np.int32]:
        """Draw normals, and return the ascending indices of those outside [low, high]."""
        self.at = None
        return self._native().normals_outside(count, mean, std, low, high)

    def normals_at(self, count: int, mean: float, std: float, indices: NDArray[np.int32]) -> NDArray[np.float32]:
        """Draw normals, and return those at `indices`, which must be ascending."""
        self.at = None
        return self._native().normals_at(count, mean, std, indices)

    def _native(self) -> native.Cursor:
        if self._cursor is None:
            self._cursor = native.Cursor(self._generator.get_state().numpy())
        return self._cursor


def has_erfinv(stream: Stream, name: str, target: torch.Tensor, first: float, second: float) -> bool:
    """Whether `fill_erfinv` supports this fill of `target`, and its parts."""
    return (
        name == "uniform"
        and target.dtype == torch.float32
        and not isinstance(stream, CounterStream)
        and target.numel() < (1 << 31) - native.PADDING
        and is_native(name, target, first, second)
        and erfinv_trusted()
    )


def is_native(name: str, target: torch.Tensor, first: float, second: float) -> bool:
    """Whether a native kernel makes this fill."""
    if (
        target.dtype not in (torch.float32, torch.bfloat16)
        or target.device.type != "cpu"
        or target.numel() < native.MIN_NORMAL
        or not target.is_contiguous()
        or type(target) is not torch.Tensor
        or not trusted()
    ):
        return False
    if target.dtype == torch.bfloat16:
        # The kernel cannot round NaN. Arguments that `uniform_` rejects, or overflowing normals, are left to PyTorch.
        within = all(-_BFLOAT16_MAX <= number <= _BFLOAT16_MAX for number in (first, second))
        return (
            bfloat16_trusted()
            and within
            and (second >= 0 if name == "normal" else 0 <= second - first <= _BFLOAT16_MAX)
        )
    # Invalid arguments are left to PyTorch, for its error.
    if name == "normal":
        return first == first and second >= 0
    return -_FLOAT32_MAX <= first <= second <= _FLOAT32_MAX and second - first <= _FLOAT32_MAX


def fill_with(name: str, target: torch.Tensor, first: float, second: float, generator: torch.Generator) -> None:
    """Fill `target` with PyTorch's kernel."""
    if name == "normal":
        target.normal_(first, second, generator=generator)
    else:
        target.uniform_(first, second, generator=generator)


def call_with(op: Any, args: Sequence[Any], kwargs: dict[str, Any], generator: torch.Generator) -> Any:
    """Call a random operation with `generator` instead of its own or the global one.

    Raises:
        MaterializeError: if it has no overload that takes a generator.
    """
    overload = with_generator(op)
    if overload is None:
        raise MaterializeError(f"{op} takes no generator, so it cannot draw from a recorded stream position")
    return overload(*args, **{**kwargs, "generator": generator})
