"""The torch engine: run recipes on the CPU with all cores.

Nearly all the work of a constructor is whole random fills. They depend on nothing but their place in the stream, so
they are laid end to end in stream order, cut into segments of about equal work wherever the kernel may be cut, and
each segment is drawn by one thread with a generator of its own that is set once, at the segment's start: where one
fill ends, the next begins, and only a gap (a dead fill) costs a jump. What is left of the recipes, small edits and
arithmetic, is replayed afterwards, independent recipes in parallel.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from ..program.graph import Node, Truncation, Value, is_contiguous, slice_for
from ..rng import draws
from ..rng.deferred_stream import at_root
from ..rng.philox_stream import PhiloxStream
from ..rng.stream import Position, Stream
from .chains import Finish, apply, find_chains, split_finish
from .memory import allocate_huge
from .replay import Replay
from .sampler import Pen, is_native

# A fill is drawn in pieces that stay in a core's L2 cache: PyTorch's normal kernel goes over its target twice
# (measured: 300 M values/s in pieces of 256 KiB, 200 M/s on the whole).
_PIECE = 1 << 16
# The native kernels keep to the cache by themselves. Pieces of some milliseconds tell how far they are.
_NATIVE_PIECE = 1 << 22
# With edits behind them a piece has to stay in the cache as well, but threads that hand each other the interpreter's
# lock for every edit wait for it: measured, pieces of 1 MiB take 30% less than those of 256 KiB.
_EDITED_PIECE = 1 << 18
# A segment this long takes 30 ms to draw natively and 100 without, against some ms for the jump to its start.
_SEGMENT_WORDS = 1 << 25


def default_threads() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def give_way(niceness: Sequence[int]) -> Callable[[], None]:
    """What each thread of a pool runs first: the n-th takes the n-th of these priorities, the others stay as they are.

    So some leave their cores to whoever is on the way to the first loss.
    """
    mine = iter(niceness)

    def lower_priority() -> None:
        priority = next(mine, 0)
        if priority and sys.platform == "linux":  # elsewhere a priority is a whole process's
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)

    return lower_priority


class Target:
    """What a fill writes to. Its memory is taken when the first piece is drawn, by the thread that draws it."""

    def __init__(self, node: Node, allocate: Callable[[Value], torch.Tensor]) -> None:
        self.ref = node.writes[0]
        self.numel = math.prod(self.ref.size)
        self.dtype = str(self.ref.dtype).removeprefix("torch.")
        self.contiguous = is_contiguous(self.ref.size, self.ref.stride)
        self._allocate = allocate
        self._lock = threading.Lock()
        self._buffer: torch.Tensor | None = None

    def buffer(self) -> torch.Tensor:
        """The memory of the whole storage."""
        with self._lock:
            if self._buffer is None:
                self._buffer = self._allocate(self.ref.value)
            return self._buffer

    def tensor(self) -> torch.Tensor:
        """The tensor that the fill writes to."""
        return self.ref.view(self.buffer())


class Fill(NamedTuple):
    """A random fill of the elements [begin, end) of `target` (all of them, if its kernel may not be cut)."""

    node: Node
    target: Target
    begin: int
    end: int
    position: Position
    after: Position
    then: list[Node]  # edits to make on each piece


def run(
    values: Iterable[Value],
    allocate: Callable[[Value], torch.Tensor] = allocate_huge,
    num_threads: int | None = None,
    done: Callable[[int], None] | None = None,
    niceness: Sequence[int] = (),
) -> dict[Value, torch.Tensor]:
    """Compute `values`; returns for each a buffer laid out as it is.

    Args:
        values: what is wanted. Each is computed whole.
        allocate: gives the memory for a Value; called from several threads.
        num_threads: threads to draw with; default all cores of this process.
        done: told the number of bytes each time a piece has been drawn.
        niceness: the first threads' priorities, where others are on the way to the first loss meanwhile.
    """
    wanted = list(dict.fromkeys(values))
    threads = num_threads or default_threads()
    nodes = slice_for(wanted)
    fills = _independent_fills(nodes)
    replay = Replay(allocate)
    chains = find_chains(nodes, [node for node in fills if _edits_follow(node)], set(wanted))
    work: dict[Stream, list[Fill]] = {}
    targets: dict[Value, Target] = {}
    rejections: list[tuple[Truncation, Target]] = []
    for node in fills:
        assert node.draw is not None
        chain = chains.get(node, [])
        target = targets[(chain or [node])[-1].outputs[0]] = Target(node, allocate)
        stream, position = at_root(node.draw.stream, node.draw.position)
        words = node.draw.after.words - node.draw.position.words
        _, after = at_root(node.draw.stream, node.draw.after)
        assert after.words == position.words + words
        work.setdefault(stream, []).append(Fill(node, target, 0, target.numel, position, after, chain))
        if node.draw.rejection is not None:
            rejections.append((node.draw.rejection, target))
    segments = [(stream, part) for stream, parts in work.items() for part in _segments(parts, threads)]
    hoisted = {*fills, *(node for chain in chains.values() for node in chain)}
    rest = _components([node for node in nodes if node not in hoisted])
    with ThreadPoolExecutor(threads, "firstloss-init", give_way(niceness)) as pool:
        for future in [pool.submit(_draw_segment, *segment, done) for segment in segments]:
            future.result()
        for future in [pool.submit(_correct, *rejection) for rejection in rejections]:
            future.result()
        replay.buffers.update((value, target.buffer()) for value, target in targets.items())
        for future in [pool.submit(_replay_component, replay, component) for component in rest]:
            future.result()
    return {value: replay.buffer(value) for value in wanted}


def make_whole(value: Value) -> torch.Tensor:
    """All of one Value."""
    return run([value])[value]


def _correct(rejection: Truncation, target: Target) -> None:
    with torch.no_grad():
        rejection.correct(target.tensor())


def _edits_follow(node: Node) -> bool:
    """Whether edits may be made on its pieces: one by rejection is not through after its first round."""
    assert node.draw is not None
    return node.draw.rejection is None and is_contiguous(node.writes[0].size, node.writes[0].stride)


def _replay_component(shared: Replay, nodes: list[Node]) -> None:
    own = Replay(shared._allocate)
    own.buffers = shared.buffers  # components share no Value, and a dict may be written from several threads
    own.run(nodes)


def _independent_fills(nodes: list[Node]) -> list[Node]:
    """The random fills that may be drawn before all else: nobody needs what their target held before."""
    made = {value for node in nodes for value in node.outputs}
    out = []
    for node in nodes:
        if node.draw is None or isinstance(node.draw.stream, PhiloxStream):  # a GPU fills by itself, and at once
            continue
        if node.overwrites and node.writes[0].value not in made:
            if not any(True for _ in node.reads()):
                out.append(node)
    # A target that two fills in the slice write is in use in between.
    count: dict[Value, int] = {}
    for node in out:
        count[node.writes[0].value] = count.get(node.writes[0].value, 0) + 1
    return [node for node in out if count[node.writes[0].value] == 1]


def _may_be_cut(fill: Fill) -> bool:
    """Whether pieces of the fill (they begin at multiples of _PIECE) may be drawn one by one."""
    name = _name(fill.node)
    return (
        name in ("uniform", "normal")  # all that models have many of
        and fill.target.contiguous
        and fill.end - fill.begin >= 2 * _PIECE
        and draws.granule(name, fill.target.dtype) is not None
    )


def _name(node: Node) -> str:
    if node.draw is not None and node.draw.rejection is not None:
        return "normal"
    return node.op._schema.name.split("::")[1].rstrip("_")


def _segments(fills: list[Fill], threads: int) -> list[list[Fill]]:
    """Cut a stream's fills, in stream order, into segments of about equal work."""
    fills.sort(key=lambda fill: fill.position.words)
    total = sum(fill.after.words - fill.position.words for fill in fills)
    rounds = max(-(-total // (threads * _SEGMENT_WORDS)), 1)  # alike for all threads, so that all end at once
    goal = max(-(-total // (threads * rounds)), 1)
    segments: list[list[Fill]] = []
    current: list[Fill] = []
    room = goal
    for fill in fills:
        while fill.after.words - fill.position.words > room:
            head, tail = _cut(fill, room)
            if head is None or tail is None:
                break
            segments.append([*current, head])
            current, room, fill = [], goal, tail
        current.append(fill)
        room -= fill.after.words - fill.position.words
        if room <= 0:
            segments.append(current)
            current, room = [], goal
    if current:
        segments.append(current)
    return segments


def _cut(fill: Fill, words: int) -> tuple[Fill | None, Fill | None]:
    """The first about `words` words of a fill, and the rest; (None, None) where its kernel may not be cut there."""
    if not _may_be_cut(fill):
        return None, None
    dtype = fill.target.dtype
    count = fill.end - fill.begin
    per_element = max(1, (fill.after.words - fill.position.words) // max(count, 1))
    at = fill.begin + max(words // per_element // _PIECE, 1) * _PIECE
    if fill.end - at < _PIECE:
        return None, None
    middle = Position(
        fill.position.words + draws.words_before(_name(fill.node), dtype, at - fill.begin), fill.position.spare
    )
    return fill._replace(end=at, after=middle), fill._replace(begin=at, position=middle)


def _draw_segment(stream: Stream, fills: list[Fill], done: Callable[[int], None] | None) -> None:
    pen = Pen()
    with torch.no_grad():
        for fill in fills:
            pen.move(stream, fill.position)
            _draw_fill(fill, pen, done)
            pen.at = (stream, fill.after)


def _draw_fill(fill: Fill, pen: Pen, done: Callable[[int], None] | None) -> None:
    node, target = fill.node, fill.target.tensor()
    op, args, kwargs = node.op, node.args[1:], node.kwargs
    if node.draw is not None and node.draw.rejection is not None:  # its first round; the others follow later
        op, args, kwargs = torch.ops.aten.normal_.default, node.args[1:3], {}
    if fill.target.contiguous:
        target = target.view(-1)
    natively = is_native(op, target, args, kwargs)
    edits, finish = split_finish(fill.then) if natively else (fill.then, None)
    at_once = [edit.op for edit in edits] == [torch.ops.aten.erfinv_.default] and pen.has_erfinv(
        op, target, args, kwargs
    )
    pieces = [(fill.begin, fill.end)]
    if _may_be_cut(fill):
        size = _PIECE if not natively else _EDITED_PIECE if fill.then and not at_once else _NATIVE_PIECE
        # The kernel treats the end of a fill in a way of its own, for which it wants the last piece not to be short.
        cuts = [*range(fill.begin, max(fill.end - size, fill.begin) + 1, size), fill.end]
        pieces = list(zip(cuts, cuts[1:], strict=False))
    longest = max(end - begin for begin, end in pieces)
    rough = target if at_once or finish is None else torch.empty(longest, dtype=target.dtype)  # stays in the cache
    for begin, end in pieces:
        part = target if end - begin == target.numel() else target[begin:end]
        if at_once:
            pen.draw_erfinv(part, args, kwargs, finish or Finish())
        else:
            drawn = part if finish is None else rough[: end - begin]
            pen.draw(op, drawn, args, kwargs)
            apply(edits, drawn)
            if finish is not None:
                finish.write(part, drawn)
        if done is not None:
            done((end - begin) * target.itemsize)


def _components(nodes: list[Node]) -> list[list[Node]]:
    """Groups of nodes that touch no common Value, each in the order of recording."""
    owner: dict[Value, int] = {}
    parent: list[int] = []

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i, node in enumerate(nodes):
        parent.append(i)
        touched = [*node.reads(), *(ref.value for ref in node.writes), *node.outputs]
        for value in touched:
            j = owner.setdefault(value, i)
            a, b = find(i), find(j)
            if a != b:
                parent[max(a, b)] = min(a, b)
    groups: dict[int, list[Node]] = {}
    for i, node in enumerate(nodes):
        groups.setdefault(find(i), []).append(node)
    return list(groups.values())
