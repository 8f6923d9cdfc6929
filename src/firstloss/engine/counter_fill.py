"""Random operations under the counter policy, on tensors: what `rng.counter` has a rule for is drawn by it.

Any other operation draws with a generator of its own, which depends on the seed and on the number of the draw.
Elements count in the order of their indices, however the tensor lies in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..rng import counter
from ..rng.counter_stream import CounterStream, number_and_word
from ..rng.stream import Position

aten = torch.ops.aten

_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Fill(NamedTuple):
    """What a call asks for: a distribution, its two numbers, and the target, or the shape of what is to be made."""

    kind: str
    first: float
    second: float
    size: Any = None


def _in_place(kind: str, names: tuple[str, str], defaults: tuple[float, float]) -> Callable[[Any, Any], _Fill]:
    def read(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Fill:
        given = {**dict(zip(names, defaults, strict=True)), **dict(zip(names, args[1:], strict=False)), **kwargs}
        return _Fill(kind, *(float(given[name]) for name in names))

    return read


_RULES: dict[Any, Callable[[Any, Any], _Fill]] = {
    aten.normal_.default: _in_place("normal", ("mean", "std"), (0.0, 1.0)),
    aten.uniform_.default: _in_place("uniform", ("from", "to"), (0.0, 1.0)),
    aten.randn.default: lambda args, kwargs: _Fill("normal", 0.0, 1.0, args[0]),
    aten.randn.generator: lambda args, kwargs: _Fill("normal", 0.0, 1.0, args[0]),
    aten.rand.default: lambda args, kwargs: _Fill("uniform", 0.0, 1.0, args[0]),
    aten.rand.generator: lambda args, kwargs: _Fill("uniform", 0.0, 1.0, args[0]),
    aten.normal.float_float: lambda args, kwargs: _Fill("normal", float(args[0]), float(args[1]), args[2]),
}


def has_rule(op: Any) -> bool:
    """Whether the operation can be drawn on any device."""
    return op in _RULES


def words_of(numel: int, dtype: torch.dtype) -> int:
    """Words that a draw of `numel` elements has."""
    real = _REAL.get(dtype, dtype)
    return numel * (2 if dtype in _REAL else 1) * (2 if real == torch.float64 else 1)


def run(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stream: CounterStream,
    position: Position,
    otherwise: Callable[[torch.Generator], Any],
) -> Any:
    """What `op` returns at `position`; `otherwise` calls it with a generator, where there is no rule for it."""
    rule = _RULES.get(op)
    if rule is not None:
        asked = rule(args, kwargs)
        made = asked.size is not None
        target = torch.empty(asked.size, dtype=kwargs.get("dtype"), device=kwargs.get("device")) if made else args[0]
        if _REAL.get(target.dtype, target.dtype) in _FLOATS and _valid(asked):
            _fill(asked, target, stream, position)
            return target
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(stream.state_at(position)))
    return otherwise(generator)


def _valid(asked: _Fill) -> bool:
    """Whether PyTorch would accept the numbers; if not, it is to say so itself."""
    return asked.second >= 0 if asked.kind == "normal" else asked.first <= asked.second


def _fill(asked: _Fill, target: torch.Tensor, stream: CounterStream, position: Position) -> None:
    draw, word = number_and_word(position)
    kind, first, second, _ = asked
    if target.dtype in _REAL:
        real = torch.view_as_real(target)
        # As PyTorch has it: the variance is that of the two parts together, the mean is added to both.
        each = asked._replace(second=second * 0.5**0.5) if kind == "normal" else asked
        _fill(each, real, stream, position)
        return
    count = target.numel()
    if target.dtype == torch.float64:
        make = counter.normal64 if kind == "normal" else counter.uniform64
        target.copy_(torch.from_numpy(make(stream.seed, draw, word // 2, count, first, second)).view(target.shape))
        return
    direct = target.dtype == torch.float32 and target.is_contiguous() and target.device.type == "cpu"
    single = target.detach().view(-1) if direct else torch.empty(count, dtype=torch.float32)
    fill = counter.normal if kind == "normal" else counter.uniform
    fill(stream.seed, draw, word, count, first, second, out=single.numpy())
    if not direct:
        single = single.view(target.shape)
        target.copy_(single)
        if kind == "uniform" and target.dtype != torch.float32:  # rounded up to the end, as in `counter.between`
            target.masked_fill_(target == second, first)
