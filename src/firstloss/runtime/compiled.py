"""`firstloss.compile`: give a model to a backend."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..capture.deferred import named_tensors
from ..errors import TraceError
from .backend import Backend, current_backend


class CompiledModel:
    """Callable like the model, whose weights live on the backend. Inside a traced step its calls are traced."""

    def __init__(self, model: torch.nn.Module, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        functools.update_wrapper(self, model, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)


def compile(model: torch.nn.Module, backend: Backend | None = None) -> CompiledModel:
    """Give `model` to `backend` (default the current one) and return a callable like it.

    On the XLA backend its parameters and buffers live on the device from here on: deferred ones are materialized there
    in the background, starting now, while the step is traced and compiled; real ones are moved. They stay the Python
    objects they were, so an optimizer may be made before or after.
    """
    if not isinstance(model, torch.nn.Module):
        raise TraceError(f"compile takes an nn.Module, not an object of type {type(model).__name__}.")
    backend = backend or current_backend()
    if backend.is_xla:
        backend.claim(tensor for _, tensor, _ in named_tensors(model))
    else:
        model.to(backend.torch_device)
    if not any(m is model for m in backend.models):
        backend.models.append(model)
    return CompiledModel(model, backend)
