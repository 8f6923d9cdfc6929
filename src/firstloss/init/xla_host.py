"""Shards made by PyTorch's kernels straight into the memory of JAX's CPU devices.

What lies together in the stream is drawn together, whichever devices it is for: rows are drawn once, and the columns
of each device copied out of blocks of them. Where the devices are not this machine's CPU, shards are made on the host
and sent.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import torch
from jax.sharding import Sharding

from ..engine import torch_engine
from ..engine.columns import cut_dimension, draw_columns
from ..engine.slices import Slicer, Wholes
from ..engine.torch_engine import default_threads, give_way
from ..lower.dtypes import to_jax
from ..lower.program import constant
from ..program.graph import Ref, Value, is_contiguous
from .shard_memory import Kind, tensor_at, unwritten

K = TypeVar("K")

# Elements that one thread makes in one go.
_SPAN = 1 << 22
# Bytes of the blocks of rows of which columns are copied; they stay in a core's cache.
_ROWS_BYTES = 1 << 21
_APART_BYTES = 1 << 25  # rows so long are jumped to
_STRETCHES = 2  # that a thread takes one after the other: none waits long for the last; each begins with a jump
_JUMP_COST = 1 << 18  # elements that could be drawn in the time of a jump


class Shard(NamedTuple):
    """A part of a weight and the memory it goes to: several where devices hold the same part."""

    begin: tuple[int, ...]
    size: tuple[int, ...]
    into: list[torch.Tensor]


class Task(NamedTuple):
    """A piece of work: its place in the order of recording and drawing, its cost in elements, and what to call."""

    order: tuple[int, int]
    cost: int
    run: Callable[[Slicer], None]


def make_on_host(wanted: Mapping[K, tuple[Ref, Sharding]], niceness: Sequence[int] = ()) -> dict[K, jax.Array]:
    """Arrays of what is `wanted`, by the same keys: each with what its Ref shows, lying as its sharding says.

    Args:
        niceness: as in `torch_engine.run`.
    """
    out: dict[K, jax.Array] = {}
    wholes = Wholes(torch_engine.make_whole)
    asking = Slicer(wholes)
    tasks: list[Task] = []
    sent: list[tuple[K, dict[Any, torch.Tensor]]] = []
    ours = [key for key, (_, sharding) in wanted.items() if _ours(sharding)]
    kinds = [Kind(ref.size, to_jax(ref.dtype), sharding) for ref, sharding in map(wanted.__getitem__, ours)]
    made = dict(zip(ours, unwritten(kinds), strict=True))
    out.update((key, array) for key, (array, _) in made.items())
    with torch._C._DisableTorchDispatch():
        for key, (ref, sharding) in wanted.items():
            shape, dtype = ref.size, ref.dtype
            if key in made:
                local = sharding.shard_shape(shape)
                memory = {device: tensor_at(at, local, dtype) for device, at in made[key][1].items()}
            else:
                places = sharding.addressable_devices_indices_map(shape)
                memory = {device: torch.empty(_extent(shape, i)[1], dtype=dtype) for device, i in places.items()}
                sent.append((key, memory))
            tasks += _tasks(ref, _shards(shape, sharding, memory), asking)
        _run(tasks, wholes, niceness)
    for key, memory in sent:
        ref, sharding = wanted[key]
        parts = [jax.device_put(constant(tensor), device) for device, tensor in memory.items()]
        out[key] = jax.make_array_from_single_device_arrays(ref.size, sharding, parts)
    return out


def _ours(sharding: Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _extent(shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ranges = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return tuple(r[0] for r in ranges), tuple(r[1] - r[0] for r in ranges)


def _shards(shape: tuple[int, ...], sharding: Sharding, memory: dict[Any, torch.Tensor]) -> list[Shard]:
    found: dict[Any, Shard] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        begin, size = _extent(shape, index or ())
        found.setdefault((begin, size), Shard(begin, size, [])).into.append(memory[device])
    return list(found.values())


def _tasks(ref: Ref, shards: list[Shard], asking: Slicer) -> Iterator[Task]:
    """The work of one weight's shards on this machine."""
    value = ref.value
    number = value.node.index if value.node is not None else 0
    numel = math.prod(ref.size)
    if not numel:
        return
    straight = is_contiguous(ref.size, ref.stride) and ref.dtype == value.dtype
    if not (straight and asking.cuttable(value)):
        yield Task((number, 0), value.numel, partial(_whole, ref, shards))
        return
    strides = [math.prod(ref.size[d + 1 :]) for d in range(len(ref.size))]
    rows: dict[tuple[int, int], list[Shard]] = {}
    for shard in shards:
        if not is_contiguous(shard.size, strides):
            rows.setdefault((shard.begin[0], shard.size[0]), []).append(shard)
            continue
        first = ref.offset + sum(b * s for b, s in zip(shard.begin, strides, strict=True))
        count = math.prod(shard.size)
        for begin in range(0, count, _SPAN):
            end = min(begin + _SPAN, count)
            yield Task((number, first + begin), end - begin, _straight(value, first, begin, end, shard))
    row = strides[0] if strides else 1
    for (begin, size), group in rows.items():
        if row * value.dtype.itemsize > _APART_BYTES and len(group) == 1:  # experts, say: rows apart
            yield Task((number, begin * row), size * row, partial(_apart, ref, group[0]))
            continue
        step = max(_SPAN // row, 1)
        for top in range(begin, begin + size, step):
            bottom = min(top + step, begin + size)
            yield Task((number, top * row), (bottom - top) * row, _columns(ref, top, bottom, group))


def _straight(value: Value, first: int, begin: int, end: int, shard: Shard) -> Callable[[Slicer], None]:
    def make(slicer: Slicer) -> None:
        part = shard.into[0].view(-1)[begin:end]
        slicer.window(value, first + begin, first + end, part)
        for other in shard.into[1:]:
            other.view(-1)[begin:end].copy_(part)

    return make


def _columns(ref: Ref, top: int, bottom: int, group: list[Shard]) -> Callable[[Slicer], None]:
    """Rows [top, bottom) of the whole, of which each shard of the group takes its columns."""
    group = sorted(group, key=lambda shard: shard.begin)
    cut = cut_dimension(ref.size, [shard.begin for shard in group], [shard.size for shard in group])

    def make(slicer: Slicer) -> None:
        own = [[into[top - shard.begin[0] : bottom - shard.begin[0]] for into in shard.into] for shard in group]
        if cut is None or not draw_columns(slicer, ref, cut, (top, bottom), [into[0] for into in own]):
            _copy_columns(slicer, ref, top, bottom, group, own)
        for first, *others in own:
            for other in others:
                other.copy_(first)

    return make


def _copy_columns(
    slicer: Slicer, ref: Ref, top: int, bottom: int, group: list[Shard], own: list[list[torch.Tensor]]
) -> None:
    """Make the rows in blocks, of which the columns are copied."""
    row = math.prod(ref.size[1:])
    step = min(max(_ROWS_BYTES // (row * ref.dtype.itemsize), 1), bottom - top)
    memory = torch.empty(step * row, dtype=ref.dtype)
    columns = []
    for shard in group:
        part = memory.view(-1, *ref.size[1:])
        for dim in range(1, len(ref.size)):
            part = part.narrow(dim, shard.begin[dim], shard.size[dim])
        columns.append(part)
    blocks = [into[0].split(step) for into in own]
    for first, *rows in zip(range(top, bottom, step), *blocks, strict=True):
        count = len(rows[0])
        slicer.window(ref.value, ref.offset + first * row, ref.offset + (first + count) * row, memory[: count * row])
        torch._foreach_copy_(rows, [part[:count] for part in columns])


def _apart(ref: Ref, shard: Shard, slicer: Slicer) -> None:
    offset = ref.offset + sum(b * s for b, s in zip(shard.begin, ref.stride, strict=True))
    slicer.read(ref._replace(size=shard.size, offset=offset), shard.into[0])
    for other in shard.into[1:]:
        other.copy_(shard.into[0])


def _whole(ref: Ref, shards: list[Shard], slicer: Slicer) -> None:
    """A weight that is made whole, or that is small: then each shard takes its part."""
    if len(shards) == 1 and shards[0].size == ref.size:
        slicer.read(ref, shards[0].into[0])
        for other in shards[0].into[1:]:
            other.copy_(shards[0].into[0])
        return
    shown = ref.view(slicer._buffer_of(ref.value))
    for shard in shards:
        part = shown
        for dim, (begin, size) in enumerate(zip(shard.begin, shard.size, strict=True)):
            part = part.narrow(dim, begin, size)
        for into in shard.into:
            into.copy_(part)


def _run(tasks: list[Task], wholes: Wholes, niceness: Sequence[int]) -> None:
    """Do all tasks, on all cores; a thread takes stretches of the stream, so that where one ends the next begins."""
    if not tasks:
        return
    tasks.sort(key=lambda task: task.order)
    threads = default_threads()
    total = sum(task.cost + _JUMP_COST for task in tasks)
    goal = max(total / threads / _STRETCHES, 1)
    stretches: list[list[Task]] = [[]]
    spent = 0
    for task in tasks:
        if spent >= goal * len(stretches):
            stretches.append([])
        stretches[-1].append(task)
        spent += task.cost + _JUMP_COST
    failed = threading.Event()

    def work(stretch: list[Task]) -> None:
        slicer = Slicer(wholes)
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for task in stretch:
                if failed.is_set():
                    return
                try:
                    task.run(slicer)
                except BaseException:
                    failed.set()
                    raise

    with ThreadPoolExecutor(threads, "firstloss-shards", give_way(niceness)) as pool:
        for future in [pool.submit(work, stretch) for stretch in stretches]:
            future.result()
