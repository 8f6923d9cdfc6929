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
    """A Program says how it is computed."""

    pending = True

    @staticmethod
    def content(tensor: DeferredTensor) -> Tensor:
        """The values of `tensor`, not to be written: where it can, without a copy."""
        ref = tensor._ref()
        with DisableTorchDispatch():
            return ref.view(ref.value.real) if ref.value.real is not None else replay.compute([ref])[0]

    @staticmethod
    def value(tensor: DeferredTensor) -> Tensor:
        """The values of `tensor`, in memory of their own."""
        ref = tensor._ref()
        with DisableTorchDispatch():
            if ref.value.known and ref.dtype == ref.value.dtype and is_contiguous(ref.size, ref.stride):
                out = torch.empty(ref.size, dtype=ref.dtype, device=ref.value.device)  # no more is read of a file
                ref.value.read_into(ref.offset, out.view(-1))
                return out
            return replay.compute([ref])[0]


class Traced:
    """A traced step has made it, and neither returned it nor kept it as state: nobody has it."""

    pending = True

    @staticmethod
    def content(tensor: DeferredTensor) -> Tensor:
        """As of `Recorded`.

        Raises:
            TraceError: always.
        """
        if tensor._storage.trace.is_open:
            raise TraceError(
                f"{here()}: another thread than the one that is tracing a step computes with the step's tensors. Only "
                "the thread that calls the step can: compute there."
            )
        raise TraceError(
            f"{here()}: this tensor was made inside a traced step, which did not return it, so its value was not kept. "
            "Return it from the step, or keep it in a module's buffer or an optimizer's state."
        )

    value = content


class Made:
    """It was computed for good, and the tensor is still a deferred one; see `first_use.py`."""

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
    """It lives on a backend: this is a view of one copy on the host."""

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
    """Where the content of a storage is now; outside of a trace."""
    if storage.resident is not None:
        return OnBackend
    if storage.trace is not None and not storage.value.known:
        return Traced
    return Made if storage.is_made else Recorded
