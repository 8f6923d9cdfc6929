"""Stream samplers: fill tensors with uniforms and normals from a position of a random stream on.

They use PyTorch's kernel, or a native one where it gives the same bits, which is checked once (`trusted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..compat.torch_names import DisableTorchDispatch
from ..errors import MaterializeError
from ..program.node_kinds import with_generator
from ..rng import native
from ..rng.counter_stream import CounterStream
from ..rng.stream import Position, Stream
from . import counter_fill

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
    valid = -_FLOAT32_MAX <= first <= second <= _FLOAT32_MAX and second - first <= _FLOAT32_MAX
    return valid and (end_matches() or not native.may_round_to_end(first, second))


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


# (operation, count, its two arguments). They include ragged ends, and enough numbers to detect each FMA: the rarest one
# changes two normals in ten thousand. Each is small enough for PyTorch to compare without starting threads, which would
# take longer than everything else.
_TRIALS = (
    ("normal", 30_007, 0.0, 1.0),
    ("normal", 16, 0.0, 1.0),
    ("normal", 30_000, 0.0, 1.0),
    ("normal", 30_000, -0.3, 0.02),
    ("uniform", 5_003, 0.0, 1.0),
    ("uniform", 10_000, -0.03, 0.07),
    ("normal", 1_003, 5.0, 1e-3),
)


@cache
def trusted() -> bool:
    """Whether the native kernels may replace PyTorch's. Tested once per process, in 2 ms.

    PyTorch's kernels depend on its version, its compiler, the CPU and the environment (ATEN_CPU_CAPABILITY). Instead of
    checking these, compare: both kernels must give the same bits and leave the generator in the same state.
    """
    if not native.available():
        return False
    return _trials_match(_TRIALS, torch.float32, 20_261_120) and _epilogue_matches()


# An interval whose end uniforms are rounded up to.
_TRIAL_OF_THE_END = ("uniform", 3_000, 2.0**23, 2.0**23 + 3)


@cache
def end_matches() -> bool:
    """Whether the native uniforms are PyTorch's, too, where they round up to the end of the interval.

    PyTorch before 2.12 keeps the end, which the native kernel replaces by the beginning.
    """
    return trusted() and _trials_match([_TRIAL_OF_THE_END], torch.float32, 20_261_125)


def _trials_match(trials: Sequence[tuple[str, int, float, float]], dtype: torch.dtype, seed: int) -> bool:
    """Whether the native kernels and PyTorch's, one trial after the other, give the same bits and the same state."""
    suffix, integers = ("_bfloat16", torch.int16) if dtype == torch.bfloat16 else ("", torch.int32)
    with torch.no_grad(), DisableTorchDispatch():  # not captured
        generator = torch.Generator().manual_seed(seed)
        torch.empty(77, dtype=torch.int32, device="cpu").random_(generator=generator)
        cursor = native.Cursor(generator.get_state().numpy())
        for kind, count, first, second in trials:
            actual, expected = (torch.empty(count, dtype=dtype, device="cpu") for _ in range(2))
            getattr(cursor, f"{kind}{suffix}")(actual.data_ptr(), count, first, second)
            getattr(expected, f"{kind}_")(first, second, generator=generator)
            if not torch.equal(actual.view(integers), expected.view(integers)):
                return False
        return cursor.state().tobytes() == generator.get_state().numpy().tobytes()


def _epilogue_matches() -> bool:
    """Whether `native.mul_add_clamp` gives PyTorch's bits, for special values and NaN, too."""
    options: Any = {"dtype": torch.float32, "device": "cpu"}
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-44, -1e-44, 3e38, -2.0, 2.0]
    source = torch.cat([torch.tensor(special, **options), torch.arange(2000.0, **options) / 777 - 1])
    for factor, term, low, high in ((0.3, 0.1, -0.2, 0.25), (1.0, -0.0, -2.0, 0.0), (0.0, 1e-3, float("-inf"), 2.0)):
        expected = source.clone().mul_(factor).add_(term).clamp_(low, high)
        for offset in (0, 1):  # aligned, and not
            actual = torch.empty(len(source) + 1, **options)[offset : offset + len(source)]
            native.mul_add_clamp(actual.data_ptr(), source.data_ptr(), len(source), factor, term, low, high)
            if not torch.equal(actual.view(torch.int32), expected.view(torch.int32)):
                return False
    return True


# Likewise for bfloat16. There are enough uniforms that some are rounded up to the end of the interval.
_TRIALS_BFLOAT16 = (
    ("normal", 30_007, 0.0, 1.0),
    ("normal", 20_000, -0.3, 0.02),
    ("uniform", 10_003, 0.0, 1.0),
    ("uniform", 10_000, -0.02, 0.03),
    ("uniform", 3_000, 1.0, 1.01),
    ("normal", 1_003, 5.0, 1e-3),
)


@cache
def bfloat16_trusted() -> bool:
    """Whether the native kernels may replace PyTorch's for bfloat16, too. Tested once per process, in 1 ms.

    PyTorch before 2.12 draws and rounds differently.
    """
    return trusted() and _trials_match(_TRIALS_BFLOAT16, torch.bfloat16, 20_261_123)


# The margin of `native.HardCases`: twice what is enough for the math library in PyTorch's builds, on all 2^24 uniforms
# of (-1, 1) (`tests/rng/test_erfinv.py`).
ROUNDING_MARGIN = 1 / 128


@cache
def erfinv_trusted() -> bool:
    """Whether the native inverse error function may replace PyTorch's. Tested once per process, in 1 ms.

    PyTorch's comes from a math library, which depends on the CPU. It must be twice as accurate as the kernel assumes,
    at a hundred thousand numbers, which almost certainly detects one that is less accurate in a sixtieth of the range.
    """
    if not (native.has_erfinv() and trusted()):
        return False
    with torch.no_grad(), DisableTorchDispatch():
        options: Any = {"dtype": torch.float32, "device": "cpu"}
        generator = torch.Generator().manual_seed(20_261_121)
        even = torch.empty(100_000, **options).uniform_(-1, 1, generator=generator)
        tails = 1 - torch.exp2(-torch.empty(10_000, **options).uniform_(1, 24, generator=generator))
        special = torch.tensor([0.0, -0.0, 1e-44, -1e-30, 1.0, -1.0, 1.5, float("inf"), float("nan")], **options)
        numbers = torch.cat([even, tails, -tails[:100], special])
        expected = torch.cat([part.erfinv() for part in numbers.split(1 << 15)])  # PyTorch starts no threads
        buffers = HardCaseBuffers(len(numbers))
        count = native.erfinv(numbers.data_ptr(), len(numbers), buffers.hard_cases(ROUNDING_MARGIN / 2))
        buffers.arguments[:count].erfinv_()
        native.scatter(numbers.data_ptr(), buffers.hard_cases(ROUNDING_MARGIN / 2), count)
        return count < len(numbers) // 2 and torch.equal(numbers.view(torch.int32), expected.view(torch.int32))


class HardCaseBuffers:
    """Buffers for the arguments and indices of the hard cases among `count` numbers (see `native.HardCases`)."""

    def __init__(self, count: int) -> None:
        self.arguments = torch.empty(count + native.PADDING, dtype=torch.float32, device="cpu")
        self.indices = torch.empty(count + native.PADDING, dtype=torch.int32, device="cpu")

    def hard_cases(self, margin: float = ROUNDING_MARGIN) -> native.HardCases:
        """The argument of the native kernels."""
        return native.HardCases(margin, self.arguments.data_ptr(), self.indices.data_ptr())
