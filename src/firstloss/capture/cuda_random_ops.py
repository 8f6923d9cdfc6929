"""Record random operations on a GPU, where the generator is a seed and an offset in PyTorch's Philox stream.

The generator is advanced past each recorded fill. So code that saves, restores or seeds it finds the same state as in
eager PyTorch, and the fill is run later by PyTorch's own kernel on a generator with that seed and offset. All other
random operations there run immediately. How far a fill advances the offset depends on the GPU (`rng/cuda_layout.py`):
the rule is checked on this GPU first, and if it does not hold, fills run immediately, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch
from ..program.graph import Draw, Node
from ..rng import cuda_layout
from ..rng.stream import PhiloxStream, Position
from . import session

_FILLS = frozenset({"normal", "uniform", "rand", "randn"})
_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
# Fills of less than a block, of many blocks, and of more than are resident on the device.
_TRIAL_SIZES = (1, 1000, 300_001, 4_000_003)


def record_on_gpu(
    node: Node, name: str, numel: int, dtype: torch.dtype, device: torch.device, generator_argument: Any
) -> bool:
    """Give `node`, which draws `numel` elements on a GPU, its offset, and advance the generator.

    Args:
        generator_argument: the call's `generator` argument.

    Returns:
        False if it has to be run to find out how far.
    """
    if name not in _FILLS or dtype not in _DTYPES:
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index] if generator_argument is None else generator_argument
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


def gpu(index: int) -> cuda_layout.GpuProperties:
    """The properties of a GPU that determine how fills advance the offset."""
    properties = torch.cuda.get_device_properties(index)
    return cuda_layout.GpuProperties(properties.multi_processor_count, properties.max_threads_per_multi_processor)


@functools.cache
def layout_is_supported(index: int) -> bool:
    """Whether fills on this GPU advance the offset as `cuda_layout` computes."""
    with DisableTorchDispatch():
        generator = torch.Generator(torch.device("cuda", index)).manual_seed(0)
        for dtype, name in _DTYPES.items():
            for numel in _TRIAL_SIZES:
                target = torch.empty(numel, dtype=dtype, device=generator.device)
                for fill in (target.normal_, target.uniform_):
                    before = generator.get_offset()
                    fill(generator=generator)
                    if generator.get_offset() != cuda_layout.advance(numel, gpu(index), before, name):
                        return False
    return True
