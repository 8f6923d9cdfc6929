"""The recorder: every ATen operation on a deferred tensor is dispatched here, and becomes a node of the Program.

To record an operation, look up its arguments' Values, infer the shapes of its results, create a `Node`, and give the
storages that it writes to new Values. Nothing is computed.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from torch.ops import aten

from ..compat import patches
from ..compat.torch_names import DisableTorchDispatch, OpOverload, TorchDispatchMode
from ..errors import CaptureError
from ..program.graph import Node, Ref, Value, contiguous_stride, dense_count, is_not_strided, span
from ..program.node_kinds import DEPENDS_ON_GRAD_MODE
from ..program.source import here
from ..rng.stream import Position
from . import collectives, conjugate_views, distributed, evaluation, first_use, host_kernels, materialize_tensors
from .conjugate_bits import NONE, lazy_bits
from .constant_folding import draw_now, fold_call, known_value
from .constants import constant_tensor
from .evaluation import Traced, copy_alone, run_for_real, run_from_file, run_now, run_on_resident, state_of
from .mapped_file import in_file
from .metadata_mutation import resize
from .op_call import OpCall, is_composite, is_symbolic, outer_geometry, ref_of, storage_of, traits_of, views
from .op_overrides import HANDLERS
from .random_ops import draws_at_all, record_draw
from .session import Tracing as _Tracing
from .session import enter, generators, leave, set_trace, this_thread
from .shapes import NeedsValues, as_meta, infer
from .symbolic_scalars import number_ref, with_known_positions
from .tensor import DeferredStorage, DeferredTensor, Hooks, has_foreign_subclass, is_in_file

__all__ = [
    "DeferredStorage",
    "DeferredTensor",
    "_Tracing",
    "dispatch",
    "enter",
    "generators",
    "leave",
    "position_of",
    "set_trace",
]

Tensor = torch.Tensor

_counter = itertools.count()


def new_index() -> int:
    """The index of the next node, in the order of recording."""
    return next(_counter)


# Operations of checkpoint loaders, recorded on tensors that are still in their file.
_LOADING = frozenset(
    {aten._to_copy.default, aten.clone.default, aten.cat.default, aten.stack.default, aten.contiguous.default}
)
_USED_BY_LOADERS = (aten.detach.default, aten.copy_.default)
_EMPTY = (aten.empty.memory_format, aten.empty_strided.default)


def dispatch(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a call of `op`: record it if possible, run it if it needs values."""
    handler = HANDLERS.get(op.name())
    if handler is not None:
        return handler(op, args, kwargs)
    traits = traits_of(op)
    if traits.no_tensors:
        return op(*args, **kwargs)
    if traits.replacement is not None:
        return conjugate_views.view_lazily(op, traits.replacement, args, kwargs)
    call = OpCall(op, traits, args, kwargs)
    if traits.writes and call.is_foreach:  # above the dispatcher PyTorch does this for single tensors only
        torch.autograd.graph.increment_version([t for t in call.written() if not t.is_inference()])
    trace, depth = this_thread.trace, this_thread.depth
    if traits.namespace in distributed.COLLECTIVES and call.deferred and (depth or trace is not None):
        if trace is None:
            distributed.refuse(op)
        return collectives.run(op, args, kwargs)
    if trace is None:
        on_backend = False
        for tensor in call.deferred:
            storage = tensor._storage
            if storage.trace is not None and state_of(storage) is Traced:
                Traced.content(tensor)  # raises
            on_backend = on_backend or storage.resident is not None
        if not call.deferred and (call.real or call.on_meta):
            reads_file = depth and op in _LOADING and any(in_file(t) is not None for t in call.real)
            if not reads_file:
                return run_for_real(call)
        if on_backend:
            return run_on_resident(call)
        if not depth:
            if op in _USED_BY_LOADERS:
                patches.install_imported()
            if this_thread.copies_alone and (copied := copy_alone(call)) is not None:
                return copied
            if first_use.needs_values(call):
                return first_use.run(call)
        if any(map(is_not_strided, call.real)) or (traits.opaque and not traits.view):
            return run_now(call)
        if call.deferred and not depth and not traits.view and all(map(is_in_file, call.deferred)):
            return run_from_file(call)
        if traits.writes and (real := [type(t) is not DeferredTensor for t in call.written()]) and any(real):
            return run_for_real(call) if all(real) else run_now(call)
    else:
        for outer in call.real:
            if is_not_strided(outer):
                call.refuse_layout(outer)
    return _record(call)


