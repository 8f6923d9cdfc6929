"""`firstloss.compile`: place a model on a backend."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..amp.precision import autocast, mixed_precision
from ..capture import session
from ..capture.deferred import named_tensors
from ..errors import BackendError, TraceError
from ..program.source import here
from .backend import Backend, current_backend
from .guards.object_kinds import ModuleProxy, module_of

# Special methods that are the wrapper's own, or that Python's object protocol gives every object anew.
_OWN_SPECIAL = {*vars(object), *vars(torch.nn.Module), "__class_getitem__", "__del__"}
# Methods of a module that return the module, so that `compiled = compiled.eval()` is to go on with the wrapper.
_RETURNING_SELF = ("train", "eval", "requires_grad_", "apply", "to", "to_empty", "type", "float", "double", "half",
                   "bfloat16", "cpu", "cuda", "xpu", "mtia", "ipu", "share_memory")  # fmt: skip


class CompiledModel(ModuleProxy):
    """Callable like the model, whose weights live on the backend. Inside a traced step its calls are traced.

    It stands for the model: every attribute that is read, set or deleted is the model's, `len`, iteration and indexing
    are, and `isinstance(compiled, type(model))` holds. A copy is a copy of the model, compiled for the same backend.
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
            if mixed_precision():
                with autocast():
                    return self._model(*args, **kwargs)
        return self._model(*args, **kwargs)

    def _check_mesh(self) -> None:
        """
        Raises:
            BackendError: if the weights are on a mesh, and the step that is traced is to be one for other devices.
        """
        mesh, backend = self._backend.mesh, current_backend()
        if mesh is None or backend.mesh is mesh or backend.mesh is not None and backend.mesh.devices == mesh.devices:
            return
        theirs = None if backend.mesh is None else backend.mesh.axes
        has = "none" if theirs is None else f"one of {theirs}" + ", of other devices" * (theirs == mesh.axes)
        raise BackendError(
            f"{here()}: the model's weights are on a mesh of {mesh.axes}, and the current backend has {has}. The "
            "backend that was made last is the current one: make the model's own current again before its step is "
            "called, firstloss.backend(that_backend)."
        )

    # -- the model's attributes --

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_model" not in own:  # while it is made
            raise AttributeError(name)
        try:
            return getattr(own["_model"], name)
        except AttributeError:
            if name in ("model", "backend"):  # the model has none: what is wrapped
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
        """The model's, as `isinstance` asks."""
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
        """Pickled, it is the model; unpickled, it is compiled for the backend that is current then."""
        return compile, (self._model,)


def _through(name: str) -> Callable[..., Any]:
    """The method `name` of the model; what returns the model returns the wrapper."""

    def method(self: CompiledModel, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self._model, name)(*args, **kwargs)
        return self if found is self._model else found

    method.__name__ = name
    method.__doc__ = getattr(torch.nn.Module, name, method).__doc__
    return method


for _name in _RETURNING_SELF:
    setattr(CompiledModel, _name, _through(_name))


@functools.cache
def _with_special(names: frozenset[str]) -> type[CompiledModel]:
    """The wrapper's class for models with these special methods, which Python looks up in the class alone
    (`len(compiled)`, `compiled[0]`, `for layer in compiled`)."""

    def special(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self._model, name)(*args, **kwargs)

    table = {name: special(name) for name in names}
    return type("CompiledModel", (CompiledModel,), {**table, "__module__": __name__, "__doc__": CompiledModel.__doc__})


def compile(model: torch.nn.Module, backend: Backend | None = None) -> CompiledModel:
    """Give a model to a backend.

    On the XLA backend its parameters and buffers live on the device from here on: deferred ones are materialized there
    in the background, starting now, while the step is traced and compiled; real ones are moved. They stay the Python
    objects they were, so an optimizer may be made before or after.

    Examples:
        >>> backend = fl.backend("XLA")
        >>> with backend.device:
        ...     model = nn.Linear(8, 1)
        >>> compiled = fl.compile(model, backend)  # the weights begin to be made
        >>> @fl.trace
        ... def step(x):
        ...     return compiled(x).mean()
        >>> step(torch.ones(4, 8)).shape
        torch.Size([])

    Args:
        model: a Module, deferred or not.
        backend: default the current one.

    Returns:
        A callable that takes and returns what the model does, to be called in steps.

    Raises:
        TraceError: if `model` is no module.
        BackendError: if `backend` is no backend, be it a backend's name.
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
            f"compile takes a backend, and not its name {backend!r}. Make one first, backend = "
            f"firstloss.backend({backend!r}), and write compile(model, backend); or leave it out for the current one."
        )
    if backend is not None and not isinstance(backend, Backend):
        raise BackendError(
            "compile takes a backend, as firstloss.backend(...) makes it, and not an object of type "
            f"{type(backend).__name__}."
        )
    backend = backend or current_backend()
    if backend.is_xla:
        named = list(named_tensors(model))
        for name, tensor, kind in named:
            if tensor.layout != torch.strided:
                raise BackendError(
                    f"the {kind} {name} has the layout {str(tensor.layout).removeprefix('torch.')}, and tensors on the "
                    f'backend are dense. Make it one, with to_dense(), before compile; or use backend "CPU".'
                )
        backend.move_to_device(tensor for _, tensor, _ in named)
    else:
        model.to(backend.torch_device)
    if not any(m is model for m in backend.models):
        backend.models.append(model)
    return CompiledModel(model, backend)
