"""Patches of PyTorch's Python functions that do not call the dispatcher, so that they handle deferred tensors.

Without a deferred tensor or an open context they only call the original. The table in `compat/patches.py` says when
they are installed. (`Tensor.data` is in `storage_swap.py`.)

Operations of `torch.UntypedStorage` run immediately during a capture: PyTorch copies and fills a storage through
temporary tensors, whose operations would be recorded without changing the memory. DLPack needs a tensor's address, so
it materializes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch

from .. import interpreter
from ..compat.patches import install_imported, replaces
from ..compat.torch_names import (
    DisableTorchDispatch,
    apply_of,
    are_functorch_transforms_active,
    base_of,
    buffers_of,
    keep_dynamo_disabled,
    parameters_of,
    swap_tensor_impl,
)
from ..errors import BackendError, CaptureError, TraceError
from ..program.graph import geometry_of
from ..program.source import here
from . import session
from .autograd_boundary import is_returned
from .distributed import parts_of
from .generators import is_ticket
from .mapped_file import deferred_file_tensor
from .storage_swap import is_state, rebind
from .tensor import DeferredTensor, Hooks, forget, is_pending, on_backend, to_host, to_real


@replaces("torch.Tensor._make_subclass")
def _make_subclass(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `torch.Tensor._make_subclass`; a subclass gets the materialized data.

    In a capture, a parameter of a checkpoint's tensor that is still in its file stays deferred.
    """
    if len(args) > 1 and type(args[1]) is DeferredTensor:
        args = (args[0], to_host(args[1]), *args[2:])
    elif session.depth and session.trace is None and args[0] is torch.nn.Parameter and len(args) > 1 and not kwargs:
        in_file = deferred_file_tensor(args[1])
        if in_file is not None:
            return torch.nn.Parameter(in_file, *args[2:])
    return original(*args, **kwargs)


