"""`firstloss.compile`: placement of a model on a backend."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..amp.precision import autocast
from ..amp.precision import current as precision
from ..capture import session
from ..capture.deferred import named_tensors
from ..errors import BackendError, TraceError
from ..program.source import here
from .backend import Backend, current_backend
from .fully_sharded import undo_over_one_process
from .guards.access import ModuleProxy, module_of

# Special methods that the wrapper defines itself, or that every Python object has.
_OWN_SPECIAL = {*vars(object), *vars(torch.nn.Module), "__class_getitem__", "__del__"}
# Methods that return the module itself, for which the wrapper returns itself: `compiled = compiled.eval()`.
_RETURNING_SELF = ("train", "eval", "requires_grad_", "apply", "to", "to_empty", "type", "float", "double", "half",
                   "bfloat16", "cpu", "cuda", "xpu", "mtia", "ipu", "share_memory")  # fmt: skip


class CompiledModel(ModuleProxy):
    """Wrapper of a model whose weights live on the backend. Calls of it inside a traced step are traced.

    It behaves like the model: attributes are read, set and deleted on the model, `len`, iteration and indexing are the
    model's, and `isinstance(compiled, type(model))` holds. A copy is a compiled copy of the model.
    """

    def __new__(cls, model: torch.nn.Module, backend: Backend) -> CompiledModel:
        kind = type(model)
        names = {name for base in kind.__mro__ for name in vars(base) if name.startswith("__") and name.endswith("__")}
        own = names - _OWN_SPECIAL - vars(CompiledModel).keys()
        return object.__new__(_with_special(frozenset(name for name in own if callable(getattr(kind, name, None)))))

    def __init__(self, model: torch.nn.Module, backend: Backend) -> None:
        self.__dict__.update(_model=model, _backend=backend, __wrapped__=model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if session.trace is not None:
            self._check_mesh()
            if precision.mixed:
                with autocast():
                    return self._model(*args, **kwargs)
        return self._model(*args, **kwargs)

    def _check_mesh(self) -> None:
        """
        Raises:
            BackendError: if the weights are on another mesh than the backend of the step being traced.
        """
        mesh, backend = self._backend.mesh, current_backend()
        if mesh is None or backend.mesh is mesh or backend.mesh is not None and backend.mesh.devices == mesh.devices:
            return
        axes = None if backend.mesh is None else backend.mesh.axes
        has = "none" if axes is None else f"one of {axes}" + ", of other devices" * (axes == mesh.axes)
        raise BackendError(
            f"{here()}: the model's weights are on a mesh of {mesh.axes}, but the current backend has {has}. The "
            "backend created last is the current one: make the model's backend current before calling its step, "
            "firstloss.backend(that_backend)."
        )

    # -- the model's attributes --

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_model" not in own:  # during construction
            raise AttributeError(name)
        try:
            return getattr(own["_model"], name)
        except AttributeError:
            if name in ("model", "backend"):  # the wrapper's own, unless the model has such an attribute
                return own[f"_{name}"]
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._model, name)

    def __dir__(self) -> list[str]:
        return dir(self._model)

    def __repr__(self) -> str:
        return repr(self._model)

    @property
    def __class__(self) -> type:
        """The model's class, for `isinstance`."""
        return type(self.__dict__["_model"]) if "_model" in self.__dict__ else CompiledModel

    @__class__.setter
    def __class__(self, cls: type) -> None:
        self._model.__class__ = cls

    # -- copies --

    def __copy__(self) -> CompiledModel:
        return compile(copy.copy(self._model), self._backend)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModel:
        return compile(copy.deepcopy(self._model, memo), self._backend)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the model; it is compiled for the current backend when it is unpickled."""
        return compile, (self._model,)


def _forwarded(name: str) -> Callable[..., Any]:
    """A method that calls the model's method `name`, and returns the wrapper if that returns the model."""

    def method(self: CompiledModel, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._model, name)(*args, **kwargs)
        return self if result is self._model else result

    method.__name__ = name
    method.__doc__ = getattr(torch.nn.Module, name, method).__doc__
    return method


for _name in _RETURNING_SELF:
    setattr(CompiledModel, _name, _forwarded(_name))


@functools.cache
def _with_special(names: frozenset[str]) -> type[CompiledModel]:
    """The wrapper's class for models with these special methods, which Python looks up only on the class
    (`len(compiled)`, `compiled[0]`, `for layer in compiled`)."""

    def special(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self._model, name)(*args, **kwargs)

    table = {name: special(name) for name in names}
    return type("CompiledModel", (CompiledModel,), {**table, "__module__": __name__, "__doc__": CompiledModel.__doc__})


def compile(model: torch.nn.Module, backend: Backend | None = None) -> CompiledModel:
    """Compile a model for a backend.

    On the XLA backend its parameters and buffers live on the device from here on: deferred ones are materialized there
    in the background while the step is traced and compiled, and real ones are moved. They keep their identity as Python
    objects, so an optimizer may be created before or after.

    Examples:
        >>> backend = fl.backend("XLA")
        >>> with backend.device:
        ...     model = nn.Linear(8, 1)
        >>> compiled = fl.compile(model, backend)  # starts materializing the weights
        >>> @fl.trace
        ... def step(x):
        ...     return compiled(x).mean()
        >>> step(torch.ones(4, 8)).shape
        torch.Size([])

    Args:
        model: a Module, deferred or not.
        backend: by default the current one.

    Returns:
        A callable with the model's arguments and results, to be called in steps.

    Raises:
        TraceError: if `model` is not an nn.Module.
        BackendError: if `backend` is not a Backend, for example a backend's name.
    """
    if isinstance(model, CompiledModel):
        model = module_of(model)
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        raise TraceError(
            f"compile takes a module, not the class {model.__name__}. Write compile({model.__name__}(...))."
        )
    if not isinstance(model, torch.nn.Module):
        raise TraceError(f"compile takes an nn.Module, not an object of type {type(model).__name__}.")
    if isinstance(backend, str):
        raise BackendError(
            f"compile takes a backend, not its name {backend!r}. Create it first, backend = "
            f"firstloss.backend({backend!r}), and write compile(model, backend); or leave it out for the current one."
        )
    if backend is not None and not isinstance(backend, Backend):
        raise BackendError(
            "compile takes a backend created by firstloss.backend(...), not an object of type "
            f"{type(backend).__name__}."
        )
    backend = backend or current_backend()
    if backend.is_xla:
        undo_over_one_process(model)
        named = list(named_tensors(model))
        for name, tensor, kind in named:
            if tensor.layout != torch.strided:
                raise BackendError(
                    f"the {kind} {name} has the layout {str(tensor.layout).removeprefix('torch.')}, but the backend "
                    f'supports only dense tensors. Call to_dense() on it before compile; or use backend "CPU".'
                )
        backend.move_to_device(tensor for _, tensor, _ in named)
    else:
        model.to(backend.torch_device)
    backend.models.add(model)
    return CompiledModel(model, backend)
