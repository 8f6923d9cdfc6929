"""Weights moved while a model is being constructed: `lazy_initialization = False`.

Constructors run as they always do. When a module registers a weight, the modules before it are done with theirs, which
move to the device, so that host memory holds the weights of one module at a time. Code that comes back to an earlier
weight (`apply(init_weights)`) finds a tensor of the backend, which can be edited like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .. import timeline
from ..capture.tensor import DeferredTensor

# A tensor may be moved while nobody else holds its memory: what is written there later would be lost.
_OWN_HOLDERS = 2  # the tensor, and the handle through which we ask


@contextmanager
def moved_at_once(backend: Any) -> Iterator[None]:
    """Give `backend` the weights of modules that are constructed in the block, each as soon as it can be."""
    moving = _Moving(backend)
    handles = [
        hooks.register_module_parameter_registration_hook(moving.registered),
        hooks.register_module_buffer_registration_hook(moving.registered),
    ]
    try:
        with timeline.span("construct"):
            yield
    finally:
        for handle in handles:
            handle.remove()
    moving.move_all()


class _Moving:
    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._module: Any = lambda: None  # that registers weights now
        self._here: list[weakref.ref] = []  # its weights
        self._shared: list[weakref.ref] = []  # of earlier modules, whose memory somebody else held

    def registered(self, module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        """`module` is about to have `tensor` as a parameter or buffer."""
        if tensor is None or type(tensor) is DeferredTensor or isinstance(tensor, UninitializedTensorMixin):
            return
        if self._module() is not module:
            self._move()
            self._module = weakref.ref(module)
        self._here.append(weakref.ref(tensor))

    def _move(self) -> None:
        """Move the weights of the module before, but those that somebody else may still write to."""
        own: list[weakref.ref] = []
        for tensor in _alive(self._here):
            (own if _held_alone(tensor) else self._shared).append(weakref.ref(tensor))
        self._backend.claim(_alive(own))
        self._here = []

    def move_all(self) -> None:
        """Construction is over."""
        self._backend.claim(_alive([*self._shared, *self._here]))


def _alive(references: list[weakref.ref]) -> list[torch.Tensor]:
    tensors = [tensor for reference in references if (tensor := reference()) is not None]
    return [t for t in tensors if type(t) is not DeferredTensor]


def _held_alone(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= _OWN_HOLDERS
