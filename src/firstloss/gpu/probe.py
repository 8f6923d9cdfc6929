"""Check which kernels give PyTorch's bits, on this device and with this version of PyTorch.

PyTorch may change layouts, math functions and precisions. So no kernel is used before a few hundred thousand of its
numbers have been compared with PyTorch's, bit for bit, on the device. Where they differ, PyTorch's kernel is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from .. import timeline
from ..compat.cpu_fills import rounds_single
from ..compat.torch_names import DisableTorchDispatch
from ..program.graph import dtype_name
from ..rng import cuda_layout, words_drawn
from ..rng.stream import Stream
from . import cpu_stream, cuda_stream
from .fill_slices import Slice
from .kernels import CudaLauncher, Launcher

_SEED = 20_261_122
# (numel, parameters as a uniform, as a normal): ragged ends, an interval whose end uniforms are rounded up to.
_CPU_TRIALS = ((16, (0.0, 1.0), (0.0, 1.0)), (30_007, (-0.03, 0.07), (0.25, 0.02)), (100_000, (2.0, 3.0), (0.0, 1.0)))
_CPU: dict[str, Any] = {"device": "cpu"}  # overrides the default device


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.itemsize]
    return torch.equal(a.view(kind), b.view(kind))


@cache
def uniform_bits(dtype: torch.dtype) -> int:
    """How many bits of a word this PyTorch uses for a uniform on the CPU; 0 if unknown."""
    if dtype == torch.float64:
        return 53
    with torch.no_grad(), DisableTorchDispatch():
        generator = torch.Generator().manual_seed(_SEED)
        words = torch.empty(4096, dtype=torch.int32, **_CPU).random_(0, 1 << 24, generator=generator)
        actual = torch.empty(4096, dtype=dtype, **_CPU).uniform_(generator=generator.manual_seed(_SEED)).float()
        for bits in (24, 11, 8):
            expected = ((words % (1 << bits)).float() * 2.0**-bits).to(dtype).float()
            expected[expected == 1] = 0
            if torch.equal(expected, actual):
                return bits
    return 0


@cache
def cpu_type_is_supported(name: str, dtype: torch.dtype) -> bool:
    """Whether this PyTorch's CPU kernels use the algorithm of the GPU kernels, as far as can be checked on the CPU."""
    if name == "uniform":
        return uniform_bits(dtype) > 0
    if dtype in (torch.float32, torch.float64):
        return dtype == torch.float32
    return rounds_single("normal", dtype)  # not before torch 2.12


def _drawn_on_the_cpu(name: str, dtype: torch.dtype, launcher: Launcher) -> bool:
    """Whether the kernel gives the bits of PyTorch's fills on the CPU."""
    generator = torch.Generator().manual_seed(_SEED)
    torch.empty(77, dtype=torch.int32, **_CPU).random_(generator=generator)
    stream, begin = Stream.from_state(generator.get_state().numpy()), 0
    pieces, pairs = [], []
    for numel, of_uniform, of_normal in _CPU_TRIALS:
        pair = of_uniform if name == "uniform" else of_normal
        expected = torch.empty(numel, dtype=dtype, **_CPU)
        getattr(expected, f"{name}_")(*pair, generator=generator)
        drawn = words_drawn.draw(name, dtype_name(dtype), numel)
        assert drawn is not None
        for wanted in (Slice(0, numel), Slice(numel // 3, numel // 2)):
            actual = torch.full((wanted.numel,), float("nan"), dtype=dtype, device=launcher.device)
            bits = uniform_bits(dtype)
            pieces.append(cpu_stream.CpuPiece(stream, begin, name, numel, dtype, pair, wanted, actual.data_ptr(), bits))
            pairs.append((expected[wanted.low : wanted.high], actual))
        begin += drawn.words
    cpu_stream.fill(pieces, launcher, 13)
    return all(_same_bits(expected, actual.cpu()) for expected, actual in pairs)


@cache
def cpu_bits(device: int, name: str, dtype: torch.dtype) -> bool:
    """Whether this GPU makes such fills with the CPU's bits."""
    if not cpu_stream.can_make(name, 1 << 20, dtype) or not cpu_type_is_supported(name, dtype):
        return False
    return _tried(lambda: _drawn_on_the_cpu(name, dtype, CudaLauncher(device)), f"the CPU's {dtype} {name} on a GPU")


def geometry(device: int) -> cuda_layout.GpuProperties:
    """The properties of a GPU that determine the layout of its fills."""
    properties = torch.cuda.get_device_properties(device)
    return cuda_layout.GpuProperties(properties.multi_processor_count, properties.max_threads_per_multi_processor)


def cuda_trials(gpu: cuda_layout.GpuProperties) -> tuple[int, ...]:
    """Sizes of fills to try: less than a block, one number per thread, more than one, all four, several iterations."""
    resident = 256 * gpu.multi_processor_count * (gpu.max_threads_per_multi_processor // 256)
    return (1, 1000, resident // 3, resident, resident + 1, 4 * resident + 77, 9 * resident + 5)


@cache
def cuda_layout_of(device: int, name: str, dtype: torch.dtype) -> str | None:
    """The layout of PyTorch's fills on this GPU: "by block" or "by lane"; None if it is neither.

    Compares values, too: a layout may change without a change of the generator's offset.
    """
    if not cuda_stream.can_make(name, 1 << 20, dtype):
        return None
    for layout in ("by block", "by lane"):
        trial = partial(_drawn_on_the_gpu, name, dtype, device, layout == "by lane")
        if _tried(trial, f"CUDA's {dtype} {name}, laid out {layout}"):
            return layout
    return None


def _drawn_on_the_gpu(name: str, dtype: torch.dtype, device: int, by_lane: bool) -> bool:
    launcher, gpu = CudaLauncher(device), geometry(device)
    generator = torch.Generator(launcher.device).manual_seed(_SEED)
    pieces, pairs = [], []
    for numel, pair in zip(cuda_trials(gpu), itertools.cycle([(0.0, 1.0), (-0.03, 0.07), (0.5, 2.0)]), strict=False):
        offset = generator.get_offset()
        expected = torch.empty(numel, dtype=dtype, device=launcher.device)
        getattr(expected, f"{name}_")(*pair, generator=generator)
        after = cuda_layout.advance(numel, gpu, offset, dtype_name(dtype), by_lane)
        if generator.get_offset() != after:
            return False
        for wanted in {Slice(0, numel), Slice(numel // 3, max(numel // 2, numel // 3 + 1))}:
            actual = torch.full((wanted.numel,), float("nan"), dtype=dtype, device=launcher.device)
            pieces.append(cuda_stream.CudaPiece(_SEED, offset, name, numel, dtype, pair, wanted, actual.data_ptr()))
            pairs.append((expected[wanted.low : wanted.high], actual))
    cuda_stream.fill(pieces, launcher, gpu, by_lane)
    return all(_same_bits(expected, actual) for expected, actual in pairs)


# Why a kernel is not used, by its description: `python -m benchmarks.gpu` prints it.
refused: dict[str, str] = {}


def _tried(trial: Callable[[], bool], what: str) -> bool:
    try:
        with torch.no_grad(), DisableTorchDispatch(), timeline.span("probe"):
            same = trial()
        if not same:
            refused[what] = "other bits than PyTorch's"
        return same
    except Exception as error:  # no compiler, driver or memory: fall back to PyTorch's kernels
        refused[what] = str(error)
        return False
