"""The recorder: every ATen operation on a deferred tensor is dispatched here, and becomes a node of the Program.

Recording an operation is: find its arguments' Values, work out the shapes of what it returns, make a `Node`, give the
written Stores their new Values. Nothing is computed.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch, OpOverload, TorchDispatchMode, schema_of
from ..errors import CaptureError
from ..program.graph import Node, Ref, Value, contiguous_stride, dense_count, span
from ..program.node_kinds import DEPENDS_ON_GRAD_MODE
from ..program.source import here
from ..rng.stream import Position
from . import (
    checkpoint_loaders,
    conjugate_views,
    distributed,
    dtensor_init,
    evaluation,
    first_use,
    materialize_tensors,
    session,
)
from .conjugate_bits import NONE, lazy_bits
from .constant_folding import fold_call
from .constants import constant_tensor, outer_geometry, ref_of, storage_of
from .evaluation import read_and_run, run_for_real, run_now_for_metadata, run_on_resident
from .file_value import is_in_file
from .mapped_file import in_file
from .metadata_mutation import resize
from .op_call import OpCall
from .op_overrides import SPECIAL
from .op_schema import traits
from .random_ops import draws_at_all, record_draw
from .session import Tracing as _Tracing
from .session import enter, generators, leave, set_trace
from .shapes import NeedsValues, as_meta, infer, is_unusual
from .symbolic_scalars import check_places, is_symbolic, number_ref
from .tensor import DeferredStorage, DeferredTensor, Hooks, has_strangers
from .tensor_states import Traced, state_of

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

aten = torch.ops.aten
Tensor = torch.Tensor

_counter = itertools.count()


def new_index() -> int:
    """The number of the next node, in the order of recording."""
    return next(_counter)


# What is done to a checkpoint's tensors on their way into a model: of those still in their file, recorded.
_LOADING = frozenset(
    {aten._to_copy.default, aten.clone.default, aten.cat.default, aten.stack.default, aten.contiguous.default}
)
_MEETS_LOADER = (aten.detach.default, aten.copy_.default)
_EMPTY = (aten.empty.memory_format, aten.empty_strided.default)


def dispatch(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `op` returns on `args`: recorded where it can be, run where somebody reads a value."""
    handler = SPECIAL.get(op)
    if handler is not None:
        return handler(op, args, kwargs)
    if op.namespace == "profiler":
        return op(*args, **kwargs)
    how = traits(op)
    if how.replacement is not None:
        return conjugate_views.view_lazily(op, how.replacement, args, kwargs)
    call = OpCall(op, how, args, kwargs)
    if how.writes and call.is_foreach:  # PyTorch counts an edit of each where it edits them one by one, above this
        torch.autograd.graph.increment_version([t for t in call.written() if not t.is_inference()])
    if op.namespace in distributed.COLLECTIVES and call.deferred and (session.depth or session.trace is not None):
        distributed.refuse(op)
    if session.trace is None:
        for tensor in call.deferred:
            if tensor._storage.trace is not None and state_of(tensor._storage) is Traced:
                Traced.content(tensor)  # an error
        if not call.deferred and (call.real or call.on_meta):
            reads_file = session.depth and op in _LOADING and any(in_file(t) is not None for t in call.real)
            if not reads_file:
                return run_for_real(call)
        if any(t._storage.resident is not None for t in call.deferred):
            return run_on_resident(call)
        if not session.depth and op in _MEETS_LOADER:
            checkpoint_loaders.teach()
        if not session.depth and first_use.needs_values(call):
            return first_use.run(call)
        if any(map(is_unusual, call.real)) or (how.opaque and not how.view):
            return run_now_for_metadata(call)
        if call.deferred and not session.depth and not how.view and all(map(is_in_file, call.deferred)):
            return read_and_run(call)
        if how.writes and (real := [type(t) is not DeferredTensor for t in call.written()]) and any(real):
            return run_for_real(call) if all(real) else run_now_for_metadata(call)
    return _record(call)


