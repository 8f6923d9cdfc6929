"""What PyTorch's Python does without telling the dispatcher, taught about deferred tensors.

The replacements are put in place once, when capture is first imported, and do nothing but call the original where no
deferred tensor and no open context is concerned. (`Tensor.data` is in `tensor.py`.)
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..compat.torch_names import DisableTorchDispatch, are_functorch_transforms_active, buffers_of, parameters_of
from ..errors import CaptureError, TraceError
from ..program.source import here
from . import session
from .distributed import parts_of
from .generators import is_ticket
from .mapped_file import left_in_file
from .tensor import DeferredTensor, Hooks, UninitializedTensorMixin, geometry_of, mine, reseat

_original_make_subclass = torch.Tensor._make_subclass
_original_new = torch.Tensor.__new__
_original_materialize = UninitializedTensorMixin.materialize
_original_get_rng_state = torch.random.get_rng_state
_original_set_rng_state = torch.random.set_rng_state
_original_manual_seed = torch.random.manual_seed
_original_swap_tensors = torch.utils.swap_tensors
_original_backward = torch.autograd.backward
_original_grad = torch.autograd.grad


def _make_subclass(*args: Any, **kwargs: Any) -> torch.Tensor:
    """One C++ tensor cannot be two Python classes: a subclass gets the real memory of its data.

    In a capture, a parameter made of a checkpoint's tensor that is still in its file stays there.
    """
    if len(args) > 1 and type(args[1]) is DeferredTensor:
        args = (args[0], mine(args[1]), *args[2:])
    elif session.depth and session.trace is None and args[0] is torch.nn.Parameter and len(args) > 1 and not kwargs:
        left = left_in_file(args[1])
        if left is not None:
            return torch.nn.Parameter(left, *args[2:])
    return _original_make_subclass(*args, **kwargs)


def _new(*args: Any, **kwargs: Any) -> torch.Tensor:
    """As `torch.Tensor.__new__`; a subclass made of a deferred tensor gets its real memory, as above."""
    if len(args) < 2 or not isinstance(args[1], torch.Tensor) or not (session.depth or type(args[1]) is DeferredTensor):
        return _original_new(*args, **kwargs)
    data = mine(args[1]) if type(args[1]) is DeferredTensor else args[1]
    with DisableTorchDispatch():  # which would give the alias that this makes a Python object of its own
        return _original_new(args[0], data, *args[2:], **kwargs)


def get_rng_state() -> torch.Tensor:
    """As `torch.get_rng_state`: the real state, since who keeps it may do so for longer than a ticket is valid."""
    if session.trace is not None:
        return session.trace.generator_state()
    if session.depth:
        session.generators.load(torch.default_generator)
    return _original_get_rng_state()


def set_rng_state(new_state: Any) -> None:
    """As `torch.set_rng_state`; what a generator said of itself during a capture means nothing after it."""
    if session.trace is not None:
        session.trace.set_generator_state(new_state)
        return
    if not session.depth and is_ticket(new_state):
        raise CaptureError(
            f"{here()}: this state was read by Generator.get_state() in a deferred block, which has ended; there it "
            "stands for a place in a stream, and here for nothing. Read it by torch.get_rng_state(), or later."
        )
    _original_set_rng_state(new_state)


def manual_seed(seed: Any) -> torch.Generator:
    """As `torch.manual_seed`; counted, since a generator does not tell that it was given the seed that it had."""
    session.seedings += 1
    if session.trace is not None:
        session.trace.set_generator_state(None)
        return torch.default_generator
    return _original_manual_seed(seed)


def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """As `UninitializedParameter.materialize`; the class that it gives the tensor is not a deferred tensor's."""
    if not session.depth:
        _original_materialize(self, shape, device, dtype)
        return
    with DisableTorchDispatch():
        like = self.data
    data: Any = torch.empty(
        shape, device=like.device if device is None else device, dtype=like.dtype if dtype is None else dtype
    )
    reseat(self, data._store, geometry_of(data))


def swap_tensors(t1: Any, t2: Any) -> None:
    """As `torch.utils.swap_tensors`, which swaps nothing that has a weak reference: those of storages are put aside."""
    _forget(t1)
    _forget(t2)
    try:
        _original_swap_tensors(t1, t2)
    finally:
        for tensor in (t1, t2):
            if type(tensor) is DeferredTensor:
                tensor._store.tensors.append(weakref.ref(tensor))


def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """As `torch.autograd.backward`, which `Tensor.backward` calls; of a step's result, an error that says why not."""
    _check_graph(tensors)
    try:
        _original_backward(tensors, *args, **kwargs)
    except RuntimeError as error:
        if "does not require grad" in str(error) and "firstloss.runtime.executable" in sys.modules:
            error.add_note(f"Firstloss: {_NO_GRAPH}")
        raise


def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """As `torch.autograd.grad`, as above."""
    _check_graph(outputs)
    return _original_grad(outputs, *args, **kwargs)


