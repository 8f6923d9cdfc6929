"""Foreach operations on lists of weights, executed a chunk of the lists at a time.

An optimizer is traced as operations on lists of all its weights, and what it computes on the way is as large as all of
them. PyTorch's fused optimizers have no such memory, and a model that just fits with one would not fit here. So where
such operations follow each other, all of them are run on some of the weights, then on the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..compat.torch_names import schema_of
from ..program.graph import Node, Ref, Value


class ScheduledNode(NamedTuple):
    """A node, or a part of one, and the Values that no later node reads."""

    node: Node
    frees: tuple[Value, ...]


def schedule(nodes: Sequence[Node], frees: Mapping[int, Sequence[Value]], nbytes: int) -> list[ScheduledNode]:
    """The nodes in order, those on lists in parts of at most `nbytes` of a list each, or of one of its elements."""
    found: list[ScheduledNode] = []
    begin = 0
    while begin < len(nodes):
        run = _run(nodes, begin)
        if len(run) > 1 and _apart(run):
            found += _in_parts(run, frees, nbytes)
        else:
            run = run[:1] or [nodes[begin]]
            found += [ScheduledNode(node, tuple(frees.get(node.index, ()))) for node in run]
        begin += len(run)
    return found


def _run(nodes: Sequence[Node], begin: int) -> list[Node]:
    """The operations on lists of one length that follow each other from there on."""
    count = _length(nodes[begin])
    run: list[Node] = []
    while count and begin + len(run) < len(nodes) and _length(nodes[begin + len(run)]) == count:
        run.append(nodes[begin + len(run)])
    return run


def _length(node: Node) -> int:
    """Of the lists of an operation that makes, or writes, one tensor for each place in them; else 0."""
    if not schema_of(node.op).name.startswith("aten::_foreach_") or node.draw is not None or node.kwargs:
        return 0
    lengths = {len(arg) for arg in node.args if type(arg) in (list, tuple)}
    count = lengths.pop() if len(lengths) == 1 else 0
    made = len(node.outputs) == count and len(node.writes) in (0, count)
    return count if made and count > 1 else 0


def _apart(run: Sequence[Node]) -> bool:
    """Whether what is at one place of the lists has nothing to do with what is at the others."""
    place: dict[Value, int] = {}
    for node in run:
        for i, value in enumerate(node.outputs):
            place[value] = i
        for i, ref in enumerate(node.writes):
            if place.setdefault(ref.value, i) != i:
                return False
    for node in run:
        for arg in node.args:
            if type(arg) is Ref and arg.value in place:
                return False
            if type(arg) in (list, tuple):
                refs = ((i, part) for i, part in enumerate(arg) if type(part) is Ref)
                if any(place.get(ref.value, i) != i for i, ref in refs):
                    return False
    return True


def _in_parts(run: Sequence[Node], frees: Mapping[int, Sequence[Value]], nbytes: int) -> Iterator[ScheduledNode]:
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
    """What is read for several places of the lists."""
    found = {arg.value for arg in node.args if type(arg) is Ref}
    for arg in node.args:
        if type(arg) in (list, tuple):
            counts = Counter(part.value for part in arg if type(part) is Ref)
            found |= {value for value, count in counts.items() if count > 1}
    return found


def _parts(run: Sequence[Node], nbytes: int) -> Iterator[tuple[int, int]]:
    sizes = [max(node.outputs[i].nbytes for node in run) for i in range(len(run[0].outputs))]
    begin, held = 0, 0
    for i, size in enumerate(sizes):
        if i > begin and held + size > nbytes:
            yield begin, i
            begin, held = i, 0
        held += size
    yield begin, len(sizes)


def _part(node: Node, begin: int, end: int) -> Node:
    args: tuple[Any, ...] = tuple(a[begin:end] if type(a) in (list, tuple) else a for a in node.args)
    writes = node.writes[begin:end]
    part = Node(node.index, node.op, args, node.kwargs, writes, node.overwrites, None, node.source)
    part.outputs = node.outputs[begin:end]
    return part
