"""Fill tensors under the counter policy (`rng.counter` has the arithmetic).

Elements are numbered in row-major order, independently of the memory layout. Operations that `rng.counter` has no rule
for are drawn by PyTorch, with a generator that is seeded by the seed and the number of the draw.
"""

from __future__ import annotations

import torch

from ..rng import counter
from ..rng.counter_stream import CounterStream, number_and_word
from ..rng.stream import Position

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def words_of(numel: int, dtype: torch.dtype) -> int:
    """The number of words in a draw of `numel` elements."""
    real = _REAL.get(dtype, dtype)
    return numel * (2 if dtype in _REAL else 1) * (2 if real == torch.float64 else 1)


def generator_at(stream: CounterStream, position: Position) -> torch.Generator:
    """The generator for one draw by PyTorch."""
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(stream.state_at(position)))
    return generator


def fill(
    name: str, target: torch.Tensor, first: float, second: float, stream: CounterStream, position: Position
) -> None:
    """Fill `target` with "uniform" (low, high) or "normal" (mean, std) numbers; raises PyTorch's errors."""
    valid = second >= 0 if name == "normal" else first <= second
    if _REAL.get(target.dtype, target.dtype) not in _FLOATS or not valid:
        getattr(target, f"{name}_")(first, second, generator=generator_at(stream, position))
        return
    if target.dtype in _REAL:
        # As in PyTorch, std is that of the complex number, and the mean is added to both parts.
        part_std = second * 0.5**0.5 if name == "normal" else second
        fill(name, torch.view_as_real(target), first, part_std, stream, position)
        return
    draw, word = number_and_word(position)
    count = target.numel()
    if target.dtype == torch.float64:
        make = counter.normal64 if name == "normal" else counter.uniform64
        target.copy_(torch.from_numpy(make(stream.seed, draw, word // 2, count, first, second)).view(target.shape))
        return
    direct = target.dtype == torch.float32 and target.is_contiguous() and target.device.type == "cpu"
    single = target.detach().view(-1) if direct else torch.empty(count, dtype=torch.float32)
    write = counter.normal if name == "normal" else counter.uniform
    write(stream.seed, draw, word, count, first, second, out=single.numpy())
    if not direct:
        target.copy_(single.view(target.shape))
        if name == "uniform" and target.dtype != torch.float32:  # rounded up to the excluded end
            target.masked_fill_(target == second, first)
