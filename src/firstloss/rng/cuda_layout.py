"""Which words of PyTorch's CUDA random stream each element of a fill is made from.

The CUDA generator is a seed and an offset into Philox streams, one stream (`subsequence`) for each thread of a launch.
A fill launches blocks of 256 threads, as many as the device keeps resident or the fill needs; each thread strides over
the tensor, takes one Philox block of four words at a time, and makes two or four elements of it. So which words an
element gets depends on the fill's size and on the device.
Source: `calc_execution_policy`, `distribution_nullary_kernel` and `distribution_elementwise_grid_stride_kernel` in
ATen/native/cuda/DistributionTemplates.h of torch 2.11 to 2.13, and `TensorIteratorBase::with_32bit_indexing` for fills
that one launch cannot index; cuRAND's `curand_init` for how subsequence and offset make a counter. PyTorch's pull
request 194828 would launch as many blocks as the fill needs of so many numbers each (`by_lane`).
"""

from __future__ import annotations

from typing import NamedTuple

from firstloss.rng import philox

_THREADS = 256  # in a block
_WORDS = 4  # in a Philox block; offsets count words
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_REACH = (1 << 31) - 1  # bytes that one launch fills, and elements: its indices have 32 bits


class GpuProperties(NamedTuple):
    """What of a GPU decides the layout: see `torch.cuda.get_device_properties`."""

    multi_processor_count: int
    max_threads_per_multi_processor: int


class Place(NamedTuple):
    """Where an element's random number is.

    subsequence: the thread's Philox stream.
    offset: in that stream, in words, where the element's Philox block begins: a multiple of four.
    lane: which of the block's numbers it is: 0 to 3, or 0 and 1 where a block makes two.
    """

    subsequence: int
    offset: int
    lane: int


class KernelLaunch(NamedTuple):
    """One launch of a fill.

    begin, numel: the elements that it makes.
    offset: where in the stream of each thread it begins to draw.
    threads: all blocks' together. lanes: elements made of a Philox block.
    """

    begin: int
    numel: int
    offset: int
    threads: int
    lanes: int


def launches(
    numel: int, device: GpuProperties, offset: int = 0, dtype: str = "float32", by_lane: bool = False
) -> list[KernelLaunch]:
    """What PyTorch launches for a `uniform_` or `normal_` fill of `numel` contiguous elements begun at `offset`.

    A fill that 32 bits do not index is halved until they do. What it would have drawn as a whole is skipped before the
    first part: the kernel reserves that and then calls itself.

    Args:
        by_lane: the layout of pull request 194828.
    """
    if numel == 0:
        return []
    lanes = _lanes(dtype)
    parts = _parts(0, numel, _BYTES[dtype])
    if len(parts) > 1:
        offset += _reserved(numel, _threads(numel, device, lanes if by_lane else 1), lanes)
    found = []
    for begin, count in parts:
        threads = _threads(count, device, lanes if by_lane else 1)
        found.append(KernelLaunch(begin, count, offset, threads, lanes))
        offset += _reserved(count, threads, lanes)
    return found


def place(
    element: int, numel: int, device: GpuProperties, offset: int = 0, dtype: str = "float32", by_lane: bool = False
) -> Place:
    """Where element `element` of a `uniform_` or `normal_` fill of `numel` comes from, begun at `offset`."""
    if not 0 <= element < numel:
        raise IndexError(f"element {element} of a fill of {numel}")
    launch = next(x for x in launches(numel, device, offset, dtype, by_lane) if element < x.begin + x.numel)
    turn, thread = divmod(element - launch.begin, launch.threads)
    block, lane = divmod(turn, launch.lanes)
    return Place(thread, launch.offset + _WORDS * block, lane)


def advance(numel: int, device: GpuProperties, offset: int = 0, dtype: str = "float32", by_lane: bool = False) -> int:
    """The generator's offset after a fill of `numel` elements begun at `offset`."""
    if numel == 0:
        return offset
    last = launches(numel, device, offset, dtype, by_lane)[-1]
    return last.offset + _reserved(last.numel, last.threads, last.lanes)


def words(seed: int, subsequence: int, offset: int) -> philox.Words:
    """The Philox block at `offset` of a thread's stream: uint32, shape (4,)."""
    if offset % _WORDS:
        raise ValueError(f"offset {offset} is within a block; PyTorch's are multiples of {_WORDS}")
    return philox.words(seed, offset // _WORDS, subsequence)


def _lanes(dtype: str) -> int:
    """Elements made of a Philox block: two doubles or four floats. Half precision is drawn as float."""
    return 2 if dtype == "float64" else 4


def _threads(numel: int, device: GpuProperties, lanes: int) -> int:
    """In the launch, all blocks together, where each thread is meant to make so many elements."""
    resident = device.multi_processor_count * (device.max_threads_per_multi_processor // _THREADS)
    return _THREADS * min(resident, -(-numel // (_THREADS * lanes)))


def _reserved(numel: int, threads: int, lanes: int) -> int:
    """How far a launch moves the generator's offset."""
    return _WORDS * -(-numel // (threads * lanes))


def _parts(begin: int, numel: int, size: int) -> list[tuple[int, int]]:
    """The ranges of elements that one launch each makes, in order."""
    if numel <= _REACH and 1 + (numel - 1) * size <= _REACH:
        return [(begin, numel)]
    half = numel // 2
    return [*_parts(begin, half, size), *_parts(begin + half, numel - half, size)]
