"""The layout of CUDA fills: which words of PyTorch's CUDA random stream each element is computed from.

The CUDA generator is a seed and an offset into Philox streams, one (`subsequence`) for each thread of a launch. A fill
launches blocks of 256 threads, as many as fit on the device or as the fill needs. Each thread strides over the tensor,
draws one Philox block of four words at a time, and computes two or four elements from it. So the words of an element
depend on the fill's size and on the device.
Source: `calc_execution_policy`, `distribution_nullary_kernel` and `distribution_elementwise_grid_stride_kernel` in
ATen/native/cuda/DistributionTemplates.h of torch 2.11 to 2.13, and `TensorIteratorBase::with_32bit_indexing` for fills
that one launch cannot index; cuRAND's `curand_init` for how subsequence and offset make a counter. PyTorch's pull
request 194828 would launch as many blocks as the fill needs at two or four elements per thread (`by_lane`).
"""

from __future__ import annotations

from typing import NamedTuple

from firstloss.rng import philox

_THREADS = 256  # in a block
_WORDS = 4  # in a Philox block; offsets count words
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_INDEXABLE = (1 << 31) - 1  # bytes, and elements, that one launch can fill: its indices have 32 bits


class GpuProperties(NamedTuple):
    """The properties of a GPU that determine the layout: see `torch.cuda.get_device_properties`."""

    multi_processor_count: int
    max_threads_per_multi_processor: int


class ElementPosition(NamedTuple):
    """The random number of an element.

    subsequence: the thread's Philox stream.
    offset: the beginning of the element's Philox block in that stream, in words: a multiple of four.
    lane: the number's index in the block: 0 to 3, or 0 to 1 if a block yields two.
    """

    subsequence: int
    offset: int
    lane: int


class KernelLaunch(NamedTuple):
    """One kernel launch of a fill.

    begin, numel: the elements that it fills.
    offset: the offset in each thread's stream at which it begins to draw.
    threads: the number of threads in all blocks.
    lanes: elements per Philox block.
    """

    begin: int
    numel: int
    offset: int
    threads: int
    lanes: int


def launches(
    numel: int, device: GpuProperties, offset: int = 0, dtype: str = "float32", by_lane: bool = False
) -> list[KernelLaunch]:
    """The launches of a `uniform_` or `normal_` fill of `numel` contiguous elements, beginning at `offset`.

    A fill that needs more than 32-bit indices is halved until it does not. The offsets that it would have drawn as a
    whole are skipped first: the kernel reserves them before it recurses.

    Args:
        by_lane: the layout of pull request 194828.
    """
    if numel == 0:
        return []
    lanes = _lanes(dtype)
    parts = _parts(0, numel, _BYTES[dtype])
    if len(parts) > 1:
        offset += _reserved(numel, _threads(numel, device, lanes if by_lane else 1), lanes)
    kernel_launches = []
    for begin, count in parts:
        threads = _threads(count, device, lanes if by_lane else 1)
        kernel_launches.append(KernelLaunch(begin, count, offset, threads, lanes))
        offset += _reserved(count, threads, lanes)
    return kernel_launches


def element_position(
    element: int, numel: int, device: GpuProperties, offset: int = 0, dtype: str = "float32", by_lane: bool = False
) -> ElementPosition:
    """The random number of element `element` of a `uniform_` or `normal_` fill of `numel` elements."""
    if not 0 <= element < numel:
        raise IndexError(f"element {element} of a fill of {numel}")
    launch = next(x for x in launches(numel, device, offset, dtype, by_lane) if element < x.begin + x.numel)
    iteration, thread = divmod(element - launch.begin, launch.threads)
    block, lane = divmod(iteration, launch.lanes)
    return ElementPosition(thread, launch.offset + _WORDS * block, lane)


def advance(numel: int, device: GpuProperties, offset: int = 0, dtype: str = "float32", by_lane: bool = False) -> int:
    """The generator's offset after a fill of `numel` elements that began at `offset`."""
    if numel == 0:
        return offset
    last = launches(numel, device, offset, dtype, by_lane)[-1]
    return last.offset + _reserved(last.numel, last.threads, last.lanes)


def words(seed: int, subsequence: int, offset: int) -> philox.Words:
    """The Philox block at `offset` of a thread's stream: uint32, shape (4,)."""
    if offset % _WORDS:
        raise ValueError(f"offset {offset} must be a multiple of {_WORDS}, the words in a Philox block")
    return philox.words(seed, offset // _WORDS, subsequence)


def _lanes(dtype: str) -> int:
    """Elements per Philox block: two doubles or four floats. Half precision is drawn as float."""
    return 2 if dtype == "float64" else 4


def _threads(numel: int, device: GpuProperties, lanes: int) -> int:
    """The number of threads of a launch, given the elements per thread that the number of blocks is computed for."""
    resident = device.multi_processor_count * (device.max_threads_per_multi_processor // _THREADS)
    return _THREADS * min(resident, -(-numel // (_THREADS * lanes)))


def _reserved(numel: int, threads: int, lanes: int) -> int:
    """How far a launch advances the generator's offset."""
    return _WORDS * -(-numel // (threads * lanes))


def _parts(begin: int, numel: int, size: int) -> list[tuple[int, int]]:
    """The (begin, count) of the elements of each launch, in order."""
    if numel <= _INDEXABLE and 1 + (numel - 1) * size <= _INDEXABLE:
        return [(begin, numel)]
    half = numel // 2
    return [*_parts(begin, half, size), *_parts(begin + half, numel - half, size)]
