"""Constant folding in a traced step: values that are computed from constants only are known while it is traced.

The inputs of a step have no values during tracing, but `torch.tensor([3, 1])` or `torch.arange(4) > 2` do: they are the
same at every execution. So they may be read, and may determine sizes, like Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.ops import aten

from ..compat.torch_names import DisableTorchDispatch
from ..program.graph import Ref, Value, is_not_strided
from ..program.nested import mapped
from . import session
from .constants import constant_tensor
from .op_call import OpCall
from .tensor import DeferredTensor, Hooks

Tensor = torch.Tensor

_UNWRITTEN = (aten.empty.memory_format, aten.empty_strided.default)


def known_value(tensor: Any) -> Tensor | None:
    """The value of a tensor that the active step has computed from constants only; None for any other."""
    if type(tensor) is not DeferredTensor or tensor._storage.trace is not session.trace:
        return None
    if not _from_constants(tensor._storage.value):
        return None
    with DisableTorchDispatch():
        return compute([tensor._ref()])[0]


def compute(refs: list[Ref]) -> list[Tensor]:
    """The content of each Ref, by PyTorch's own kernels: as `engine.replay.compute`."""
    from ..engine import replay  # not before the first use: most captures do without it

    return replay.compute(refs)


def _from_constants(value: Value) -> bool:
    """Whether `value` depends on constants only; depth first, since an input is usually found soon."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        if value.known:
            continue
        node = value.node
        if node is None or node.draw is not None or node.op in _UNWRITTEN or node.op.namespace != "aten":
            return False
        if node.index not in seen:
            seen.add(node.index)
            stack.extend(node.reads())
    return True


def fold_call(
    call: OpCall, value_of: Callable[[Any], Tensor | None], wrap: Callable[[Tensor], Tensor] | None = None
) -> Any:
    """Run a call whose shape depends on values, if these are known; else return None.

    Args:
        value_of: returns the value of a traced tensor, or None if it has none.
        wrap: makes the traced tensors of a content; by default constants.
    """
    wrap = _constant if wrap is None else wrap
    if call.op is aten.masked_select.default:
        return _masked_select(call.args[0], call.args[1], value_of, wrap)
    if call.op is aten.index.Tensor:
        return _index_by_masks(call.args[0], call.args[1], value_of, wrap)
    values: dict[int, Tensor | None] = {id(t): value_of(t) for t in call.tensors()}
    if call.traits.writes or call.traits.random is not None or not values or any(v is None for v in values.values()):
        return None

    result = _run_on(call, values)
    if isinstance(result, Tensor) and is_not_strided(result):
        call.refuse_layout(result)
    return _wrapped(result, wrap)


def draw_now(call: OpCall, value_of: Callable[[Any], Tensor], wrap: Callable[[Tensor], Tensor]) -> Any:
    """Run a random operation with a generator of the step's own, which moves on as in eager PyTorch."""
    values = {id(t): value_of(t).clone() for t in call.tensors()}
    result = _run_on(call, values)
    written = call.written()
    for target in written:
        Hooks.dispatch(aten.copy_.default, (target, wrap(values[id(target)])), {})
    if not written:
        return _wrapped(result, wrap)
    return written[0] if len(written) == 1 else tuple(written)


def _run_on(call: OpCall, values: Mapping[int, Tensor | None]) -> Any:
    """The result of a call, of the values of its tensors, by their ids."""

    def made(arg: Any) -> Any:
        return values[id(arg)] if isinstance(arg, Tensor) else arg

    args, kwargs = mapped(made, [*call.args]), {k: mapped(made, v) for k, v in call.kwargs.items()}
    with DisableTorchDispatch(), torch.no_grad():
        return call.op(*args, **kwargs)


def _wrapped(result: Any, wrap: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(wrap(r) if isinstance(r, Tensor) else r for r in result)
    return wrap(result) if isinstance(result, Tensor) else result


def _constant(result: Tensor) -> Tensor:
    out = constant_tensor(result, copy=False)
    out._storage.trace = session.trace
    return out


def _masked_select(
    x: Tensor, mask: Tensor, value_of: Callable[[Any], Tensor | None], wrap: Callable[[Tensor], Tensor]
) -> Tensor | None:
    content = value_of(mask)
    if content is None:
        return None
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    x = Hooks.dispatch(aten.expand.default, (x, shape), {})
    return _index_by_masks(x, [content.expand(shape)], lambda mask: mask, wrap)


def _index_by_masks(
    x: Tensor, indices: list[Any], value_of: Callable[[Any], Tensor | None], wrap: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """`x[indices]`, with known masks converted to indices; None if a mask is unknown."""
    positions: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
            continue
        mask = value_of(index)
        if mask is None:
            return None
        with DisableTorchDispatch():
            true_positions = mask.nonzero().unbind(1)
        positions.extend(wrap(position.clone()) for position in true_positions)
    return Hooks.dispatch(aten.index.Tensor, (x, positions), {})
