"""Random operations on a GPU: their offset in PyTorch's Philox stream, and how far they move it.

Nothing has to be drawn to know: a CUDA generator is a seed and an offset, which is set past each fill that is
recorded. So what saves, restores or seeds the generator finds it as eager PyTorch would have left it, and a fill is
run later by PyTorch's own kernel on a generator with that seed and offset. Whatever else draws is run at once.

How far a fill moves the offset depends on the GPU (`rng/cuda_layout.py`), and is asked of this one before it is relied
on: if it answers otherwise, fills are run at once as well.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch
from ..program.graph import Draw, Node
from ..rng import cuda_layout
from ..rng.philox_stream import PhiloxStream
from ..rng.stream import Position
from . import session

_FILLS = frozenset({"normal", "uniform", "rand", "randn"})
_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
# Fills of less than a block, of many, and of more than the device runs at once.
_TRIED = (1, 1000, 300_001, 4_000_003)


def record(node: Node, name: str, numel: int, dtype: torch.dtype, device: torch.device, given: Any) -> bool:
    """Give `node`, which draws `numel` elements on a GPU, its offset, and move the generator on.

    False where it has to be run to find out. `given` is the call's own generator, or None.
    """
    if name not in _FILLS or dtype not in _DTYPES:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index] if given is None else given
    if generator.device.type != "cuda" or not layout_is_supported(index):
        return False
    offset = generator.get_offset()
    after = cuda_layout.advance(numel, gpu(index), offset, _DTYPES[dtype])
    node.draw = Draw(_stream(generator.initial_seed()), Position(offset), Position(after))
    if session.generators.preserve:
        session.generators.will_draw(generator)
    generator.set_offset(after)
    return True


@functools.lru_cache
def _stream(seed: int) -> PhiloxStream:
    return PhiloxStream(seed)


def generator_at(stream: PhiloxStream, position: Position, device: torch.device) -> torch.Generator:
    """A generator of our own on `device`, at a place in its stream."""
    generator = torch.Generator(device)
    generator.set_state(torch.from_numpy(stream.state_at(position)))
    return generator


def gpu(index: int) -> cuda_layout.GpuProperties:
    """What of a GPU decides how it fills."""
    found = torch.cuda.get_device_properties(index)
    return cuda_layout.GpuProperties(found.multi_processor_count, found.max_threads_per_multi_processor)


@functools.cache
def layout_is_supported(index: int) -> bool:
    """Whether fills on this GPU move the offset as `cuda_layout` has it."""
    with DisableTorchDispatch():
        generator = torch.Generator(torch.device("cuda", index)).manual_seed(0)
        for dtype, name in _DTYPES.items():
            for numel in _TRIED:
                target = torch.empty(numel, dtype=dtype, device=generator.device)
                for fill in (target.normal_, target.uniform_):
                    before = generator.get_offset()
                    fill(generator=generator)
                    if generator.get_offset() != cuda_layout.advance(numel, gpu(index), before, name):
                        return False
    return True
