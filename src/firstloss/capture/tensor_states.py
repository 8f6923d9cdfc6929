"""The states of a deferred tensor: where its content is."""

from __future__ import annotations

import torch

from ..compat.torch_names import DisableTorchDispatch
from ..engine import replay
from ..errors import TraceError
from ..program.graph import is_contiguous
from ..program.source import here
from .tensor import DeferredStorage, DeferredTensor

Tensor = torch.Tensor


class Recorded:
    """Recorded in a Program, but not computed."""

    pending = True

    @staticmethod
    def content(tensor: DeferredTensor) -> Tensor:
        """The values of `tensor`, if possible without a copy; must not be modified."""
        ref = tensor._ref()
        with DisableTorchDispatch():
            return ref.view(ref.value.real) if ref.value.real is not None else replay.compute([ref])[0]

    @staticmethod
    def value(tensor: DeferredTensor) -> Tensor:
        """A copy of the values of `tensor`."""
        ref = tensor._ref()
        with DisableTorchDispatch():
            if ref.value.known and ref.dtype == ref.value.dtype and is_contiguous(ref.size, ref.stride):
                out = torch.empty(ref.size, dtype=ref.dtype, device=ref.value.device)  # reads only this part of a file
                ref.value.read_into(ref.offset, out.view(-1))
                return out
            return replay.compute([ref])[0]


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


class Made:
    """Computed, though the tensor is still a deferred one: see `first_use.py`."""

    pending = False

    @staticmethod
    def content(tensor: DeferredTensor) -> Tensor:
        """As of `Recorded`."""
        made = tensor._storage.made
        assert made is not None
        with DisableTorchDispatch():
            return tensor._ref().view(made[1])

    @staticmethod
    def value(tensor: DeferredTensor) -> Tensor:
        """As of `Recorded`."""
        return Made.content(tensor).clone()


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


State = type[Recorded] | type[Traced] | type[Made] | type[OnBackend]


def state_of(storage: DeferredStorage) -> State:
    """The state of a storage, outside of a trace."""
    if storage.resident is not None:
        return OnBackend
    if storage.trace is not None and not storage.value.known:
        return Traced
    return Made if storage.is_made else Recorded
