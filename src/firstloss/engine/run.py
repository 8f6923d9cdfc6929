"""The CPU engine: whole Values, and boxes of what Refs show, made on all cores.

Nearly all the work of a constructor is random fills, which depend on nothing but their place in the stream. So the work
is cut into tasks, laid end to end in stream order, and cut into segments of about equal cost; a thread takes a segment
at a time: where one task ends in the stream the next begins, and only a gap (a dead fill, another device's shard) costs
a jump. What recipes have besides, operations that cannot be run on a range, is replayed afterwards node by node,
independent parts of it side by side.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from ..compat.torch_names import DisableTorchDispatch
from ..program.graph import Node, Ref, Value, is_contiguous, slice_for
from ..program.kinds import Copy, Fill, Pointwise, is_unwritten, kind_of
from .cuts import Box, cut_dimension
from .memory import allocate_huge
from .plan import Planner, RangeStep
from .reader import Reader, Wholes, flat
from .replay import Replay

# Elements of a task: what one thread makes in one go. Fewer where there are few in all, for all threads to have some.
_SPAN = 1 << 22
_LEAST_SPAN = 1 << 18
# A segment of so many elements takes 30 ms to draw natively and 100 without, against some ms for the jump to its start.
_SEGMENT = 1 << 25
_TASKS = 8  # that a thread has at least, for its share to be as large as the others'
_LEAST = 1 << 16  # elements of a segment that is worth a thread
_JUMP_COST = 1 << 14  # elements that could be drawn in the time that a task takes beside its elements
# Bytes of the blocks of rows of which columns are copied; they stay in a core's cache.
_ROWS_BYTES = 1 << 21
_APART_BYTES = 1 << 25  # rows so long are jumped to
# Copies out of less than this many bytes are made from the whole: that costs nothing there.
_WORTH = 1 << 16


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


class Task(NamedTuple):
    """A piece of work: its place in the order of recording and drawing, its cost in elements, and what to call."""

    order: tuple[int, int]
    cost: int
    run: Callable[[Reader], None]


def materialize_values(
    values: Iterable[Value],
    allocate: Callable[[Value], torch.Tensor] = allocate_huge,
    num_threads: int | None = None,
    done: Callable[[int], None] | None = None,
    niceness: Sequence[int] = (),
) -> dict[Value, torch.Tensor]:
    """Make all of each of `values`; returns for each a buffer laid out as it is, that nobody else holds.

    Args:
        allocate: gives the memory for a Value; called from several threads.
        num_threads: threads to draw with; default all cores of this process.
        done: told the number of bytes each time a piece has been made, by several threads.
        niceness: the first threads' priorities, where others are on the way to the first loss meanwhile.
    """
    wanted = list(dict.fromkeys(values))
    planner = Planner()
    ranged = by_range(wanted, planner)
    nodes = slice_for((value for value in wanted if value not in ranged), stop=ranged)
    hoisted = _hoisted(nodes, {value for value in wanted if value not in ranged}, planner)
    outputs = {value: _Output(value, allocate) for value in (*ranged, *hoisted)}
    span = sum(value.numel for value in outputs) // (_TASKS * (num_threads or default_threads()))
    span = min(max(span // _LEAST_SPAN, 1) * _LEAST_SPAN, _SPAN)
    tasks = [task for output in outputs.values() for task in _whole_tasks(output, planner, span, done)]
    covered = {node for chain in hoisted.values() for node in chain}
    rest = [node for node in nodes if node not in covered]
    with torch.no_grad(), DisableTorchDispatch():
        execute(tasks, Wholes(make_whole), planner, num_threads, niceness)
        made = {value: output.buffer() for value, output in outputs.items()}
        if len(ranged) < len(wanted):
            edited = set(wanted) & {ref.value for node in rest for ref in node.writes}
            replay = Replay(allocate)
            replay.buffers.update((v, buffer.clone() if v in edited else buffer) for v, buffer in made.items())
            _replay(replay, rest, num_threads, niceness)
            made.update((value, replay.buffer(value)) for value in wanted if value not in made)
        return {value: made[value] for value in wanted}


def make_whole(value: Value) -> torch.Tensor:
    """All of one Value."""
    return materialize_values([value])[value]


class WantedPart(NamedTuple):
    """A part of what a Ref shows and the memory it goes to: several where it is wanted several times."""

    box: Box
    into: list[torch.Tensor]


def materialize_parts(wanted: Iterable[tuple[Ref, list[WantedPart]]], niceness: Sequence[int] = ()) -> None:
    """Make the parts of what each Ref shows. What lies together in the stream is drawn together."""
    planner = Planner()
    with torch.no_grad(), DisableTorchDispatch():
        tasks = [task for ref, parts in wanted for task in _part_tasks(ref, parts, planner)]
        execute(tasks, Wholes(make_whole), planner, None, niceness)


def execute(
    tasks: list[Task],
    whole: Callable[[Value], torch.Tensor],
    planner: Planner,
    num_threads: int | None = None,
    niceness: Sequence[int] = (),
) -> None:
    """Do all tasks, on all cores; the first error ends the rest."""
    threads = num_threads or default_threads()
    failed = threading.Event()

    def work(segment: list[Task]) -> None:
        reader = Reader(whole, planner)
        with torch.no_grad(), DisableTorchDispatch():
            for task in segment:
                if failed.is_set():
                    return
                try:
                    task.run(reader)
                except BaseException:
                    failed.set()
                    raise

    segments = _segments(tasks, threads)
    if not niceness and len(segments) <= 1:
        for segment in segments:
            work(segment)
        return
    with ThreadPoolExecutor(threads, "firstloss-init", give_way(niceness)) as pool:
        for future in [pool.submit(work, segment) for segment in segments]:
            future.result()


def _segments(tasks: list[Task], threads: int) -> list[list[Task]]:
    """Cut the tasks, in stream order, into segments of about equal cost."""
    tasks = sorted(tasks, key=lambda task: task.order)
    total = sum(task.cost + _JUMP_COST for task in tasks)
    rounds = max(-(-total // (threads * _SEGMENT)), 1)  # alike for all threads, so that all end at once
    goal = max(total / (threads * rounds), _LEAST)
    segments: list[list[Task]] = []
    spent = 0
    for task in tasks:
        cost = task.cost + _JUMP_COST
        if spent + cost / 2 >= goal * len(segments):
            segments.append([])
        segments[-1].append(task)
        spent += cost
    return segments


# -- whole Values --------------------------------------------------------------------------------------------------


class _Output:
    """The memory of a Value. It is taken when its first piece is made, by the thread that makes it."""

    def __init__(self, value: Value, allocate: Callable[[Value], torch.Tensor]) -> None:
        self.value = value
        self._allocate = allocate
        self._lock = threading.Lock()
        self._buffer: torch.Tensor | None = None

    def buffer(self) -> torch.Tensor:
        """The memory, laid out as the Value is."""
        with self._lock:
            if self._buffer is None:
                self._buffer = self._allocate(self.value)
            return self._buffer


def _whole_tasks(output: _Output, planner: Planner, span: int, done: Callable[[int], None] | None) -> Iterator[Task]:
    value = output.value
    _resolve(value, planner)
    order = planner.first_draw(value)

    def make(begin: int, end: int, reader: Reader) -> None:
        if end - begin == value.numel:
            reader.make(value, output.buffer())
        else:
            reader.window(value, begin, end, flat(output.buffer(), value)[begin:end])
        if done is not None:
            done((end - begin) * value.dtype.itemsize)

    step = span if value.numel > span and planner.can_run(value, True) else max(value.numel, 1)
    for begin in range(0, value.numel, step):
        end = min(begin + step, value.numel)
        yield Task((order, begin), end - begin, partial(make, begin, end))


def _resolve(value: Value, planner: Planner, depth: int = 8) -> None:
    """Find where the streams that a recipe draws from begin, now, while all cores may be used for it."""
    for step in planner.plan(value, False).steps:
        if step.node.draw is not None:
            step.node.draw.stream.absolute(step.node.draw.position)
        for ref in _reads(step) if depth else ():
            if planner.can_run(ref.value, False):
                _resolve(ref.value, planner, depth - 1)


def by_range(wanted: Sequence[Value], planner: Planner) -> set[Value]:
    """Those of `wanted` that are made range by range: they share no work with others, or leave out some of it.

    A shard is nothing of its own kind. `fully_shard`, `distribute_tensor` or a user's `weight[:4].clone()` copy a view
    of the whole weight, and are recorded doing it; here such a copy makes just what it shows.
    """
    found = set()
    sources: dict[Value, list[Ref | None]] = {}
    for value in wanted:
        if not value.known and planner.can_run(value, False):
            reads = list(_sources(value, planner))
            if reads:
                sources[value] = reads
            elif planner.can_run(value, True):
                found.add(value)
    if not sources:
        return found
    users: dict[Value, int] = dict.fromkeys(wanted, 1)
    for node in slice_for(wanted):
        for value in {*node.reads(), *(ref.value for ref in node.writes if not node.overwrites)}:
            users[value] = users.get(value, 0) + 1
    parts = {value: [ref for ref in reads if ref is not None and _is_part(ref)] for value, reads in sources.items()}
    taken: dict[Value, int] = {}
    for ref in (ref for refs in parts.values() for ref in refs):
        taken[ref.value] = taken.get(ref.value, 0) + math.prod(ref.size)
    rest = slice_for(value for value in wanted if not parts.get(value))
    made_anyway = {value for node in rest for value in node.outputs}
    for value, reads in sources.items():
        alone = all(ref is not None and (_is_part(ref) or users.get(ref.value, 1) == 1) for ref in reads)
        leaves_out = any(r.value not in made_anyway and taken[r.value] < r.value.numel for r in parts[value])
        if alone and (leaves_out or not parts[value] and planner.can_run(value, True)):
            found.add(value)
    return found


def _is_part(ref: Ref) -> bool:
    """Whether a read takes so much less than the whole Value that the rest is worth leaving out."""
    return math.prod(ref.size) < ref.value.numel and ref.value.nbytes > _WORTH


def _sources(value: Value, planner: Planner, depth: int = 8) -> Iterator[Ref | None]:
    """The reads of Values that have to be made for a recipe, but are not what it makes; None if they are too many."""
    if not depth:
        yield None
        return
    for step in planner.plan(value, False).steps:
        for edit in step.edits:
            yield Ref.of(edit.target.value)
        if step.node.writes and not step.node.overwrites:
            yield Ref.of(step.does.target.value)
        for ref in _reads(step):
            yield ref
            if not _is_part(ref) and planner.can_run(ref.value, False):
                yield from _sources(ref.value, planner, depth - 1)


def _reads(step: RangeStep) -> list[Ref]:
    """What a step reads of Values that have to be made."""
    does = step.does
    if isinstance(does, Fill):
        return []
    operands = does.sources if isinstance(does, Copy) else does.args[1 if does.in_place else 0 :]
    refs = (a for a in operands if type(a) is Ref)
    return [ref for ref in refs if not ref.value.known and not is_unwritten(ref.value.node)]


def _hoisted(nodes: list[Node], wanted: set[Value], planner: Planner) -> dict[Value, list[Node]]:
    """The fills among `nodes`, each with the edits behind it that nobody else sees, by the Value that they make."""
    users: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in {*node.reads(), *(ref.value for ref in node.writes if not node.overwrites)}:
            users.setdefault(value, []).append(node)
    out: dict[Value, list[Node]] = {}
    for node in nodes:
        if node.draw is None or not isinstance(kind_of(node), Fill) or any(True for _ in node.reads()):
            continue
        (value,) = node.outputs
        plan = planner.plan(value, False)
        if plan.base is not None or len(plan.steps) != 1:
            continue
        chain = [node]
        while value not in wanted and len(users.get(value, ())) == 1:
            (user,) = users[value]
            does = kind_of(user)
            if not isinstance(does, Pointwise) or not does.in_place:
                break
            plan = planner.plan(user.outputs[0], False)
            if plan.base is not None or len(plan.steps) != 1 or len(plan.steps[0].edits) != len(chain):
                break
            chain.append(user)
            value = user.outputs[0]
        out[value] = chain
    return out


def _replay(shared: Replay, nodes: list[Node], num_threads: int | None, niceness: Sequence[int]) -> None:
    """Run what is left node by node; what touches no common Value, side by side."""

    def run_component(component: list[Node]) -> None:
        with DisableTorchDispatch():
            own = Replay(shared.allocate)
            own.buffers = shared.buffers  # components share no Value, and a dict may be written from several threads
            own.run(component)

    components = _components(nodes)
    if not components:
        return
    with ThreadPoolExecutor(num_threads or default_threads(), "firstloss-init", give_way(niceness)) as pool:
        for future in [pool.submit(run_component, component) for component in components]:
            future.result()


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


# -- parts -----------------------------------------------------------------------------------------------------------


def _part_tasks(ref: Ref, parts: list[WantedPart], planner: Planner) -> Iterator[Task]:
    """The work of some parts of what `ref` shows."""
    value = ref.value
    number = planner.first_draw(value)
    if not math.prod(ref.size):
        return
    straight = is_contiguous(ref.size, ref.stride) and ref.dtype == value.dtype
    if not (straight and planner.can_run(value, True)):
        yield Task((number, 0), value.numel, partial(_cut_whole, ref, parts))
        return
    _resolve(value, planner)
    strides = [math.prod(ref.size[d + 1 :]) for d in range(len(ref.size))]
    rows: dict[tuple[int, int], list[WantedPart]] = {}
    for part in parts:
        if not is_contiguous(part.box.size, strides):
            rows.setdefault((part.box.begin[0], part.box.size[0]), []).append(part)
            continue
        first = ref.offset + sum(b * s for b, s in zip(part.box.begin, strides, strict=True))
        count = math.prod(part.box.size)
        for begin in range(0, count, _SPAN):
            end = min(begin + _SPAN, count)
            yield Task((number, first + begin), end - begin, partial(_straight, value, first, begin, end, part))
    row = strides[0] if strides else 1
    for (begin, size), group in rows.items():
        if row * value.dtype.itemsize > _APART_BYTES and len(group) == 1:  # experts, say: rows apart
            yield Task((number, begin * row), size * row, partial(_apart, ref, group[0]))
            continue
        step = max(_SPAN // row, 1)
        for top in range(begin, begin + size, step):
            bottom = min(top + step, begin + size)
            yield Task((number, top * row), (bottom - top) * row, partial(_columns, ref, top, bottom, group))


def _straight(value: Value, first: int, begin: int, end: int, part: WantedPart, reader: Reader) -> None:
    """Elements [begin, end) of a part that lies straight in the whole, where its first one is number `first`."""
    own = part.into[0].view(-1)[begin:end]
    reader.window(value, first + begin, first + end, own)
    for other in part.into[1:]:
        other.view(-1)[begin:end].copy_(own)


def _columns(ref: Ref, top: int, bottom: int, group: list[WantedPart], reader: Reader) -> None:
    """Rows [top, bottom) of the whole, of which each part of the group takes its columns."""
    group = sorted(group, key=lambda part: part.box.begin)
    cut = cut_dimension(ref.size, [part.box for part in group])
    own = [[into[top - part.box.begin[0] : bottom - part.box.begin[0]] for into in part.into] for part in group]
    if cut is None or not reader.fill_columns(ref, cut, (top, bottom), [into[0] for into in own]):
        _copy_columns(reader, ref, top, bottom, group, own)
    for first, *others in own:
        for other in others:
            other.copy_(first)


def _copy_columns(
    reader: Reader, ref: Ref, top: int, bottom: int, group: list[WantedPart], own: list[list[torch.Tensor]]
) -> None:
    """Make the rows in blocks, of which the columns are copied."""
    row = math.prod(ref.size[1:])
    step = min(max(_ROWS_BYTES // (row * ref.dtype.itemsize), 1), bottom - top)
    memory = torch.empty(step * row, dtype=ref.dtype)
    columns = [_narrowed(memory.view(-1, *ref.size[1:]), part.box, 1) for part in group]
    blocks = [into[0].split(step) for into in own]
    for first, *rows in zip(range(top, bottom, step), *blocks, strict=True):
        count = len(rows[0])
        reader.window(ref.value, ref.offset + first * row, ref.offset + (first + count) * row, memory[: count * row])
        torch._foreach_copy_(rows, [part[:count] for part in columns])


def _apart(ref: Ref, part: WantedPart, reader: Reader) -> None:
    """A part whose rows lie so far apart that each is jumped to."""
    reader.materialize(ref, part.box, part.into[0])
    for other in part.into[1:]:
        other.copy_(part.into[0])


def _cut_whole(ref: Ref, parts: list[WantedPart], reader: Reader) -> None:
    """A weight that is made whole, or that is small: then each part is cut out of it."""
    if len(parts) == 1 and parts[0].box.size == ref.size:
        _apart(ref, parts[0], reader)
        return
    shown = ref.view(reader.content(ref.value))
    for part in parts:
        for into in part.into:
            into.copy_(_narrowed(shown, part.box))


def _narrowed(whole: torch.Tensor, box: Box, first: int = 0) -> torch.Tensor:
    for dim in range(first, whole.dim()):
        whole = whole.narrow(dim, box.begin[dim], box.size[dim])
    return whole