class CaptureMode(TorchDispatchMode):
    """Dispatches factory functions, which have no deferred tensor among their arguments, to the recorder."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler (a second) to wrap the method below

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if has_foreign_subclass(
            types
        ):  # its __torch_dispatch__ calls operations on deferred tensors, which are recorded
            return func(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return dispatch(func, args, kwargs or {})


def _record(call: OpCall) -> Any:
    traits, trace = call.traits, this_thread.trace
    if call.op is DEPENDS_ON_GRAD_MODE:  # record the grad mode as its last argument
        call = OpCall(call.op, traits, (*call.args[:-1], torch.is_grad_enabled()), call.kwargs)
    if trace is not None and trace.constants:
        call = trace.constants_as_inputs(call)
    as_given = call
    if call.symbolic:
        call, as_given = with_known_positions(call)
    if trace is not None:
        for t in call.deferred:
            if t._storage.trace is not trace:
                trace.adopt(t._storage)
    geometry: list[Any] | None = None  # Any: None for gradients that are not requested
    if not traits.fill:
        try:
            geometry, default = infer(as_given)
        except NeedsValues:
            if trace is None:
                return run_now(call)
            found = fold_call(call, known_value)
            if found is None:
                found = fold_call(call, functools.partial(trace.read, op=call.op), trace.computed_from_reads)
            return trace.refuse_read(call.op) if found is None else found
        if default is not None:
            call = _with_dtype(call, default)
    if traits.view:
        assert geometry is not None
        storage = call.deferred[0]._storage if call.deferred else storage_of(call.real[0])
        if not call.deferred and trace is not None:
            shift = outer_geometry(call.real[0])[2] - int(call.real[0].storage_offset())
            geometry = [(size, stride, offset + shift, dtype) for size, stride, offset, dtype in geometry]
        if call.op is aten.as_strided.default:
            _refuse_beyond(storage, geometry[0])
        return views(call, storage, geometry)

    if traits.random is not None and trace is not None and draws_at_all(call):
        if trace.draws_now(call.generator_argument()):
            return draw_now(call, functools.partial(trace.read, op=call.op), trace.computed_from_reads)
    targets = call.written()
    if traits.random is not None and trace is None and len(targets) == 1 and _is_separate_draw(targets[0]):
        return _draw_separately(call, targets[0])
    if traits.fill and call.op is aten.copy_.default and _is_same_memory(*call.args[:2]):
        return targets[0]  # matmul copies to an `out` that already is the result
    if len(targets) > 1 and len({id(storage_of(t)) for t in targets}) < len(targets):
        return _write_one_by_one(call, targets)
    if traits.out and geometry:
        for target, (size, *_) in zip(targets, geometry, strict=False):
            if tuple(target.shape) != size and type(target) is DeferredTensor:
                resize(target, size)
    writes = tuple(ref_of(t) for t in targets)
    overwrites = traits.fill and len(writes) == 1 and writes[0].covers and _deduplicated(call, targets[0])
    written_refs: dict[Any, Ref] = {}  # the Refs that are written through, by Ref and by the tensor's id
    for target, ref in zip(targets, writes, strict=True):
        written_refs[id(target)] = written_refs[ref] = ref
    node_args = _with_refs(call.args, written_refs)
    node_kwargs = {k: _with_ref(v, written_refs) for k, v in call.kwargs.items()} if call.kwargs else call.kwargs
    node = Node(new_index(), call.op, node_args, node_kwargs, writes, overwrites, None, here())

    if traits.random is not None and draws_at_all(call):
        if trace is not None:
            trace.key_draw(node, call.generator_argument())
        elif not record_draw(call, node, geometry):
            return run_now(call)
        node.args = tuple(None if isinstance(a, torch.Generator) else a for a in node.args)
        if "generator" in node.kwargs:
            node.kwargs = {**node.kwargs, "generator": None}

    storages = [storage_of(target) for target in targets]
    if trace is not None and trace.memory_given:
        trace.check_memory(storages)
    written = [Value(old.shape, old.stride, old.dtype, old.device, node) for old in (ref.value for ref in writes)]
    outputs: list[Value] = list(written)
    results: list[DeferredTensor | int | None] = []
    if geometry is not None and None in traits.returns:
        device = call.device()
        for result_geometry in geometry[len(traits.returns) - traits.returns.count(None) :]:
            if result_geometry is None or type(result_geometry) is int:
                results.append(result_geometry)
                continue
            size, stride, offset, dtype = result_geometry
            if offset or trace is not None and dense_count(size, stride) is None:
                stride, offset = contiguous_stride(size), 0  # the kernel returns views of one buffer
            value = Value(size, stride, dtype, device, node)
            storage = DeferredStorage(value)
            storage.trace = trace
            results.append(DeferredTensor.wrap(storage, size, stride, offset, dtype, new=True))
            outputs.append(value)
    node.outputs = tuple(outputs)
    if trace is not None:
        trace.result_storages.extend(weakref.ref(t._storage) for t in results if isinstance(t, DeferredTensor))
    # Only now, when the node is complete: if this is interrupted, a storage has its old Value or the new one.
    for storage, ref, new in zip(storages, writes, written, strict=True):
        _write(storage, ref.value, new, node)
    if trace is not None and outputs:
        trace.latest = outputs[-1]
    for storage in storages:
        if storage.mirrors is not None or storage.mirrored_by:
            conjugate_views.written(storage)
    return _results(call, results)


def _refuse_beyond(storage: DeferredStorage, geometry: Any) -> None:
    """Refuse an `as_strided` that exceeds the storage."""
    size, stride, offset, dtype = geometry
    available = span(storage.value.shape, storage.value.stride) * storage.value.dtype.itemsize
    required = (offset + span(size, stride)) * dtype.itemsize
    if required > available:
        raise CaptureError(
            f"{here()}: as_strided with size {list(size)}, stride {list(stride)} and offset {offset} needs "
            f"{required:,} bytes; its tensor's storage has {available:,}."
        )


def _is_separate_draw(target: Tensor) -> bool:
    """Whether PyTorch draws into a copy with another layout first, as for `x.conj().imag.normal_()`."""
    if type(target) is not DeferredTensor or target._storage.mirrors is None:
        return False
    return lazy_bits(target) != NONE and not target.is_contiguous()


def _draw_separately(call: OpCall, target: Tensor) -> Tensor:
    with DisableTorchDispatch():
        copy = torch.empty_like(as_meta(target))
    options = {"dtype": target.dtype, "device": target.device}
    drawn = dispatch(aten.empty_strided.default, (tuple(copy.shape), copy.stride()), options)
    dispatch(call.op, (drawn, *call.args[1:]), call.kwargs)
    dispatch(aten.copy_.default, (target, drawn), {})
    return target


def _write_one_by_one(call: OpCall, targets: list[Tensor]) -> Any:
    """Record a foreach operation on tensors that share memory (views of one vector) as one operation per tensor."""
    count = len(targets)
    lists = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, (list, tuple)) and len(a) == count]
    if not isinstance(call.args[0], (list, tuple)) or len(call.args[0]) != count or not lists:
        raise CaptureError(
            f"{here()}: {call.op} writes to several tensors that share memory. Pass clones, and copy the results back."
        )

    def nth(arg: Any, i: int) -> Any:
        return [arg[i]] if isinstance(arg, (list, tuple)) and len(arg) == count else arg

    for i in range(count):
        arguments = tuple(nth(a, i) for a in call.args), {k: nth(v, i) for k, v in call.kwargs.items()}
        _record(OpCall(call.op, call.traits, *arguments))
    returns = call.traits.returns
    return call.args[0] if returns and returns[0] is not None else None


def _write(storage: DeferredStorage, old: Value, new: Value, node: Node) -> None:
    """Give `storage` the Value that `node` has written."""
    storage.value = new
    if node.overwrites:
        storage.fills += 1
        if storage.first is old and old.node is not None and old.node.op in _EMPTY:
            storage.first = new


def _is_same_memory(target: Tensor, source: Any) -> bool:
    """Whether two tensors have the same elements in the same order, perhaps in different shapes."""
    if (
        type(target) is not DeferredTensor
        or type(source) is not DeferredTensor
        or target._storage is not source._storage
    ):
        return False
    same = (target.dtype, target.numel(), target.storage_offset()) == (
        source.dtype, source.numel(), source.storage_offset()
    )  # fmt: skip
    return same and target.is_contiguous() and source.is_contiguous()


def _deduplicated(call: OpCall, target: Tensor) -> bool:
    """Whether no other argument shares the target's memory, as in `a.copy_(a)`."""
    if len(call.deferred) == 1:
        return True
    storage = storage_of(target)
    return sum(t._storage is storage for t in call.deferred) == 1


