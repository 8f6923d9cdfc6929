"""Weights moved while a model is being constructed: `lazy_initialization = False`.

Constructors run as they always do. When a module registers a weight, the modules before it are done with theirs, which
move to the device, so that host memory holds the weights of one module at a time. Code that comes back to an earlier
weight (`apply(init_weights)`) finds a tensor of the backend, which can be edited like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as hooks
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ... import timeline
from ...capture.tensor import DeferredTensor
from ...compat.torch_names import buffers_of, parameters_of, storage_use_count

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
        # Weights by module and name: `torch.utils.swap_tensors` refuses tensors that have weak references.
        self._here: list[_Place] = []  # its weights
        self._shared: list[_Place] = []  # of earlier modules, whose memory somebody else held

    def registered(self, module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        """`module` is about to have `tensor` as a parameter or buffer."""
        if _is_left(tensor):
            return
        if self._module() is not module:
            self._move()
            self._module = weakref.ref(module)
        self._here.append(_Place(weakref.ref(module), name))

    def _move(self) -> None:
        """Move the weights of the module before, but those that somebody else may still write to."""
        here, self._here = self._here, []
        own = [place for place in here if (tensor := place.tensor()) is not None and _held_alone(tensor)]
        self._shared += [place for place in here if place not in own]
        self._backend.move_to_device(_alive(own))

    def move_all(self) -> None:
        """Construction is over."""
        self._backend.move_to_device(_alive([*self._shared, *self._here]))


class _Place(NamedTuple):
    """Where a weight is registered."""

    module: weakref.ref
    name: str

    def tensor(self) -> torch.Tensor | None:
        """What is there now; None if it is on the backend, has no shape yet, or is gone."""
        module = self.module()
        tensor = None if module is None else {**buffers_of(module), **parameters_of(module)}.get(self.name)
        return None if _is_left(tensor) else tensor


def _is_left(tensor: torch.Tensor | None) -> bool:
    """Whether there is nothing to move."""
    return tensor is None or type(tensor) is DeferredTensor or isinstance(tensor, UninitializedTensorMixin)


def _alive(places: list[_Place]) -> list[torch.Tensor]:
    return [tensor for place in places if (tensor := place.tensor()) is not None]


def _held_alone(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return storage_use_count(storage) <= _OWN_HOLDERS
