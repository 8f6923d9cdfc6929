"""The engine of shards: Values that copy a part of a larger one, made without the rest of it.

A shard is nothing of its own kind. `fully_shard`, `distribute_tensor` or a user's `weight[:4].clone()` copy a view of
the whole weight, and are recorded doing it; here such a copy makes just what it shows. A block of rows is drawn where
the stream has it; of a block of columns, blocks of rows are drawn and the columns kept.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from ..program.graph import Ref, Value, slice_for
from .slices import UNWRITTEN, Slicer, Wholes

# Elements that one thread makes in one go, of shards that may be cut.
_SPAN = 1 << 22
# Elements that could be drawn in the time of a jump.
_JUMP_COST = 1 << 18
# Copies out of less than this many bytes are left to the other engine: its way costs nothing there.
_WORTH = 1 << 16
# Recipes are searched for parts through so many copies (two meshes, a change of dtype).
_DEPTH = 4


def shards_among(values: Iterable[Value]) -> list[Value]:
    """Those of `values` that copy parts of larger Values, where making the parts alone saves work."""
    wanted = list(dict.fromkeys(values))
    parts = {value: list(_parts(value, _DEPTH)) for value in wanted}
    rest = slice_for(value for value in wanted if not parts[value])
    made_anyway = {value for node in rest for value in node.outputs}
    taken: dict[Value, int] = {}
    for refs in parts.values():
        for ref in refs:
            taken[ref.value] = taken.get(ref.value, 0) + math.prod(ref.size)
    return [
        value
        for value, refs in parts.items()
        if any(ref.value not in made_anyway and taken[ref.value] < ref.value.numel for ref in refs)
    ]


def _parts(value: Value, depth: int) -> Iterator[Ref]:
    """The reads of parts of larger Values in the recipe of `value`."""
    while not value.known and value.node is not None:
        node = value.node
        for ref in node.refs():
            source = ref.value
            if source.known or source.node is None or any(ref is target for target in node.writes):
                continue
            if math.prod(ref.size) < source.numel:
                if source.nbytes > _WORTH and source.node.op not in UNWRITTEN:
                    yield ref
            elif depth:
                yield from _parts(source, depth - 1)
        if node.overwrites or value not in node.outputs[: len(node.writes)]:
            return
        value = node.writes[node.outputs.index(value)].value


def run(
    values: Iterable[Value],
    whole: Callable[[Value], torch.Tensor],
    allocate: Callable[[Value], torch.Tensor],
    num_threads: int,
    done: Callable[[int], None] | None = None,
) -> dict[Value, torch.Tensor]:
    """Compute `values`; returns for each a buffer laid out as it is.

    Args:
        whole: makes a Value that has to be made whole; called by one thread at a time.
        allocate: gives the memory for a Value.
        num_threads: threads to draw with.
        done: told the number of bytes each time a part has been made, by one thread at a time.
    """
    wanted = sorted(dict.fromkeys(values), key=_order)
    wholes = Wholes(whole)
    asking = Slicer(wholes)
    lock = threading.Lock()
    buffers = {value: allocate(value) for value in wanted}
    work = []
    for value in wanted:
        step = _SPAN if value.numel > _SPAN and asking.cuttable(value) else max(value.numel, 1)
        work += [(value, begin, min(begin + step, value.numel)) for begin in range(0, value.numel, step)]

    def make(share: list[tuple[Value, int, int]]) -> None:
        slicer = Slicer(wholes)
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for value, begin, end in share:
                buffer = buffers[value]
                if end - begin == value.numel:
                    slicer.make(value, buffer)
                else:
                    slicer.window(value, begin, end, buffer.as_strided((end - begin,), (1,), begin))
                if done is not None:
                    with lock:
                        done((end - begin) * value.dtype.itemsize)

    # A thread takes a stretch of the stream: layers that are alike then lie at equal distances, and the polynomial of a
    # jump, which costs more than to apply it, is found once.
    shares = _shares(work, num_threads)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="firstloss-shards") as pool:
        for future in [pool.submit(make, share) for share in shares]:
            future.result()
    return buffers


def _shares(work: list[tuple[Value, int, int]], count: int) -> list[list[tuple[Value, int, int]]]:
    """Cut `work` into at most `count` stretches of about equal cost, in elements."""
    costs = [end - begin + _JUMP_COST for _, begin, end in work]
    goal = sum(costs) / count
    shares: list[list[tuple[Value, int, int]]] = [[] for _ in range(count)]
    spent = 0.0
    for item, cost in zip(work, costs, strict=True):
        shares[min(int((spent + cost / 2) / goal), count - 1)].append(item)
        spent += cost
    return [share for share in shares if share]


def _order(value: Value) -> int:
    """Recording order: much the same as that of the stream, in which jumps are short."""
    return value.node.index if value.node is not None else 0
