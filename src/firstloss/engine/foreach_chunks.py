"""Schedule foreach operations in chunks of their lists, to save memory.

An optimizer is traced as operations on lists of all its weights, whose intermediate results are as large as all weights
together. PyTorch's fused optimizers have none, and a model that just fits with one of them would not fit here. So a
sequence of such operations is run on some of the weights, then on the next ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..compat.torch_names import schema_of
from ..program.graph import Node, Ref, Value


class ScheduledNode(NamedTuple):
    """A node, or a part of one, and the Values to free after it."""

    node: Node
    frees: tuple[Value, ...]


def schedule(nodes: Sequence[Node], frees: Mapping[int, Sequence[Value]], nbytes: int) -> list[ScheduledNode]:
    """The nodes in order; those on lists are split into parts of at most `nbytes` per list, or of one element."""
    scheduled: list[ScheduledNode] = []
    begin = 0
    while begin < len(nodes):
        run = _run(nodes, begin)
        if len(run) > 1 and _is_elementwise(run):
            scheduled += _split(run, frees, nbytes)
        else:
            run = run[:1] or [nodes[begin]]
            scheduled += [ScheduledNode(node, tuple(frees.get(node.index, ()))) for node in run]
        begin += len(run)
    return scheduled


def _run(nodes: Sequence[Node], begin: int) -> list[Node]:
    """The consecutive operations on lists of the same length, from index `begin` on."""
    count = _length(nodes[begin])
    run: list[Node] = []
    while count and begin + len(run) < len(nodes) and _length(nodes[begin + len(run)]) == count:
        run.append(nodes[begin + len(run)])
    return run


def _length(node: Node) -> int:
    """The length of a foreach operation's lists, if it makes or writes one tensor per list element; else 0."""
    if not schema_of(node.op).name.startswith("aten::_foreach_") or node.draw is not None or node.kwargs:
        return 0
    lengths = {len(arg) for arg in node.args if type(arg) in (list, tuple)}
    count = lengths.pop() if len(lengths) == 1 else 0
    returns_lists = len(node.outputs) == count and len(node.writes) in (0, count)
    return count if returns_lists and count > 1 else 0


def _is_elementwise(run: Sequence[Node]) -> bool:
    """Whether the elements at one index of the lists do not depend on those at other indices."""
    index_of: dict[Value, int] = {}
    for node in run:
        for i, value in enumerate(node.outputs):
            index_of[value] = i
        for i, ref in enumerate(node.writes):
            if index_of.setdefault(ref.value, i) != i:
                return False
    for node in run:
        for arg in node.args:
            if type(arg) is Ref and arg.value in index_of:
                return False
            if type(arg) in (list, tuple):
                refs = ((i, part) for i, part in enumerate(arg) if type(part) is Ref)
                if any(index_of.get(ref.value, i) != i for i, ref in refs):
                    return False
    return True


def _split(run: Sequence[Node], frees: Mapping[int, Sequence[Value]], nbytes: int) -> Iterator[ScheduledNode]:
    parts = list(_parts(run, nbytes))
    shared = {node.index: _shared(node) for node in run}
    for begin, end in parts:
        for node in run:
            part = _part(node, begin, end)
            touched = {*part.reads(), *part.outputs, *(ref.value for ref in part.writes)}
            last = end == parts[-1][1]
            free = [v for v in frees.get(node.index, ()) if v in touched and (last or v not in shared[node.index])]
            yield ScheduledNode(part, tuple(free))


def _shared(node: Node) -> set[Value]:
    """The Values that are read for several list elements."""
    values = {arg.value for arg in node.args if type(arg) is Ref}
    for arg in node.args:
        if type(arg) in (list, tuple):
            counts = Counter(part.value for part in arg if type(part) is Ref)
            values |= {value for value, count in counts.items() if count > 1}
    return values


def _parts(run: Sequence[Node], nbytes: int) -> Iterator[tuple[int, int]]:
    sizes = [max(node.outputs[i].nbytes for node in run) for i in range(len(run[0].outputs))]
    begin, total = 0, 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > nbytes:
            yield begin, i
            begin, total = i, 0
        total += size
    yield begin, len(sizes)


def _part(node: Node, begin: int, end: int) -> Node:
    args: tuple[Any, ...] = tuple(a[begin:end] if type(a) in (list, tuple) else a for a in node.args)
    writes = node.writes[begin:end]
    part = Node(node.index, node.op, args, node.kwargs, writes, node.overwrites, None, node.source)
    part.outputs = node.outputs[begin:end]
    return part
