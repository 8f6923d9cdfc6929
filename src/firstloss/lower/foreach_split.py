"""Splitting of foreach operations: one node for each weight, placed where that weight's update can begin.

An optimizer's step is captured as a few operations on the lists of all weights, after the whole backward pass. When
these are split, the update of a layer's weights can follow that layer's backward pass: its gradients need not live
longer, and layers with equal steps are equal from end to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..compat.torch_names import schema_of
from ..program.graph import Node, Ref, Value
from .program import LoweredCall, call_of

# The number of calls below which their order does not matter.
_FEW = 12
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def is_foreach(op: Any) -> bool:
    """Whether an operation is one of PyTorch's on lists of tensors."""
    return schema_of(op).name.startswith("aten::_foreach_")


def is_whole_step(op: Any) -> bool:
    """Whether an operation is all of an optimizer's step."""
    return schema_of(op).name.removeprefix("aten::") in _FUSED


def split_foreach_calls(nodes: Sequence[Node]) -> list[LoweredCall]:
    """`nodes` as calls in an equivalent order: list operations are split, each weight's update as early as possible."""
    calls: list[LoweredCall] = []
    is_piece: list[bool] = []
    for node in nodes:
        pieces = _pieces(node) or [call_of(node)]
        calls.extend(pieces)
        is_piece.extend([len(pieces) > 1] * len(pieces))
    return [calls[i] for i in _early(calls, is_piece)] if any(is_piece) else calls


def _pieces(node: Node) -> list[LoweredCall] | None:
    """A call for each element of the node's lists; None if it has no lists, or treats them as a whole."""
    if not (is_foreach(node.op) or is_whole_step(node.op)):
        return None
    lists = [arg for arg in (*node.args, *node.kwargs.values()) if type(arg) in (list, tuple)]
    count = max(map(len, lists), default=0)
    within = {id(ref) for arg in lists if len(arg) == count for ref in arg}
    uniform = all(len(arg) in (0, count) for arg in lists) and all(id(ref) in within for ref in node.writes)
    if count < 2 or not uniform or len(node.writes) % count or len(node.outputs) % count:
        return None
    written = {id(ref): value for ref, value in zip(node.writes, node.outputs, strict=False)}
    new_outputs = node.outputs[len(node.writes) :]
    call_cache: dict[tuple[Any, ...], LoweredCall] = {}
    return [_piece(node, i, count, written, new_outputs[i::count], call_cache) for i in range(count)]


def _piece(
    node: Node,
    i: int,
    count: int,
    written: dict[int, Value],
    new_outputs: tuple[Any, ...],
    call_cache: dict[tuple[Any, ...], LoweredCall],
) -> LoweredCall:
    """Element `i` of `node`. `call_cache` has a call for each kind of element."""

    def element(arg: Any) -> Any:
        return [arg[i]] if type(arg) in (list, tuple) and len(arg) == count else arg

    args = tuple(element(arg) for arg in node.args)
    kwargs = {name: element(arg) for name, arg in node.kwargs.items()}
    values: dict[Value, int] = {}
    key: list[Any] = []
    for arg in (*args, *kwargs.values()):
        if type(arg) is Ref:
            arg = [arg]
        elif type(arg) is not list:
            continue
        for ref in arg:
            if type(ref) is Ref:
                value = ref.value
                key.append((values.setdefault(value, len(values)), ref[1:], value.shape, value.stride, value.dtype))
            else:
                key.append((type(ref), ref))
    refs = [ref for arg in (*args, *kwargs.values()) if type(arg) is list for ref in arg if id(ref) in written]
    writes = tuple({id(ref): ref for ref in refs}.values())  # one list may be two operands
    outputs = (*(written[id(ref)] for ref in writes), *new_outputs)
    call = call_cache.get(tuple(key))
    if call is not None:
        return call._replace(inputs=tuple(values), outputs=outputs)
    piece = Node(node.index, node.op, args, kwargs, writes, node.overwrites, node.draw, node.source)
    piece.outputs = outputs
    call = call_cache[tuple(key)] = call_of(piece)
    assert call.inputs == tuple(values)
    return call


def _early(calls: Sequence[LoweredCall], is_piece: Sequence[bool]) -> list[int]:
    """An order of `calls` in which each group of connected pieces comes as soon as all its operands are available."""
    maker = {value: i for i, call in enumerate(calls) for value in call.outputs}
    needs = [sorted({maker[v] for v in call.inputs if v in maker}) for call in calls]
    group = connected_groups(needs, is_piece)
    members: dict[int, list[int]] = {}
    for i, g in enumerate(group):
        if is_piece[i]:
            members.setdefault(g, []).append(i)
    waits: dict[int, int] = {}
    waiting: dict[int, list[int]] = {}  # for a call, the groups that depend on it
    for g, indices in members.items():
        outside = {n for i in indices for n in needs[i] if not (is_piece[n] and group[n] == g)}
        waits[g] = len(outside)
        for n in outside:
            waiting.setdefault(n, []).append(g)
    order: list[int] = []
    emitted = [False] * len(calls)

    def emit(call: int) -> None:
        stack = [call]
        while stack:
            i = stack[-1]
            missing = [n for n in needs[i] if not emitted[n]]
            if missing and not emitted[i]:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if emitted[i]:
                continue
            emitted[i] = True
            order.append(i)
            for g in waiting.get(i, ()):
                waits[g] -= 1
                if not waits[g]:
                    stack.extend(reversed(members[g]))

    for i in sorted(waiting):  # the learning rate and values derived from it are available from the start
        if _ancestors(i, needs, _FEW) is not None:
            emit(i)
    for i in range(len(calls)):
        if not is_piece[i]:
            emit(i)
    for i in range(len(calls)):
        emit(i)
    return order


def _ancestors(call: int, needs: Sequence[Sequence[int]], most: int) -> set[int] | None:
    """`call` and everything that it depends on; None if these are more than `most`."""
    visited: set[int] = set()
    stack = [call]
    while stack:
        i = stack.pop()
        if i not in visited:
            visited.add(i)
            if len(visited) > most:
                return None
            stack.extend(needs[i])
    return visited


def connected_groups(needs: Sequence[Sequence[int]], is_piece: Sequence[bool]) -> list[int]:
    """The number of each call's group: pieces that are connected are in one, every other call in its own.

    Args:
        needs: for each call, other calls to which it is connected.
    """
    parent = list(range(len(needs)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, before in enumerate(needs):
        for n in before:
            if is_piece[i] and is_piece[n]:
                parent[find(i)] = find(n)
    return [find(i) for i in range(len(needs))]
