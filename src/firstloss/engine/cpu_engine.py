"""The CPU engine: materializes Values, or boxes of them, on all cores.

Almost all the work of a constructor is random fills, which depend only on their stream positions. It is split into
tasks, which are sorted by stream position and divided into segments of about equal cost. A thread runs one segment at a
time: a task usually begins where the previous one ended in the stream, and only a gap (a dead fill, another device's
shard) requires a jump. Operations that cannot be run on a range are replayed afterwards, node by node, with independent
ones in parallel.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch

from ..compat.torch_names import DisableTorchDispatch
from ..interpreter import cores
from ..program.graph import Node, Ref, Value, is_contiguous, slice_for
from ..program.node_kinds import Copy, Fill, Pointwise, is_unwritten, kind_of
from ..workers import Workers
from .huge_pages import allocate_huge
from .plan import RangePlanner, RangeStep
from .reader import Reader, WholeValueCache, flat
from .replay import Replay
from .splits import Box, cut_dimension

# Elements per task; fewer if there are few in total, so that all threads have work.
_TASK_SIZE = 1 << 22
_MIN_TASK_SIZE = 1 << 18
# Elements per segment: 30 ms with the native kernels and 100 ms without, plus a few ms for the jump.
_SEGMENT_SIZE = 1 << 25
_TASKS_PER_THREAD = 8  # at least, so that all threads finish at about the same time
_MIN_SEGMENT_SIZE = 1 << 16  # smaller segments are not worth a thread
_JUMP_COST = 1 << 14  # the fixed cost of a task, in elements drawn
_ROW_BLOCK_BYTES = 1 << 21  # of rows from which columns are copied; fits in a core's cache
_LONG_ROW_BYTES = 1 << 25  # jump to each row that is longer
_SMALL_BYTES = 1 << 16  # a smaller Value is made whole even if only a part of it is copied


def lower_thread_priority(niceness: Sequence[int]) -> Callable[[], None]:
    """An initializer for a thread pool that sets the n-th thread's niceness to the n-th of `niceness`, default 0.

    Threads with a lower priority yield to work that the first loss waits for.
    """
    values = iter(niceness)

    def lower_priority() -> None:
        priority = next(values, 0)
        if priority and sys.platform == "linux":  # on other systems niceness applies to the whole process
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), priority)

    return lower_priority


class Task(NamedTuple):
    """A unit of work: its place in stream order, its cost in elements, and a function."""

    order: tuple[int, int]
    cost: int
    run: Callable[[Reader], None]


def materialize_values(
    values: Iterable[Value],
    allocate: Callable[[Value], torch.Tensor] = allocate_huge,
    num_threads: int | None = None,
    on_progress: Callable[[int], None] | None = None,
    niceness: Sequence[int] = (),
) -> dict[Value, torch.Tensor]:
    """Materialize Values; returns a new buffer for each, with its layout.

    Args:
        allocate: allocates the buffer of a Value; called from several threads.
        num_threads: defaults to all cores of this process.
        on_progress: called from several threads with the number of bytes of each finished piece.
        niceness: of the first threads, so that they yield to work that the first loss waits for.
    """
    requested = list(dict.fromkeys(values))
    planner = RangePlanner()
    ranged = by_range(requested, planner)
    nodes = slice_for((value for value in requested if value not in ranged), stop=ranged)
    hoisted = _hoisted(nodes, {value for value in requested if value not in ranged}, planner)
    outputs = {value: _Output(value, allocate) for value in (*ranged, *hoisted)}
    size = sum(value.numel for value in outputs) // (_TASKS_PER_THREAD * (num_threads or cores()))
    size = min(max(size // _MIN_TASK_SIZE, 1) * _MIN_TASK_SIZE, _TASK_SIZE)
    tasks = [task for output in outputs.values() for task in _whole_value_tasks(output, planner, size, on_progress)]
    covered = {node for chain in hoisted.values() for node in chain}
    rest = [node for node in nodes if node not in covered]
    with torch.no_grad(), DisableTorchDispatch():
        execute(tasks, WholeValueCache(materialize_whole), planner, num_threads, niceness)
        buffers = {value: output.buffer() for value, output in outputs.items()}
        missing = [value for value in requested if value not in buffers]
        if missing:
            edited = set(requested) & {ref.value for node in rest for ref in node.writes}
            replay = Replay(allocate)
            replay.buffers.update((v, buffer.clone() if v in edited else buffer) for v, buffer in buffers.items())
            _replay(replay, rest, num_threads, niceness)
            buffers.update((value, replay.buffer(value)) for value in missing)
        return {value: buffers[value] for value in requested}


def materialize_whole(value: Value) -> torch.Tensor:
    """Materialize one Value."""
    return materialize_values([value])[value]


class WantedPart(NamedTuple):
    """A part of a Ref, and the tensors to write it to."""

    box: Box
    into: list[torch.Tensor]


def materialize_parts(parts_by_ref: Iterable[tuple[Ref, list[WantedPart]]], niceness: Sequence[int] = ()) -> None:
    """Materialize parts of Refs; parts that are adjacent in the stream are drawn together."""
    planner = RangePlanner()
    with torch.no_grad(), DisableTorchDispatch():
        tasks = [task for ref, parts in parts_by_ref for task in _part_tasks(ref, parts, planner)]
        execute(tasks, WholeValueCache(materialize_whole), planner, None, niceness)


def execute(
    tasks: list[Task],
    whole: Callable[[Value], torch.Tensor],
    planner: RangePlanner,
    num_threads: int | None = None,
    niceness: Sequence[int] = (),
) -> None:
    """Run tasks on all cores; the first error cancels the rest."""
    threads = num_threads or cores()
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
    with Workers(threads, "firstloss-init", lower_thread_priority(niceness)) as workers:
        workers.map(work, segments)


def _segments(tasks: list[Task], threads: int) -> list[list[Task]]:
    """Divide the tasks, in stream order, into segments of about equal cost."""
    tasks = sorted(tasks, key=lambda task: task.order)
    total = sum(task.cost + _JUMP_COST for task in tasks)
    rounds = max(-(-total // (threads * _SEGMENT_SIZE)), 1)  # the same for each thread, so that all finish together
    goal = max(total / (threads * rounds), _MIN_SEGMENT_SIZE)
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
    """The buffer of a Value, allocated by the thread that makes its first piece."""

    def __init__(self, value: Value, allocate: Callable[[Value], torch.Tensor]) -> None:
        self.value = value
        self._allocate = allocate
        self._lock = threading.Lock()
        self._buffer: torch.Tensor | None = None

    def buffer(self) -> torch.Tensor:
        """The buffer, with the layout of the Value."""
        with self._lock:
            if self._buffer is None:
                self._buffer = self._allocate(self.value)
            return self._buffer


def _whole_value_tasks(
    output: _Output, planner: RangePlanner, size: int, on_progress: Callable[[int], None] | None
) -> Iterator[Task]:
    value = output.value
    _resolve(value, planner)
    order = planner.first_draw(value)

    def make(begin: int, end: int, reader: Reader) -> None:
        if end - begin == value.numel:
            reader.materialize_whole(value, output.buffer())
        else:
            reader.window(value, begin, end, flat(output.buffer(), value)[begin:end])
        if on_progress is not None:
            on_progress((end - begin) * value.dtype.itemsize)

    step = size if value.numel > size and planner.can_run(value, True) else max(value.numel, 1)
    for begin in range(0, value.numel, step):
        end = min(begin + step, value.numel)
        yield Task((order, begin), end - begin, partial(make, begin, end))


def _resolve(value: Value, planner: RangePlanner, depth: int = 8) -> None:
    """Resolve the origins of the deferred streams that a recipe draws from, while all cores are free."""
    for step in planner.plan(value, False).steps:
        if step.node.draw is not None:
            step.node.draw.stream.absolute(step.node.draw.position)
        for ref in _reads(step) if depth else ():
            if planner.can_run(ref.value, False):
                _resolve(ref.value, planner, depth - 1)


def by_range(requested: Sequence[Value], planner: RangePlanner) -> set[Value]:
    """The Values to make by ranges: those that share no work with others, or need only a part of another Value.

    Shards are no special case: `fully_shard`, `distribute_tensor` or a user's `weight[:4].clone()` copy a view of the
    whole weight, which is recorded like any operation. Only the elements that such a copy reads are made.
    """
    ranged = set()
    sources: dict[Value, list[Ref | None]] = {}
    for value in requested:
        if not value.known and planner.can_run(value, False):
            reads = list(_sources(value, planner))
            if reads:
                sources[value] = reads
            elif planner.can_run(value, True):
                ranged.add(value)
    if not sources:
        return ranged
    users: dict[Value, int] = dict.fromkeys(requested, 1)
    for node in slice_for(requested):
        for value in {*node.reads(), *(ref.value for ref in node.writes if not node.overwrites)}:
            users[value] = users.get(value, 0) + 1
    parts = {value: [ref for ref in reads if ref is not None and _is_part(ref)] for value, reads in sources.items()}
    elements_read: dict[Value, int] = {}
    for ref in (ref for refs in parts.values() for ref in refs):
        elements_read[ref.value] = elements_read.get(ref.value, 0) + math.prod(ref.size)
    rest = slice_for(value for value in requested if not parts.get(value))
    made_anyway = {value for node in rest for value in node.outputs}
    for value, reads in sources.items():
        alone = all(ref is not None and (_is_part(ref) or users.get(ref.value, 1) == 1) for ref in reads)
        leaves_out = any(r.value not in made_anyway and elements_read[r.value] < r.value.numel for r in parts[value])
        if alone and (leaves_out or not parts[value] and planner.can_run(value, True)):
            ranged.add(value)
    return ranged


def _is_part(ref: Ref) -> bool:
    """Whether making only the elements that `ref` reads pays."""
    return math.prod(ref.size) < ref.value.numel and ref.value.nbytes > _SMALL_BYTES


def _sources(value: Value, planner: RangePlanner, depth: int = 8) -> Iterator[Ref | None]:
    """The Refs that a recipe reads and that have to be made; yields None if there are too many."""
    if not depth:
        yield None
        return
    for step in planner.plan(value, False).steps:
        for edit in step.edits:
            yield Ref.of(edit.target.value)
        if step.node.writes and not step.node.overwrites:
            yield Ref.of(step.kind.target.value)
        for ref in _reads(step):
            yield ref
            if not _is_part(ref) and planner.can_run(ref.value, False):
                yield from _sources(ref.value, planner, depth - 1)


def _reads(step: RangeStep) -> list[Ref]:
    """The reads, by a step, of Values that have to be made."""
    kind = step.kind
    if isinstance(kind, Fill):
        return []
    operands = kind.sources if isinstance(kind, Copy) else kind.args[1 if kind.in_place else 0 :]
    refs = (a for a in operands if type(a) is Ref)
    return [ref for ref in refs if not ref.value.known and not is_unwritten(ref.value.node)]


def _hoisted(nodes: list[Node], requested: set[Value], planner: RangePlanner) -> dict[Value, list[Node]]:
    """The fills among `nodes`, each with the following edits that are its only users, by the resulting Value."""
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
        while value not in requested and len(users.get(value, ())) == 1:
            (user,) = users[value]
            kind = kind_of(user)
            if not isinstance(kind, Pointwise) or not kind.in_place:
                break
            plan = planner.plan(user.outputs[0], False)
            if plan.base is not None or len(plan.steps) != 1 or len(plan.steps[0].edits) != len(chain):
                break
            chain.append(user)
            value = user.outputs[0]
        out[value] = chain
    return out


def _replay(shared: Replay, nodes: list[Node], num_threads: int | None, niceness: Sequence[int]) -> None:
    """Replay the remaining nodes; groups that share no Value run in parallel."""

    def run_component(component: list[Node]) -> None:
        with DisableTorchDispatch():
            replay = Replay(shared.allocate)
            replay.buffers = shared.buffers  # groups share no Value, and a dict may be written from several threads
            replay.run(component)

    components = _components(nodes)
    if not components:
        return
    with Workers(num_threads or cores(), "firstloss-init", lower_thread_priority(niceness)) as workers:
        workers.map(run_component, components)


def _components(nodes: list[Node]) -> list[list[Node]]:
    """Groups of nodes that share no Value, each in the order of recording."""
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


def _part_tasks(ref: Ref, parts: list[WantedPart], planner: RangePlanner) -> Iterator[Task]:
    """The tasks for some parts of `ref`."""
    value = ref.value
    number = planner.first_draw(value)
    if not math.prod(ref.size):
        return
    contiguous = is_contiguous(ref.size, ref.stride) and ref.dtype == value.dtype
    if not (contiguous and planner.can_run(value, True)):
        yield Task((number, 0), value.numel, partial(_copy_from_whole, ref, parts))
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
        for begin in range(0, count, _TASK_SIZE):
            end = min(begin + _TASK_SIZE, count)
            make = partial(_materialize_contiguous, value, first, begin, end, part)
            yield Task((number, first + begin), end - begin, make)
    row = strides[0] if strides else 1
    for (begin, size), group in rows.items():
        if row * value.dtype.itemsize > _LONG_ROW_BYTES and len(group) == 1:  # of experts, for example
            yield Task((number, begin * row), size * row, partial(_materialize_alone, ref, group[0]))
            continue
        step = max(_TASK_SIZE // row, 1)
        for top in range(begin, begin + size, step):
            bottom = min(top + step, begin + size)
            run = partial(_materialize_columns, ref, top, bottom, group)
            yield Task((number, top * row), (bottom - top) * row, run)


def _materialize_contiguous(value: Value, first: int, begin: int, end: int, part: WantedPart, reader: Reader) -> None:
    """Elements [begin, end) of a part that is contiguous in the whole, where it begins at element `first`."""
    target = part.into[0].view(-1)[begin:end]
    reader.window(value, first + begin, first + end, target)
    for other in part.into[1:]:
        other.view(-1)[begin:end].copy_(target)


def _materialize_columns(ref: Ref, top: int, bottom: int, group: list[WantedPart], reader: Reader) -> None:
    """Rows [top, bottom) of the whole, split by columns into the parts of the group."""
    group = sorted(group, key=lambda part: part.box.begin)
    cut = cut_dimension(ref.size, [part.box for part in group])
    targets = [[into[top - part.box.begin[0] : bottom - part.box.begin[0]] for into in part.into] for part in group]
    if cut is None or not reader.fill_columns(ref, cut, (top, bottom), [into[0] for into in targets]):
        _copy_columns(reader, ref, top, bottom, group, targets)
    for first, *others in targets:
        for other in others:
            other.copy_(first)


def _copy_columns(
    reader: Reader, ref: Ref, top: int, bottom: int, group: list[WantedPart], targets: list[list[torch.Tensor]]
) -> None:
    """Make the rows in blocks, and copy the columns from them."""
    row = math.prod(ref.size[1:])
    step = min(max(_ROW_BLOCK_BYTES // (row * ref.dtype.itemsize), 1), bottom - top)
    memory = torch.empty(step * row, dtype=ref.dtype)
    columns = [_narrowed(memory.view(-1, *ref.size[1:]), part.box, 1) for part in group]
    blocks = [into[0].split(step) for into in targets]
    for first, *rows in zip(range(top, bottom, step), *blocks, strict=True):
        count = len(rows[0])
        reader.window(ref.value, ref.offset + first * row, ref.offset + (first + count) * row, memory[: count * row])
        torch._foreach_copy_(rows, [part[:count] for part in columns])


def _materialize_alone(ref: Ref, part: WantedPart, reader: Reader) -> None:
    """Make one part by itself."""
    reader.materialize(ref, part.box, part.into[0])
    for other in part.into[1:]:
        other.copy_(part.into[0])


def _copy_from_whole(ref: Ref, parts: list[WantedPart], reader: Reader) -> None:
    """Make a whole Value, because it has no plan for a range, and copy the parts from it."""
    if len(parts) == 1 and parts[0].box.size == ref.size:
        _materialize_alone(ref, parts[0], reader)
        return
    whole = ref.view(reader.content(ref.value))
    for part in parts:
        for into in part.into:
            into.copy_(_narrowed(whole, part.box))


def _narrowed(whole: torch.Tensor, box: Box, first: int = 0) -> torch.Tensor:
    for dim in range(first, whole.dim()):
        whole = whole.narrow(dim, box.begin[dim], box.size[dim])
    return whole
