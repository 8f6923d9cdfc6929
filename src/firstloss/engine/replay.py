"""Execute nodes one by one, in the order in which they were recorded.

Every storage is one buffer, views are views of it, and in-place operations are in place, so aliasing works as in eager
PyTorch. Only the slice of the requested Values is run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

import torch

from ..errors import MaterializeError
from ..program.graph import Draw, Node, Ref, Value, slice_for
from ..program.node_kinds import DEPENDS_ON_GRAD_MODE, Fill, has_counter_rule, kind_of
from ..rng.counter_stream import CounterStream
from ..rng.stream import PhiloxStream
from . import counter_fill
from .sampler import call_with

# Computed Values up to this size are cached, so that code that reads a captured tensor element by element does not
# run its recipe each time.
_MAX_CACHED_BYTES = 1 << 16


class _UnexpectedResult:
    """Stands for a result whose shape or dtype differs from what its meta kernel predicted, as that of a kernel's
    workspace does. It may be handed on whole, as to the kernel's backward pass; any other use is an error."""

    def __init__(self, tensor: torch.Tensor | None, message: str) -> None:
        self._tensor = tensor
        self._message = message

    def handed_on(self, whole: bool) -> torch.Tensor:
        """The result as an argument; `whole`: without a view."""
        if self._tensor is None or not whole:
            self.refuse()
        return self._tensor

    def refuse(self) -> NoReturn:
        raise MaterializeError(self._message)