class CaptureMode(TorchDispatchMode):
    """Brings factory functions, whose arguments hold no deferred tensor, to the recorder as well."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method below, and imports its compiler (a second) to do so

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if has_strangers(types):  # a wrapper's own dispatch comes first; what it does to deferred tensors is recorded
            return func(*args, **(kwargs or {}))
        return dispatch(func, args, kwargs or {})


def _record(call: OpCall) -> Any:
    how, trace = call.traits, session.trace
    if call.op is DEPENDS_ON_GRAD_MODE:  # and not for its last argument, `train`
        call = OpCall(call.op, how, (*call.args[:-1], torch.is_grad_enabled()), call.kwargs)
    if call.symbolic:
        check_places(call)
    if trace is not None:
        for t in call.deferred:
            if t._storage.trace is not trace:
                trace.adopt(t._storage)
    geometry: list[Any] | None = None  # Any: None only for a gradient that was not asked for, which nobody looks at
    if not how.fill:
        try:
            geometry, default = infer(call)
        except NeedsValues:
            if trace is None:
                return run_now_for_metadata(call)
            found = fold_call(call)
            return trace.refuse_read(call.op) if found is None else found
        if default is not None:
            call = _with_dtype(call, default)
    if how.view:
        assert geometry is not None
        storage = call.deferred[0]._storage if call.deferred else storage_of(call.real[0])
        if not call.deferred and trace is not None:
            shift = outer_geometry(call.real[0])[2] - int(call.real[0].storage_offset())
            geometry = [(size, stride, offset + shift, dtype) for size, stride, offset, dtype in geometry]
        if call.op is aten.as_strided.default:
            _refuse_beyond(storage, geometry[0])
        views = [DeferredTensor.wrap(storage, *g) for g in geometry]
        return views[0] if call.returns_one() else views

    targets = call.written()
    if how.random is not None and trace is None and len(targets) == 1 and _is_separate_draw(targets[0]):
        return _draw_separately(call, targets[0])
    if how.fill and call.op is aten.copy_.default and _is_same_memory(*call.args[:2]):
        return targets[0]  # as matmul's `out`, which C++ does not see to share the memory that it was told to fill
    if len(targets) > 1 and len({id(storage_of(t)) for t in targets}) < len(targets):
        return _write_one_by_one(call, targets)
    if how.out and geometry:
        for target, (size, *_) in zip(targets, geometry, strict=False):
            if tuple(target.shape) != size and type(target) is DeferredTensor:
                resize(target, size)
    writes = tuple(ref_of(t) for t in targets)
    overwrites = how.fill and len(writes) == 1 and writes[0].covers and _deduplicated(call, targets[0])
    known = {w: w for w in writes}
    node_args = _with_refs(call.args, known)
    node_kwargs = {k: _with_ref(v, known) for k, v in call.kwargs.items()} if call.kwargs else call.kwargs
    node = Node(new_index(), call.op, node_args, node_kwargs, writes, overwrites, None, here())

    if how.random is not None and draws_at_all(call):
        if trace is not None:
            trace.key_draw(node, call.generator_argument())
        elif not record_draw(call, node, geometry):
            return run_now_for_metadata(call)
        node.args = tuple(None if isinstance(a, torch.Generator) else a for a in node.args)
        if "generator" in node.kwargs:
            node.kwargs = {**node.kwargs, "generator": None}

    outputs: list[Value] = []
    for target, ref in zip(targets, writes, strict=True):
        outputs.append(_write(storage_of(target), ref, node))
    made: list[DeferredTensor | int | None] = []
    if geometry is not None and not all(r is not None for r in how.returns):
        device = call.device()
        for one in geometry[sum(r is not None for r in how.returns) :]:
            if one is None or type(one) is int:
                made.append(one)
                continue
            size, stride, offset, dtype = one
            if offset or trace is not None and dense_count(size, stride) is None:
                stride, offset = contiguous_stride(size), 0  # views to their kernel, apart to the graph
            value = Value(size, stride, dtype, device, node)
            storage = DeferredStorage(value)
            storage.trace = trace
            if trace is not None:
                trace.made.append(weakref.ref(storage))
            made.append(DeferredTensor.wrap(storage, size, stride, offset, dtype))
            outputs.append(value)
    node.outputs = tuple(outputs)
    if trace is not None and outputs:
        trace.latest = outputs[-1]
    for target in targets:
        storage = storage_of(target)
        if storage.mirrors is not None or storage.mirrored_by:
            conjugate_views.written(storage)
    return _results(call, made)


def _refuse_beyond(storage: DeferredStorage, geometry: Any) -> None:
    """`as_strided` may ask for more than the storage holds."""
    size, stride, offset, dtype = geometry
    held = span(storage.value.shape, storage.value.stride) * storage.value.dtype.itemsize
    wanted = (offset + span(size, stride)) * dtype.itemsize
    if wanted > held:
        raise CaptureError(
            f"{here()}: as_strided with size {list(size)}, stride {list(stride)} and offset {offset} needs {wanted:,} "
            f"bytes; its tensor's storage has {held:,}."
        )


def _is_separate_draw(target: Tensor) -> bool:
    """Whether PyTorch draws into a copy first, which lies otherwise: `x.conj().imag.normal_()`."""
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
    """An operation on lists writes to tensors that share memory (views of one vector): one after the other, since each
    write makes new content of the whole."""
    count = len(targets)
    lists = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, (list, tuple)) and len(a) == count]
    if not isinstance(call.args[0], (list, tuple)) or len(call.args[0]) != count or not lists:
        raise CaptureError(
            f"{here()}: {call.op} writes to several tensors that share memory, in one operation. Give it clones, and "
            "copy what it wrote back."
        )

    def nth(arg: Any, i: int) -> Any:
        return [arg[i]] if isinstance(arg, (list, tuple)) and len(arg) == count else arg

    for i in range(count):
        arguments = tuple(nth(a, i) for a in call.args), {k: nth(v, i) for k, v in call.kwargs.items()}
        _record(OpCall(call.op, call.traits, *arguments))
    returns = call.traits.returns
    return call.args[0] if returns and returns[0] is not None else None


def _write(storage: DeferredStorage, ref: Ref, node: Node) -> Value:
    """`node` has written to `storage` through `ref`."""
    old = ref.value
    new = Value(old.shape, old.stride, old.dtype, old.device, node)
    storage.value = new
    if node.overwrites:
        storage.fills += 1
        if storage.first is old and old.node is not None and old.node.op in _EMPTY:
            storage.first = new
    return new


def _is_same_memory(target: Tensor, source: Any) -> bool:
    """Whether the two show the same elements in the same order, if not in the same shape."""
    if (
        type(target) is not DeferredTensor
        or type(source) is not DeferredTensor
        or target._storage is not source._storage
    ):
        return False
    alike = (target.dtype, target.numel(), target.storage_offset()) == (
        source.dtype, source.numel(), source.storage_offset()
    )  # fmt: skip
    return alike and target.is_contiguous() and source.is_contiguous()


def _deduplicated(call: OpCall, target: Tensor) -> bool:
    """Whether no other argument shares the target's memory: `a.copy_(a)` reads what it writes."""
    if len(call.deferred) == 1:
        return True
    storage = storage_of(target)
    return sum(t._storage is storage for t in call.deferred) == 1


