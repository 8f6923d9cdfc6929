"""Evaluate deferred tensors that are needed before they are materialized."""

from __future__ import annotations

from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch
from ..engine import replay
from ..errors import CaptureError
from ..program.graph import Ref, geometry_of
from ..program.source import here
from . import session
from .constant_folding import known
from .constants import constant, constant_tensor
from .exported_memory import record_exported_memory
from .file_value import FileValue
from .op_call import OpCall
from .shapes import infer, is_unusual
from .storage_swap import reseat
from .tensor import DeferredTensor, Hooks, is_pending, on_backend
from .tensor_states import OnBackend, state_of

aten = torch.ops.aten
Tensor = torch.Tensor


def value_of(tensor: DeferredTensor) -> Tensor:
    """The real content of `tensor`, in memory of its own; the tensor stays deferred."""
    if session.trace is not None:
        real = known(tensor)
        if real is None:
            session.trace.refuse_read(aten._local_scalar_dense.default)
        assert real is not None
        return real
    return state_of(tensor._storage).value(tensor)


def memory_of(tensor: DeferredTensor, lasting: bool) -> Tensor:
    """A real tensor on the memory in which the content of a tensor on a backend lives from here on."""
    storage = tensor._storage
    with DisableTorchDispatch(), torch.no_grad():
        memory = storage.resident.memory(lasting)
        if storage.resident.is_exported:
            record_exported_memory(storage)
        ref = tensor._ref()
        return memory.detach() if ref.whole else ref.view(memory)


def run_for_real(call: OpCall) -> Any:
    """No deferred tensor is written: compute, as eager PyTorch would; deferred arguments are computed first."""
    args, kwargs = (call.args, call.kwargs) if not call.deferred else _real_arguments(call)
    return _call(call, args, kwargs)


def read_and_run(call: OpCall) -> Any:
    """All that is deferred about the tensors is that they are in a file: read them, for good, and compute."""
    for tensor in call.deferred:
        Hooks.materialize(tensor)
    return _call(call, call.args, call.kwargs)


def call_with_content(call: OpCall) -> Any:
    """What `call` returns on the very memory of its tensors; those that it writes to are real."""

    def real(arg: Any) -> Any:
        if type(arg) is DeferredTensor:
            return content(arg)
        return [real(a) for a in arg] if type(arg) in (list, tuple) else arg

    return _call(call, [real(a) for a in call.args], {k: real(v) for k, v in call.kwargs.items()})


def run_now_for_metadata(call: OpCall) -> Any:
    """Shapes, scalars or the way a stream goes on depend on values: compute this one call now."""
    args, kwargs = _real_arguments(call)
    result = _call(call, args, kwargs)
    # The values were computed on memory of our own; what is written there becomes the new content.
    for t, new in zip(call.written(), OpCall(call.op, call.traits, tuple(args), kwargs).written(), strict=True):
        if type(t) is DeferredTensor:
            _take_over(t, new)
    if any(where is not None for where in call.traits.returns):
        results = result if isinstance(result, (list, tuple)) else (result,)
        returned = tuple(
            _known(r) if where is None else call.argument(where)
            for where, r in zip(call.traits.returns, results, strict=True)
        )
        return returned if len(returned) > 1 else returned[0]
    if isinstance(result, (list, tuple)):
        return type(result)(_known(r) for r in result)
    return _known(result)


def _known(result: Any) -> Any:
    if not isinstance(result, Tensor) or is_unusual(result):
        return result
    return constant_tensor(result, copy=False)


def _take_over(target: DeferredTensor, new: Tensor) -> None:
    """What `new` holds is what `target` shows from now on."""
    if target.shape != new.shape:  # an `out` that was resized to fit
        with DisableTorchDispatch():
            fresh = constant_tensor(new.contiguous().clone(), copy=False)
        reseat(target, fresh._storage, geometry_of(fresh))
        return
    storage = target._storage
    with DisableTorchDispatch(), torch.no_grad():
        made = storage.made[1].clone() if storage.is_made and storage.made is not None else None
        base = replay.compute([Ref.of(storage.value)])[0] if made is None else made
        target._ref().view(base).copy_(new)
    storage.value = constant(base, copy=False)


def run_on_resident(call: OpCall) -> Any:
    """Eager work on weights that live on a backend: views stay views, the rest is computed on the host."""
    if call.traits.view:
        views = [DeferredTensor.wrap(call.deferred[0]._storage, *g) for g in infer(call).geometry]
        return views[0] if call.returns_one() else views
    written = [t for t in call.written() if type(t) is DeferredTensor]
    for t in written:
        if is_pending(t):
            raise CaptureError(
                f"{here()}: {call.op} writes to a tensor that is still deferred, from one that lives on a backend. "
                "Call firstloss.materialize_tensor on the first."
            )
    if call.op is aten.copy_.default and _is_read_per_device(*call.args[:2]):
        call.args[0]._storage.resident.replace_from(call.args[1]._storage.value)
        return call.args[0]
    fresh = []
    for t in written:
        # From here on its host copy may be written, and goes back before the next step.
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
    for where in call.traits.returns:
        if where is not None:
            return call.argument(where)
    return result


def _is_read_per_device(target: DeferredTensor, source: Any) -> bool:
    """Whether all of a weight on a mesh is to become what is in a file: each device then reads its part alone."""
    if not is_pending(source) or not on_backend(target):
        return False
    new, old = source._storage.value, target._storage.value
    alike = (new.shape, new.dtype) == (old.shape, old.dtype) and source._ref().whole and target._ref().whole
    return type(new) is FileValue and alike and target._storage.resident.sharding is not None


def content(tensor: Tensor) -> Tensor:
    """The values of `tensor`, not to be written: where it can, without a copy."""
    if type(tensor) is not DeferredTensor:
        return tensor
    return state_of(tensor._storage).content(tensor)


def _call(call: OpCall, args: Any, kwargs: dict) -> Any:
    if call.traits.random is not None and not call.on_meta:
        session.generators.load(call.generator())
    elif call.traits.opaque:
        session.generators.load(torch.default_generator)
    with DisableTorchDispatch():
        return call.op(*args, **kwargs)


def _real_arguments(call: OpCall) -> tuple[Any, dict[str, Any]]:
    refs: list[Ref] = [t._ref() for t in call.deferred if state_of(t._storage).pending]
    with DisableTorchDispatch():
        real = iter(replay.compute(refs)) if refs else iter(())  # together: they may have much in common

        def made(arg: Any) -> Any:
            if type(arg) is DeferredTensor:
                state = state_of(arg._storage)
                if state.pending:
                    return next(real)
                return state.content(arg) if state is OnBackend else state.value(arg)
            if type(arg) in (list, tuple):
                return [made(a) for a in arg]
            return arg

        args = [made(a) for a in call.args]
        kwargs = {k: made(v) for k, v in call.kwargs.items()}
    return args, kwargs
