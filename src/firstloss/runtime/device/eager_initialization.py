"""Transfer of weights to the device during construction, for `lazy_initialization = False`.

Constructors run eagerly. When a module registers a weight, the weights of previous modules are complete and are moved
to the device, so that host memory holds those of one module at a time. Code that returns to an earlier weight
(`apply(init_weights)`) finds a tensor on the backend, which can be edited like any other.
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

# A tensor is moved only while nothing else shares its memory: later writes there would be lost.
_OWN_HOLDERS = 2  # the tensor, and the storage handle used to count


@contextmanager
def moving_eagerly(backend: Any) -> Iterator[None]:
    """Move the weights of modules constructed in the block to `backend`, each as soon as possible."""
    moving = _WeightMover(backend)
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


class _WeightMover:
    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._module: Any = lambda: None  # the module that is registering weights
        # Stored by module and name: `torch.utils.swap_tensors` rejects tensors with weak references.
        self._current: list[_Registration] = []  # its weights
        self._shared: list[_Registration] = []  # weights of earlier modules whose memory was shared

    def registered(self, module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        """Called when `module` registers `tensor` as a parameter or buffer."""
        if _needs_no_move(tensor):
            return
        if self._module() is not module:
            self._move()
            self._module = weakref.ref(module)
        self._current.append(_Registration(weakref.ref(module), name))

    def _move(self) -> None:
        """Move the previous module's weights, except those that other code may still write to."""
        current, self._current = self._current, []
        movable = [each for each in current if (tensor := each.tensor()) is not None and _is_sole_owner(tensor)]
        self._shared += [each for each in current if each not in movable]
        self._backend.move_to_device(_alive(movable))

    def move_all(self) -> None:
        """Move all remaining weights, at the end of construction."""
        self._backend.move_to_device(_alive([*self._shared, *self._current]))


class _Registration(NamedTuple):
    """The module and name under which a weight is registered."""

    module: weakref.ref[torch.nn.Module]
    name: str

    def tensor(self) -> torch.Tensor | None:
        """The tensor, or None if it is on the backend, has no shape yet, or is gone."""
        module = self.module()
        tensor = None if module is None else {**buffers_of(module), **parameters_of(module)}.get(self.name)
        return None if _needs_no_move(tensor) else tensor


def _needs_no_move(tensor: torch.Tensor | None) -> bool:
    """Whether there is nothing to move."""
    return tensor is None or type(tensor) is DeferredTensor or isinstance(tensor, UninitializedTensorMixin)


def _alive(registrations: list[_Registration]) -> list[torch.Tensor]:
    return [tensor for each in registrations if (tensor := each.tensor()) is not None]


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return storage_use_count(storage) <= _OWN_HOLDERS