def _with_predicted_layout(
    tensor: torch.Tensor | None, value: Value, node: Node, allocate: Callable[[Value], torch.Tensor]
) -> torch.Tensor | _UnexpectedResult:
    """A result of `node`, with the strides that capture predicted."""
    if tensor is None:
        return _UnexpectedResult(
            None,
            f"{node.source}: {node.op} returned None instead of a tensor of shape {list(value.shape)}, which capture "
            "predicted",
        )
    if tensor.dtype != value.dtype or tensor.shape != value.shape:
        return _UnexpectedResult(
            tensor,
            f"{node.source}: {node.op} returned {tensor.dtype} {list(tensor.shape)} instead of {value.dtype} "
            f"{list(value.shape)}, which capture predicted. Please report this constructor. As a workaround, call "
            "firstloss.materialize_tensor right after that line, inside the constructor.",
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.stride() == value.stride and tensor.storage_offset() == 0:
        return tensor
    return allocate(value).copy_(tensor)


class Replay:
    """Executes nodes; holds the buffer of each Value."""

    def __init__(self, allocate: Callable[[Value], torch.Tensor] = Value.empty) -> None:
        self.buffers: dict[Value, torch.Tensor] = {}
        self.allocate = allocate
        self._allocate_result: Callable[[Value], torch.Tensor] = (
            Value.empty
        )  # for a result whose strides differ from the prediction
        self._generator = torch.Generator()

    def buffer(self, value: Value) -> torch.Tensor:
        """The buffer of `value`: computed, known, or uninitialized memory."""
        buffer = self.buffers.get(value)
        if buffer is None:
            buffer = self.allocate(value)
            if value.known:
                buffer.copy_(value.content())  # a copy, since later nodes may write to it
            self.buffers[value] = buffer
        if type(buffer) is _UnexpectedResult:
            buffer.refuse()
        return buffer

    def run(self, nodes: Iterable[Node]) -> None:
        """Execute `nodes`, which must be in the order of recording, with as many threads as their constructor had."""
        before = threads = torch.get_num_threads()
        try:
            with torch.no_grad():
                for node in nodes:
                    if node.threads != threads:
                        threads = node.threads
                        torch.set_num_threads(threads)
                    self._run_one(node)
        finally:
            if threads != before:
                torch.set_num_threads(before)

    def _run_one(self, node: Node) -> None:
        for value in node.reads():
            if type(self.buffers.get(value)) is not _UnexpectedResult:
                self.buffer(value)
        if node.overwrites:
            self.buffers.setdefault(node.writes[0].value, self._fresh_target(node))
        args = [self._real(a) for a in node.args]
        kwargs = {k: self._real(v) for k, v in node.kwargs.items()}
        if node.writes:
            args = _distinct(args)
        if node.op is DEPENDS_ON_GRAD_MODE:
            with torch.set_grad_enabled(args[-1]):
                result = node.op(*args, **kwargs)
        else:
            result = node.op(*args, **kwargs) if node.draw is None else self._draw(node, node.draw, args, kwargs)
        for ref, value in zip(node.writes, node.outputs, strict=False):
            self.buffers[value] = self.buffers[ref.value]
        new_outputs = node.outputs[len(node.writes) :]
        if new_outputs:
            self._store_results(node, new_outputs, new_tensors(result, len(new_outputs)))

    def _store_results(self, node: Node, values: Sequence[Value], tensors: Sequence[torch.Tensor | None]) -> None:
        """Store the new tensors that `node` has returned."""
        for value, tensor in zip(values, tensors, strict=True):
            buffer = _with_predicted_layout(tensor, value, node, self._allocate_result)
            self.buffers[value] = buffer  # type: ignore[assignment] # `buffer` raises the error

    def _draw(self, node: Node, draw: Draw, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Execute a random operation at its stream position."""
        stream, position = draw.stream, draw.position
        if isinstance(stream, PhiloxStream):
            generator = torch.Generator(node.outputs[0].device)
        else:
            kind = kind_of(node)
            if isinstance(stream, CounterStream) and isinstance(kind, Fill) and has_counter_rule(node.op):
                target = args[0] if node.writes else node.outputs[0].empty()
                counter_fill.fill(kind.name, target, *kind.pair, stream, position)
                return target
            generator = self._generator
        generator.set_state(torch.from_numpy(stream.state_at(position)))
        return call_with(node.op, args, kwargs, generator)

    def _fresh_target(self, node: Node) -> torch.Tensor:
        value = node.writes[0].value
        buffer = self.buffers.get(value)
        return buffer if buffer is not None else self.allocate(value)

    def _real(self, arg: Any) -> Any:
        if type(arg) is Ref:
            buffer = self.buffers[arg.value]
            return buffer.handed_on(arg.whole) if type(buffer) is _UnexpectedResult else arg.view(buffer)
        if type(arg) in (list, tuple):
            return [self._real(a) for a in arg]
        return arg


def last_reads(nodes: Iterable[Node], keep: Collection[Value]) -> dict[int, list[Value]]:
    """For each node's index, the Values that no later node reads, whose memory can be freed; never those of `keep`."""
    last: dict[Value, int] = {}
    for node in nodes:
        for value in (*node.reads(), *(ref.value for ref in node.writes), *node.outputs):
            last[value] = node.index
    freed: dict[int, list[Value]] = {}
    for value, index in last.items():
        if value not in keep:
            freed.setdefault(index, []).append(value)
    return freed


def new_tensors(result: Any, count: int) -> list[torch.Tensor | None]:
    """The last `count` results of an operation, which follow those that it has written to; kernels may return None."""
    results = (result,) if isinstance(result, torch.Tensor) else result
    tensors: list[torch.Tensor | None] = [r for r in results if isinstance(r, torch.Tensor)]
    if len(tensors) < count:
        tensors = [r for r in results if r is None or isinstance(r, torch.Tensor)]
    return tensors[max(len(tensors) - count, 0) :]


def _distinct(args: list[Any]) -> list[Any]:
    """`args` without repeated tensors: PyTorch refuses these as overlapping even if they are empty."""
    ids = {id(arg) for arg in args}
    if len(ids) == len(args):
        return args
    return [arg.detach() if i and isinstance(arg, torch.Tensor) else arg for i, arg in enumerate(args)]


def materialize_whole(value: Value) -> torch.Tensor:
    """Compute one Value, in new memory."""
    replay = Replay()
    replay.run(slice_for([value]))
    return replay.buffer(value)


def compute(refs: list[Ref]) -> list[torch.Tensor]:
    """Compute `refs`, in new memory; caches small Values."""
    values = {ref.value for ref in refs}
    replay = Replay()
    replay.run(slice_for(values))
    for value in values:
        if not value.known and value.nbytes <= _MAX_CACHED_BYTES:
            value.real = replay.buffer(value).clone()
    return [ref.view(replay.buffer(ref.value)) for ref in refs]