def _check_graph(outputs: Any) -> None:
    if session.trace is not None or are_functorch_transforms_active():
        return
    for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        if type(tensor) is DeferredTensor and tensor._store.resident is not None and not tensor.requires_grad:
            raise TraceError(f"{here()}: gradients are asked of a tensor that has no graph. {_NO_GRAPH}")


_NO_GRAPH = (
    "What a traced step returns has no graph, since its Python has run only while it was traced: call loss.backward() "
    "in the step itself, and return the loss."
)


def _forget(tensor: Any) -> None:
    if type(tensor) is DeferredTensor:
        tensor._store.tensors = [ref for ref in tensor._store.tensors if ref() is not tensor]


def _by_values_alone(name: str) -> Callable:
    """A function of `torch.linalg` that asks LAPACK for values only, unless a subclass or a gradient may want vectors.

    Recorded, it would be the other algorithm, with other bits: it is run at once.
    """
    original = getattr(torch.linalg, name)

    @functools.wraps(original)
    def at_once(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if not isinstance(x, torch.Tensor) or session.trace is not None or "out" in kwargs:
            return original(*args, **kwargs)
        if torch.is_grad_enabled() and x.requires_grad or type(x) is DeferredTensor and x._store.resident is not None:
            return original(*args, **kwargs)
        if type(x) is not DeferredTensor:
            with DisableTorchDispatch() if session.depth else contextlib.nullcontext():
                return original(*args, **kwargs)
        value = Hooks.value_of(x)
        with DisableTorchDispatch():
            found = original(value, *args[1:], **kwargs)
        return Hooks.constant_tensor(found)

    return at_once


_BUILDER = "torch._dynamo.variables.builder"
_original_compile = torch.compile
_original_to_empty = torch.nn.Module.to_empty


@functools.wraps(_original_compile)
def compile(*args: Any, **kwargs: Any) -> Any:
    """As `torch.compile`, which imports Dynamo."""
    compiled = _original_compile(*args, **kwargs)
    teach_dynamo()
    return compiled


def teach_dynamo() -> None:
    """Let Dynamo, once it has been imported, see ordinary tensors: what it compiles needs values."""
    builder = getattr(sys.modules.get(_BUILDER), "VariableBuilder", None)
    original = None if builder is None else vars(builder).get("__call__")
    if builder is None or original is None or hasattr(original, "_firstloss"):
        return

    @functools.wraps(original)
    def build(self: Any, value: Any) -> Any:
        if type(value) is DeferredTensor and value._store.resident is None and not session.depth:
            value = Hooks.materialize_all(value)
        return original(self, value)

    build._firstloss = True  # type: ignore[attr-defined]
    builder.__call__ = build


def _own_tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    held = (*parameters_of(module).values(), *buffers_of(module).values(), *vars(module).values())
    return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]


def _is_pending(tensor: torch.Tensor) -> bool:
    return type(tensor) is DeferredTensor and tensor._store.resident is None


def _is_alone(tensor: Any) -> bool:
    """Whether it may keep its storage where eager PyTorch gives it one of its own: nobody shares it."""
    return tensor._ref().whole and len(tensor._store.alive()) == 1


def to_empty(self: torch.nn.Module, *, device: Any, recurse: bool = True) -> torch.nn.Module:
    """As `Module.to_empty`; but of a deferred module what has a recipe, or a value already, keeps it, on `device`."""
    on_meta = device is not None and torch.device(device).type == "meta"
    tensors = [t for module in (self.modules() if recurse else [self]) for t in _own_tensors(module)]
    if on_meta or not any(_is_pending(part) for tensor in tensors for part in parts_of(tensor)):
        return _original_to_empty(self, device=device, recurse=recurse)

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        parts = list(parts_of(tensor))
        if any(part.is_meta for part in parts) or any(_is_pending(part) and not _is_alone(part) for part in parts):
            return torch.empty_like(tensor, device=device)  # of a deferred one: memory of its own, with the same recipe
        if not any(map(_is_pending, parts)):
            return tensor.detach().to(tensor.device if device is None else device, copy=True)
        return tensor if device is None else tensor.to(device)

    return self._apply(empty, recurse=recurse)


def install() -> None:
    """Put the replacements in place."""
    for name in ("eigvalsh", "svdvals", "cond", "matrix_norm", "norm"):
        setattr(torch.linalg, name, _by_values_alone(name))
    UninitializedTensorMixin.materialize = materialize
    torch.utils.swap_tensors = swap_tensors
    torch.autograd.backward = backward
    torch.autograd.grad = grad
    torch.compile = compile
    teach_dynamo()
    torch.nn.Module.to_empty = to_empty  # type: ignore[assignment, method-assign]
    torch.Tensor._make_subclass = staticmethod(_make_subclass)  # type: ignore[assignment]
    torch.Tensor.__new__ = staticmethod(_new)  # type: ignore[assignment, method-assign]
    for module in (torch, torch.random):
        module.get_rng_state = get_rng_state  # type: ignore[attr-defined]
        module.set_rng_state = set_rng_state  # type: ignore[attr-defined]
        module.manual_seed = manual_seed  # type: ignore[attr-defined]


install()
