"""The states of deferred tensors, and the evaluation of those that are needed before they are materialized."""

from __future__ import annotations

import weakref
from typing import Any, TypeGuard

import torch
from torch.ops import aten

from ..compat.torch_names import DisableTorchDispatch
from ..engine.cpu_engine import WantedPart, materialize_parts
from ..engine.splits import Box
from ..errors import TraceError
from ..program.graph import FileValue, Ref, geometry_of, is_contiguous, is_not_strided
from ..program.nested import mapped
from ..program.source import here
from . import session
from .constant_folding import compute, known_value
from .constants import constant, constant_tensor
from .exported_memory import record_exported_memory
from .op_call import OpCall, views
from .shapes import infer
from .storage_swap import rebind
from .tensor import DeferredStorage, DeferredTensor, Hooks, is_pending, on_backend

Tensor = torch.Tensor


class Recorded:
    """Recorded in a Program, but not computed."""

    pending = True

    @staticmethod
    def content(tensor: DeferredTensor) -> Tensor:
        """The values of `tensor`, if possible without a copy; must not be modified."""
        ref = tensor._ref()
        with DisableTorchDispatch():
            return ref.view(ref.value.real) if ref.value.real is not None else compute([ref])[0]

    @staticmethod
    def value(tensor: DeferredTensor) -> Tensor:
        """A copy of the values of `tensor`."""
        ref = tensor._ref()
        with DisableTorchDispatch():
            if ref.value.known and ref.dtype == ref.value.dtype and is_contiguous(ref.size, ref.stride):
                out = torch.empty(ref.size, dtype=ref.dtype, device=ref.value.device)  # reads only this part of a file
                ref.value.read_into(ref.offset, out.view(-1))
                return out
            return compute([ref])[0]


class Traced:
    """Created in a traced step, which neither returned it nor kept it as state: it has no value."""

    pending = True

    @staticmethod
    def content(tensor: DeferredTensor) -> Tensor:
        """As of `Recorded`.

        Raises:
            TraceError: always.
        """
        if tensor._storage.trace.is_open:
            raise TraceError(
                f"{here()}: the tensors of a step that is being traced are used in another thread. Use them in the "
                "thread that calls the step."
            )
        raise TraceError(
            f"{here()}: this tensor was created inside a traced step, which did not return it, so its value was not "
            "kept. Return it from the step, or store it in a module's buffer or an optimizer's state."
        )

    value = content


class Computed:
    """Computed, though the tensor is still a deferred one: see `first_use.py`."""

    pending = False

    @staticmethod
    def content(tensor: DeferredTensor) -> Tensor:
        """As of `Recorded`."""
        entry = tensor._storage.computed
        assert entry is not None
        with DisableTorchDispatch():
            return tensor._ref().view(entry[1])

    @staticmethod
    def value(tensor: DeferredTensor) -> Tensor:
        """As of `Recorded`."""
        return Computed.content(tensor).clone()


class OnBackend:
    """On a backend; read through a copy on the host."""

    pending = False

    @staticmethod
    def content(tensor: DeferredTensor) -> Tensor:
        """As of `Recorded`."""
        return tensor._ref().view(tensor._storage.resident.host())

    @staticmethod
    def value(tensor: DeferredTensor) -> Tensor:
        """As of `Recorded`."""
        return OnBackend.content(tensor).clone()


State = type[Recorded] | type[Traced] | type[Computed] | type[OnBackend]


def state_of(storage: DeferredStorage) -> State:
    """The state of a storage, outside of a trace."""
    if storage.resident is not None:
        return OnBackend
    if storage.trace is not None and not storage.value.known:
        return Traced
    return Computed if storage.is_computed else Recorded


def value_of(tensor: DeferredTensor) -> Tensor:
    """A copy of the content of `tensor`; the tensor stays deferred."""
    if session.trace is not None:
        real = known_value(tensor)
        return session.trace.read(tensor) if real is None else real
    return state_of(tensor._storage).value(tensor)


def memory_of(tensor: DeferredTensor, lasting: bool) -> Tensor:
    """A real tensor that shares the memory of a tensor on a backend."""
    storage = tensor._storage
    with DisableTorchDispatch(), torch.no_grad():
        memory = storage.resident.memory(lasting)
        if storage.resident.is_exported:
            record_exported_memory(storage)
        ref = tensor._ref()
        return memory.detach() if ref.whole else ref.view(memory)


def run_for_real(call: OpCall) -> Any:
    """Run a call that writes to no deferred tensor; its deferred arguments are computed first."""
    args, kwargs = (call.args, call.kwargs) if not call.deferred else _real_arguments(call)
    return _call(call, args, kwargs)


def is_recorded(tensor: Any) -> TypeGuard[DeferredTensor]:
    """Whether a tensor is deferred, and not computed nor on a backend."""
    return is_pending(tensor) and state_of(tensor._storage) is Recorded


def copy_alone(call: OpCall) -> Tensor | None:
    """Run a call that copies a recorded tensor to real memory; a part of a weight is computed alone, and the weight
    stays deferred. None if it is another call."""
    if call.op is not aten.copy_.default or type(call.args[0]) is DeferredTensor or not is_recorded(call.args[1]):
        return None
    target, source = call.args[0].detach(), call.args[1]
    ref = source._ref()
    with DisableTorchDispatch(), torch.no_grad():
        if ref.value.known or ref.dtype != ref.value.dtype or not is_contiguous(ref.size, ref.stride):
            target.copy_(Recorded.value(source))
            return call.args[0]
        direct = target.shape == ref.size and target.is_contiguous()
        direct = direct and target.dtype == ref.dtype and target.device == ref.value.device
        into = target if direct else torch.empty(ref.size, dtype=ref.dtype, device=ref.value.device)
        materialize_parts([(ref, [WantedPart(Box((0,) * len(ref.size), ref.size), [into])])])
        if not direct:
            target.copy_(into)
    return call.args[0]