@replaces("torch.Tensor.__new__")
def _new(original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `torch.Tensor.__new__`; a subclass gets the materialized data."""
    if len(args) < 2 or not isinstance(args[1], torch.Tensor) or not (session.depth or type(args[1]) is DeferredTensor):
        return original(*args, **kwargs)
    data = to_host(args[1]) if type(args[1]) is DeferredTensor else args[1]
    with DisableTorchDispatch():  # it makes an alias, which must not be recorded
        return original(args[0], data, *args[2:], **kwargs)


@replaces("torch.nn.Parameter.__new__")
def _new_parameter(original: Any, cls: type, data: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `torch.nn.Parameter.__new__`; a subclass gets the materialized data, since it would lose its class."""
    if cls is not torch.nn.Parameter and type(data) is DeferredTensor and session.trace is None:
        data = to_host(data)
    return original(cls, data, *args, **kwargs)


@replaces("torch.random.get_rng_state")
def get_rng_state(original: Any) -> torch.Tensor:
    """As `torch.get_rng_state`; returns the real state, which outlives tickets."""
    if session.trace is not None:
        return session.trace.generator_state()
    if session.depth:
        session.generators.load(torch.default_generator)
    return original()


@replaces("torch.random.set_rng_state")
def set_rng_state(original: Any, new_state: Any) -> None:
    """As `torch.set_rng_state`; refuses tickets after the capture."""
    if session.trace is not None:
        session.trace.set_generator_state(new_state, functools.partial(original, new_state))
        return
    if not session.depth and is_ticket(new_state):
        raise CaptureError(
            f"{here()}: this state was read by Generator.get_state() in a deferred block, and is valid only there. "
            "Read it by torch.get_rng_state(), or after the block."
        )
    original(new_state)


@replaces("torch.random.manual_seed")
def manual_seed(original: Any, seed: Any) -> torch.Generator:
    """As `torch.manual_seed`; counts calls, since seeding again with the same seed cannot be seen in the generator."""
    session.seedings += 1
    if session.trace is not None:
        session.trace.set_generator_state(None, functools.partial(manual_seed, original, seed))
        return torch.default_generator
    return original(seed)


@replaces(*(f"torch._sobol_engine_{name}" for name in ("initialize_state_", "scramble_", "ff_", "draw")))
def sobol(original: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """As `original`, which accesses memory directly: computes deferred arguments, and writes back the first one."""
    if not any(type(a) is DeferredTensor for a in (first, *args)):
        return original(first, *args, **kwargs)
    with DisableTorchDispatch():
        values = [Hooks.value_of(a) if type(a) is DeferredTensor else a for a in (first, *args)]
        result = original(*values, **kwargs)
    if result is not values[0]:
        return result
    return first.copy_(values[0])


@replaces("gc.enable")
def enable(original: Any) -> None:
    """As `gc.enable`, deferred until the step has been traced."""
    interpreter.set_collecting(True)


@replaces("gc.disable")
def disable(original: Any) -> None:
    """As `gc.disable`, deferred until the step has been traced."""
    interpreter.set_collecting(False)


@replaces("gc.isenabled")
def isenabled(original: Any) -> bool:
    """As `gc.isenabled`, ignoring the pause while tracing."""
    return interpreter.is_collecting()


@replaces("torch.nn.parameter.UninitializedTensorMixin.materialize")
def materialize(original: Any, self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """As `UninitializedParameter.materialize`, for deferred tensors."""
    if not session.depth:
        original(self, shape, device, dtype)
        return
    with DisableTorchDispatch():
        like = self.data
    data: Any = torch.empty(
        shape, device=like.device if device is None else device, dtype=like.dtype if dtype is None else dtype
    )
    rebind(self, data._storage, geometry_of(data))


@replaces("torch.utils.swap_tensors")
def swap_tensors(original: Any, t1: Any, t2: Any) -> None:
    """As `torch.utils.swap_tensors`, for tensors with weak references or other owners.

    Storages refer weakly to their deferred tensors, and a deferred view of a view holds the first one.
    """
    if session.trace is not None and (is_state(t1) or is_state(t2)):
        raise TraceError(
            f"{here()}: torch.utils.swap_tensors swaps tensors that outlive the step, which a compiled step cannot do. "
            "Swap their contents: a, b = first.clone(), second.clone(); first.copy_(b); second.copy_(a)."
        )
    if DeferredTensor not in (type(t1), type(t2)):
        for tensor in (t1, t2):  # they may have been deferred
            forget(tensor)
        original(t1, t2)
        return
    if on_backend(t1) or on_backend(t2):
        for trace in list(session.traces):
            trace.outdated = True
    for tensor in (t1, t2):
        # An existing graph would send its gradient to the other tensor.
        if tensor.requires_grad and tensor.is_leaf and base_of(tensor) is None:
            with torch.enable_grad():
                torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_refuse_gradient)
    t1.__class__, t2.__class__ = type(t2), type(t1)
    t1.__dict__, t2.__dict__ = t2.__dict__, t1.__dict__
    swap_tensor_impl(t1, t2)
    for tensor in (t1, t2):
        if type(tensor) is DeferredTensor:
            tensor._storage.add(tensor)


def _refuse_gradient(gradients: Any) -> None:
    raise CaptureError(
        "a gradient was computed for a tensor that torch.utils.swap_tensors has swapped since it was used. Compute "
        "gradients before tensors are swapped (as Module.to may do), or run the forward pass again afterwards."
    )


@replaces(*[f"torch.{name}" for name in ("is_conj", "is_neg", "resolve_conj", "resolve_neg")])
def lazy_bit(original: Any, input: Any) -> Any:
    """As PyTorch's function, but calls the method of a deferred tensor."""
    return getattr(input, original.__name__)() if type(input) is DeferredTensor else original(input)


@replaces("torch.autograd.backward")
def backward(original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """As `torch.autograd.backward`; explains the error for results of a traced step."""
    _check_graph(tensors)
    try:
        original(tensors, *args, **kwargs)
    except RuntimeError as error:
        if "does not require grad" in str(error) and "firstloss.runtime.step.compiled_step" in sys.modules:
            error.add_note(f"Firstloss: {_NO_GRAPH}")
        raise


@replaces("torch.autograd.grad")
def grad(original: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """As `torch.autograd.grad`; explains the error for results of a traced step."""
    _check_graph(outputs)
    return original(outputs, *args, **kwargs)


def _check_graph(outputs: Any) -> None:
    if session.trace is not None:
        session.trace.begin_backward()
        return
    if are_functorch_transforms_active():
        return
    for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        if on_backend(tensor) and (not tensor.requires_grad or is_returned(tensor)):
            raise TraceError(f"{here()}: gradients are requested for a tensor that has no graph. {_NO_GRAPH}")


_NO_GRAPH = (
    "The results of a traced step have no graph, since its Python runs only while it is traced: call loss.backward() "
    "in the step itself, and return the loss."
)


@replaces(*[f"torch.linalg.{name}" for name in ("eigvalsh", "svdvals", "cond", "matrix_norm", "norm")])
def values_alone(original: Any, *args: Any, **kwargs: Any) -> Any:
    """As `original`, which computes only values, without vectors, unless a subclass or autograd may need these.

    If it were recorded, it would use the other algorithm, with other bits; so it is run immediately.
    """
    x = args[0] if args else None
    if not isinstance(x, torch.Tensor) or session.trace is not None or "out" in kwargs:
        return original(*args, **kwargs)
    if torch.is_grad_enabled() and x.requires_grad or on_backend(x):
        return original(*args, **kwargs)
    if type(x) is not DeferredTensor:
        with DisableTorchDispatch() if session.depth else contextlib.nullcontext():
            return original(*args, **kwargs)
    value = Hooks.value_of(x)
    with DisableTorchDispatch():
        result = original(value, *args[1:], **kwargs)
    return Hooks.constant_tensor(result)


@replaces("torch.compile")
def compile(original: Any, *args: Any, **kwargs: Any) -> Any:
    """As `torch.compile`, which imports Dynamo, and as written in a step.

    PyTorch's control flow is compiled by itself: it is unchanged in a trace, and checked by dynamo otherwise.
    """
    is_control_flow = getattr(args[0] if args else None, "__module__", "").startswith(_HIGHER_ORDER)
    if session.trace is not None and is_control_flow:
        return args[0]
    compiled = original(*args, **kwargs)
    install_imported()
    if session.trace is None and session.this_thread.used is None:  # not in a step
        return compiled
    keep_dynamo_disabled()
    return torch.compiler.set_stance("default")(compiled) if is_control_flow else compiled


_HIGHER_ORDER = "torch._higher_order_ops."


@replaces("torch._dynamo.variables.builder.VariableBuilder.__call__")
def build(original: Any, self: Any, value: Any) -> Any:
    """Materialize a deferred tensor that Dynamo meets.

    Raises:
        BackendError: if it is on a backend.
    """
    if is_pending(value) and not session.depth:
        value = Hooks.materialize_all(value)
    if type(value) is DeferredTensor and on_backend(value):
        raise BackendError(
            f"{here()}: torch.compile has met a tensor on a backend, which it cannot compile. A step of fl.trace "
            "compiles all that it calls; elsewhere, call the function as it is, or under "
            'torch.compiler.set_stance("force_eager").'
        )
    return original(self, value)


def _own_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    values = (*parameters_of(module).values(), *buffers_of(module).values(), *vars(module).values())
    return [tensor for tensor in values if isinstance(tensor, torch.Tensor)]


def _is_unshared(tensor: Any) -> bool:
    """Whether a deferred tensor is its whole storage, and has no other views."""
    return tensor._ref().whole and len(tensor._storage.alive()) == 1


@replaces("torch.nn.Module.to_empty")
def to_empty(original: Any, self: torch.nn.Module, *, device: Any, recurse: bool = True) -> torch.nn.Module:
    """As `Module.to_empty`; in a deferred module, tensors with a recipe or a value keep it, on `device`."""
    on_meta = device is not None and torch.device(device).type == "meta"
    tensors = [t for module in (self.modules() if recurse else [self]) for t in _own_tensors(module)]
    if on_meta or not any(is_pending(part) for tensor in tensors for part in parts_of(tensor)):
        return original(self, device=device, recurse=recurse)

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        parts = list(parts_of(tensor))
        if any(part.is_meta for part in parts) or any(is_pending(part) and not _is_unshared(part) for part in parts):
            return torch.empty_like(tensor, device=device)  # a deferred tensor's result has the same recipe
        if not any(map(is_pending, parts)):
            return tensor.detach().to(tensor.device if device is None else device, copy=True)
        return tensor if device is None else tensor.to(device)

    return apply_of(self)(empty, recurse=recurse)


@replaces(
    *(f"torch.UntypedStorage.{name}" for name in ("copy_", "fill_", "__setitem__")),
    *(f"torch.UntypedStorage.{name}" for name in ("_share_fd_cpu_", "_share_filename_cpu_")),
)
def at_once(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """As `original`, a method that writes or moves a storage."""
    if not session.depth and session.trace is None:
        return original(self, *args, **kwargs)
    if session.trace is not None:
        session.trace.new_layouts.edit(self)
    session.constants.clear()  # no tensor's version counts this edit
    with DisableTorchDispatch():
        return original(self, *args, **kwargs)


@replaces("torch.UntypedStorage.resize_")
def resize(original: Any, self: Any, *args: Any) -> Any:
    """As `torch.UntypedStorage.resize_`."""
    if session.trace is not None:
        session.trace.new_layouts.edit(self)
    return original(self, *args)


@replaces("torch.UntypedStorage.__getitem__")
def read(original: Any, self: Any, *args: Any) -> Any:
    """As `torch.UntypedStorage.__getitem__`, which creates a tensor; safetensors uses it to read files."""
    with DisableTorchDispatch():
        return original(self, *args)


@replaces("torch.utils.dlpack.to_dlpack")
def to_dlpack(original: Any, tensor: Any) -> Any:
    """As `torch.utils.dlpack.to_dlpack`, on the materialized tensor."""
    return original(to_real(tensor, writable=True) if type(tensor) is DeferredTensor else tensor)


@replaces("torch.Tensor.__deepcopy__")
def deepcopy(original: Any, self: Any, memo: Any) -> Any:
    """As `torch.Tensor.__deepcopy__`, which copies the storage."""
    if not session.depth or type(self) is not torch.Tensor or self.__dict__:
        return original(self, memo)
    with DisableTorchDispatch():
        return original(self, memo)
