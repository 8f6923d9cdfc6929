"""Check whether the native kernels give PyTorch's bits, on this machine and with this version of PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch
from ..rng import native

# (operation, count, its two arguments). They include ragged ends, an interval whose end uniforms are rounded up to, and
# enough numbers to detect each FMA: the rarest one changes two normals in ten thousand. Each is small enough for
# PyTorch to compare without starting threads, which would take longer than everything else.
_TRIALS = (
    ("normal", 30_007, 0.0, 1.0),
    ("normal", 16, 0.0, 1.0),
    ("normal", 30_000, 0.0, 1.0),
    ("normal", 30_000, -0.3, 0.02),
    ("uniform", 5_003, 0.0, 1.0),
    ("uniform", 10_000, -0.03, 0.07),
    ("uniform", 3_000, 2.0**23, 2.0**23 + 3),
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
    with torch.no_grad(), DisableTorchDispatch():  # not captured
        generator = torch.Generator().manual_seed(20_261_120)
        torch.empty(77, dtype=torch.int32, device="cpu").random_(generator=generator)
        cursor = native.Cursor(generator.get_state().numpy())
        for kind, count, first, second in _TRIALS:
            ours, theirs = (torch.empty(count, dtype=torch.float32, device="cpu") for _ in range(2))
            getattr(cursor, kind)(ours.data_ptr(), count, first, second)
            getattr(theirs, f"{kind}_")(first, second, generator=generator)
            if not torch.equal(ours.view(torch.int32), theirs.view(torch.int32)):
                return False
        return cursor.state().tobytes() == generator.get_state().numpy().tobytes() and _epilogue_matches()


def _epilogue_matches() -> bool:
    """Whether `native.mul_add_clamp` gives PyTorch's bits, for special values and NaN, too."""
    options: Any = {"dtype": torch.float32, "device": "cpu"}
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-44, -1e-44, 3e38, -2.0, 2.0]
    source = torch.cat([torch.tensor(special, **options), torch.arange(2000.0, **options) / 777 - 1])
    for factor, term, low, high in ((0.3, 0.1, -0.2, 0.25), (1.0, -0.0, -2.0, 0.0), (0.0, 1e-3, float("-inf"), 2.0)):
        theirs = source.clone().mul_(factor).add_(term).clamp_(low, high)
        for offset in (0, 1):  # aligned, and not
            ours = torch.empty(len(source) + 1, **options)[offset : offset + len(source)]
            native.mul_add_clamp(ours.data_ptr(), source.data_ptr(), len(source), factor, term, low, high)
            if not torch.equal(ours.view(torch.int32), theirs.view(torch.int32)):
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
    if not trusted():
        return False
    with torch.no_grad(), DisableTorchDispatch():
        generator = torch.Generator().manual_seed(20_261_123)
        cursor = native.Cursor(generator.get_state().numpy())
        for kind, count, first, second in _TRIALS_BFLOAT16:
            ours, theirs = (torch.empty(count, dtype=torch.bfloat16, device="cpu") for _ in range(2))
            getattr(cursor, f"{kind}_bfloat16")(ours.data_ptr(), count, first, second)
            getattr(theirs, f"{kind}_")(first, second, generator=generator)
            if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
                return False
        return cursor.state().tobytes() == generator.get_state().numpy().tobytes()


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