def run_from_file(call: OpCall) -> Any:
    """Run a call whose deferred tensors are all in files: materialize them first."""
    for tensor in call.deferred:
        Hooks.materialize(tensor)
    return _call(call, call.args, call.kwargs)


def call_with_content(call: OpCall) -> Any:
    """Run a call on the memory of its tensors, without copies; it writes to real tensors only."""
    args, kwargs = mapped(_content, [*call.args]), {k: mapped(_content, v) for k, v in call.kwargs.items()}
    return _call(call, args, kwargs)


def _content(arg: Any) -> Any:
    return content(arg) if type(arg) is DeferredTensor else arg


def run_now(call: OpCall) -> Any:
    """Run a call now, because its result's shape, its stream position or Python depends on values."""
    args, kwargs = _real_arguments(call)
    result = _call(call, args, kwargs)
    # It wrote to copies, whose content becomes the new content of the deferred tensors.
    for t, new in zip(call.written(), OpCall(call.op, call.traits, tuple(args), kwargs).written(), strict=True):
        if type(t) is DeferredTensor:
            _replace_content(t, new)
    if any(position is not None for position in call.traits.returns):
        results = result if isinstance(result, (list, tuple)) else (result,)
        returned = tuple(
            _as_constant(r) if position is None else call.argument(position)
            for position, r in zip(call.traits.returns, results, strict=True)
        )
        return returned if len(returned) > 1 else returned[0]
    if isinstance(result, (list, tuple)):
        return type(result)(_as_constant(r) for r in result)
    return _as_constant(result)


def _as_constant(result: Any) -> Any:
    if not isinstance(result, Tensor) or is_not_strided(result):
        return result
    return constant_tensor(result, copy=False)


def _replace_content(target: DeferredTensor, new: Tensor) -> None:
    """Make the content of `new` that of `target`."""
    if target.shape != new.shape:  # a resized `out`
        with DisableTorchDispatch():
            fresh = constant_tensor(new.contiguous().clone(), copy=False)
        rebind(target, fresh._storage, geometry_of(fresh))
        return
    storage = target._storage
    with DisableTorchDispatch(), torch.no_grad():
        content = storage.computed[1].clone() if storage.is_computed and storage.computed is not None else None
        base = compute([Ref.of(storage.value)])[0] if content is None else content
        target._ref().view(base).copy_(new)
    storage.value = constant(base, copy=False)


def run_on_resident(call: OpCall) -> Any:
    """Run a call on tensors on a backend: views stay views, everything else is computed on the host."""
    if call.traits.view:
        return views(call, call.deferred[0]._storage, infer(call).geometry)
    if (used := session.this_thread.used) is not None:
        used.update(weakref.ref(t._storage) for t in call.deferred)
    written = [t for t in call.written() if type(t) is DeferredTensor]
    pending = [t for t in written if is_pending(t)]
    if pending:  # a copy of the model from before it was compiled
        Hooks.materialize_storages([t._storage for t in pending])
        return Hooks.dispatch(call.op, call.args, call.kwargs)
    if call.op is aten.copy_.default and _is_read_per_device(*call.args[:2]):
        call.args[0]._storage.resident.replace_from(call.args[1]._storage.value)
        return call.args[0]
    fresh = []
    for t in written:
        # Its host copy may be written now, and is written back before the next step.
        others = sum(other._storage is t._storage for other in call.deferred) > 1
        if t._storage.resident.begin_edit(whole=call.traits.fill and t._ref().covers and not others):
            fresh.append(t._storage.resident)
    try:
        result = _call(call, *_real_arguments(call))
    except BaseException:
        for buffer in fresh:
            buffer.cancel_edit()
        raise
    for t in written:
        t._storage.resident.end_edit()
    for position in call.traits.returns:
        if position is not None:
            return call.argument(position)
    return result


def _is_read_per_device(target: DeferredTensor, source: Any) -> bool:
    """Whether a whole weight on a mesh is loaded from a file, so that each device reads only its shard."""
    if not is_pending(source) or not on_backend(target):
        return False
    new, old = source._storage.value, target._storage.value
    same = (new.shape, new.dtype) == (old.shape, old.dtype) and source._ref().whole and target._ref().whole
    return type(new) is FileValue and same and target._storage.resident.sharding is not None


def content(tensor: Tensor) -> Tensor:
    """The values of `tensor`, if possible without a copy; must not be modified."""
    if type(tensor) is not DeferredTensor:
        return tensor
    return state_of(tensor._storage).content(tensor)


def _call(call: OpCall, args: Any, kwargs: dict[Any, Any]) -> Any:
    if call.traits.random is not None and not call.on_meta:
        session.generators.load(call.generator())
    elif call.traits.opaque:
        session.generators.load(torch.default_generator)
    with DisableTorchDispatch():
        return call.op(*args, **kwargs)


def _real_arguments(call: OpCall) -> tuple[Any, dict[str, Any]]:
    refs: list[Ref] = [t._ref() for t in call.deferred if state_of(t._storage).pending]
    with DisableTorchDispatch():
        real = iter(compute(refs)) if refs else iter(())  # together, to share work

        def made(arg: Any) -> Any:
            if type(arg) is not DeferredTensor:
                return arg
            state = state_of(arg._storage)
            if state.pending:
                return next(real)
            return state.content(arg) if state is OnBackend else state.value(arg)

        args = mapped(made, [*call.args])
        kwargs = {k: mapped(made, v) for k, v in call.kwargs.items()}
    return args, kwargs
