"""Where the elements of a fill come from in PyTorch's CUDA random stream.

The CUDA generator is a seed and an offset into Philox streams, one stream (`subsequence`) for each thread of a launch.
A fill launches blocks of 256 threads, as many as the device keeps resident or the fill needs; each thread strides over
the tensor, takes one Philox block of four words at a time, and makes two or four elements of it. So which words an
element gets depends on the fill's size and on the device.
Source: `calc_execution_policy` and `distribution_elementwise_grid_stride_kernel` in
ATen/native/cuda/DistributionTemplates.h; cuRAND's `curand_init` for how subsequence and offset make a counter.
"""

from __future__ import annotations

from typing import NamedTuple

from firstloss.rng import philox

_THREADS = 256  # in a block
_WORDS = 4  # in a Philox block; offsets count words
_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_REACH = (1 << 31) - 1  # bytes that one launch fills: its indices have 32 bits


class Device(NamedTuple):
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


def place(element: int, numel: int, device: Device, offset: int = 0, dtype: str = "float32") -> Place:
    """Where element `element` of a `uniform_` or `normal_` fill of `numel` comes from, begun at `offset`."""
    if not 0 <= element < numel:
        raise IndexError(f"element {element} of a fill of {numel}")
    turn, thread = divmod(element, _threads(numel, device, dtype))
    block, lane = divmod(turn, _lanes(dtype))
    return Place(thread, offset + _WORDS * block, lane)


def advance(numel: int, device: Device, offset: int = 0, dtype: str = "float32") -> int:
    """The generator's offset after a fill of `numel` elements begun at `offset`."""
    if numel == 0:
        return offset
    in_one_block_each = _threads(numel, device, dtype) * _lanes(dtype)
    return offset + _WORDS * -(-numel // in_one_block_each)


def words(seed: int, subsequence: int, offset: int) -> philox.Words:
    """The Philox block at `offset` of a thread's stream: uint32, shape (4,)."""
    if offset % _WORDS:
        raise ValueError(f"offset {offset} is within a block; PyTorch's are multiples of {_WORDS}")
    return philox.words(seed, offset // _WORDS, subsequence)


def _lanes(dtype: str) -> int:
    """Elements made of a Philox block: two doubles or four floats. Half precision is drawn as float."""
    return 2 if dtype == "float64" else 4


def _threads(numel: int, device: Device, dtype: str) -> int:
    """In the launch, all blocks together."""
    if (numel - 1) * _BYTES[dtype] >= _REACH:
        # PyTorch halves such a fill until 32-bit indices reach, and launches, and advances, for each part by itself.
        raise ValueError(f"a {dtype} fill of {numel} elements takes several launches, whose layout is not known")
    resident = device.multi_processor_count * (device.max_threads_per_multi_processor // _THREADS)
    return _THREADS * min(resident, -(-numel // _THREADS))