def _with_dtype(call: OpCall, default: torch.dtype) -> OpCall:
    """The call with PyTorch's default dtype of now written out: another may be set when the node is run."""
    if any(a.name == "dtype" for a in schema_of(call.op).arguments):
        return OpCall(call.op, call.traits, call.args, {**call.kwargs, "dtype": default})
    if torch.Tag.pointwise not in call.op.tags or not (call.deferred or call.real):
        return call

    def cast(arg: Any) -> Any:
        if isinstance(arg, Tensor) and arg.dtype != torch.bool:
            return dispatch(aten._to_copy.default, (arg,), {"dtype": default})
        return arg

    return OpCall(call.op, call.traits, tuple(cast(a) for a in call.args), call.kwargs)


def _results(call: OpCall, made: list[DeferredTensor | int | None]) -> Any:
    returns = call.traits.returns
    if not returns:
        return None
    if len(returns) == 1:
        only = returns[0]
        if only is None:
            return made[0] if call.returns_one() else made
        return call.argument(only)
    fresh = iter(made)
    return tuple(next(fresh, None) if where is None else call.argument(where) for where in returns)


def _with_refs(args, writes: dict[Ref, Ref]) -> tuple:
    return tuple(_with_ref(a, writes) for a in args)


def _with_ref(arg: Any, writes: dict[Ref, Ref]) -> Any:
    if isinstance(arg, Tensor):
        ref = ref_of(arg)
        return writes.get(ref, ref)  # a written argument has to be the very same Ref: so a fill's target is known
    if type(arg) in (list, tuple):
        return tuple(_with_ref(a, writes) for a in arg)
    return number_ref(arg) if is_symbolic(arg) else arg


def position_of(generator: torch.Generator | None = None) -> Position:
    """Where the (global) generator stands in its stream: for reports and tests."""
    return generators.where(generator or torch.default_generator)[1]


Hooks.register(
    dispatch=dispatch,
    value_of=evaluation.value_of,
    memory_of=evaluation.memory_of,
    constant_tensor=constant_tensor,
    mirror_of=conjugate_views.mirror_of,
    make=materialize_tensors.make,
    allocate_real=materialize_tensors.allocate_real,
    materialize=materialize_tensors.materialize_tensor,
    materialize_all=first_use.materialize,
    materialize_storages=materialize_tensors.materialize_storages,
)
distributed.when_imported(dtensor_init.install)