def _with_dtype(call: OpCall, default: torch.dtype) -> OpCall:
    """Make the current default dtype explicit, since it may have changed when the node is run."""
    if "dtype" in call.traits.arguments:
        return OpCall(call.op, call.traits, call.args, {**call.kwargs, "dtype": default})
    if torch.Tag.pointwise not in call.op.tags or not (call.deferred or call.real):
        return call

    def cast(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.dtype != torch.bool:
            return dispatch(aten._to_copy.default, (arg,), {"dtype": default})
        return arg

    return OpCall(call.op, call.traits, tuple(cast(a) for a in call.args), call.kwargs)


def _results(call: OpCall, new: list[DeferredTensor | int | None]) -> Any:
    returns = call.traits.returns
    if not returns:
        return None
    if len(returns) == 1:
        only = returns[0]
        if only is None:
            return new[0] if call.traits.returns_one else new
        return call.argument(only)
    fresh = iter(new)
    return tuple(next(fresh, None) if position is None else call.argument(position) for position in returns)


def _with_refs(args, writes: dict[Any, Ref]) -> tuple[Any, ...]:
    return tuple([_with_ref(a, writes) for a in args])


def _with_ref(arg: Any, writes: dict[Any, Ref]) -> Any:
    kind = type(arg)
    if kind is DeferredTensor or isinstance(arg, Tensor):
        if not writes:
            return ref_of(arg)
        written = writes.get(id(arg))
        if written is not None:
            return written
        ref = ref_of(arg)
        return writes.get(ref, ref)  # a written argument must be the identical Ref, which marks a fill's target
    if kind is list or kind is tuple:
        return _with_refs(arg, writes)
    return number_ref(arg) if is_symbolic(arg) else arg


def position_of(generator: torch.Generator | None = None) -> Position:
    """The position of a generator (by default the global one) in its stream; for tests."""
    return generators.locate(generator or torch.default_generator)[1]


Hooks.register(
    dispatch=dispatch,
    is_composite=is_composite,
    run_in_host_memory=host_kernels.run,
    value_of=evaluation.value_of,
    memory_of=evaluation.memory_of,
    constant_tensor=constant_tensor,
    mirror_of=conjugate_views.mirror_of,
    compute=materialize_tensors.compute,
    allocate_real=materialize_tensors.allocate_real,
    materialize=materialize_tensors.materialize_tensor,
    materialize_all=first_use.materialize,
    materialize_storages=materialize_tensors.materialize_storages,
)
