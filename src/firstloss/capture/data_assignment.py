"""`weight.data = tensor` in a traced step: the weight has other memory from then on.

A compiled step writes a weight's new content to the memory of the old one. That is the same only where nobody else
looks at the old memory, or at the new: so whoever looks at the old one is given memory of his own, with what is there
now, and whoever looks at the new one looks at the weight's from then on.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, NoReturn

import torch

from ..compat.torch_names import preserve_version_counter, storage_use_count
from ..errors import TraceError
from ..program.graph import Geometry, geometry_of
from ..program.source import here
from .session import Tracing
from .storage_swap import point_at
from .tensor import DeferredStorage, DeferredTensor, is_pending


class Viewer(NamedTuple):
    """A tensor that showed a weight's memory when that was given another.

    Attributes:
        tensor: it.
        before: the weight's storage, which it looked at before the step.
        geometry: how it looks at either.
        shows: a traced tensor like it, on memory that is no weight's any more.
        whole: one that is all of that memory.
    """

    tensor: weakref.ref[DeferredTensor]
    before: DeferredStorage
    geometry: Geometry
    shows: DeferredTensor
    whole: DeferredTensor


class DataAssignments:
    """The weights that a step has given other memory.

    Attributes:
        weights: the storages of weights, each with a traced tensor that is all of its memory before, as the step leaves
            that, or None if nobody has it.
        viewers: who looked at that memory.
    """

    def __init__(self, trace: Tracing) -> None:
        self._trace = trace
        self.weights: dict[DeferredStorage, Any] = {}
        self.viewers: list[Viewer] = []
        self._lent: set[DeferredStorage] = set()
        self._real: list[tuple[torch.Tensor, Any]] = []  # weights of no backend, and the lines

    def assign(self, weight: torch.Tensor, other: Any) -> None:
        """`weight.data = other`, which is of the same shape and dtype.

        Raises:
            TraceError: where somebody would look at the weight's new memory whom the step cannot give it.
        """
        made = other if type(other) is DeferredTensor and other._storage.trace is self._trace else None
        if made is not None and self._trace.is_external(made._storage):
            made = None
        if made is None and not self._is_constant(other):
            self.refuse(weight, "is memory from outside of the step")
        if type(weight) is not DeferredTensor:
            self._real.append((weight, here()))
        elif weight._ref().covers:
            self._part(weight)
        elif len(weight._storage.alive()) > 1:
            self.refuse(weight, "takes it from the memory of a larger tensor")
        sharing = [] if made is None else made._storage.alive()
        alike = made is not None and geometry_of(made) == geometry_of(weight)
        if len(sharing) > 1 and not (alike and made._ref().covers):  # type: ignore[union-attr]
            self.refuse(weight, "is a part of a larger tensor")
        with torch.no_grad(), preserve_version_counter(weight):
            weight.copy_(other)
        if type(weight) is DeferredTensor:
            for tensor in sharing:
                point_at(tensor, weight._storage, geometry_of(tensor) if len(sharing) > 1 else geometry_of(weight))

    def _is_constant(self, other: Any) -> bool:
        """Whether the step has made it of constants, and nobody else holds it."""
        return is_pending(other) and other._storage.value.known

    def _part(self, weight: DeferredTensor) -> None:
        """Those who look at the memory of `weight` keep what is there now."""
        storage = weight._storage
        if storage.trace is not self._trace:
            self._trace.adopt(storage)
        others = [t for t in storage.alive() if t is not weight]
        lent = storage not in self.weights and storage.resident is not None and storage.resident.is_exported
        kept: Any = None
        if others or lent:
            value = storage.value
            with torch.no_grad():
                kept = DeferredTensor.wrap(storage, value.shape, value.stride, 0, value.dtype).clone()
            before = kept._storage
            for tensor in others:
                geometry = geometry_of(tensor)
                shows = DeferredTensor.wrap(before, *geometry)
                self.viewers.append(Viewer(weakref.ref(tensor), storage, geometry, shows, kept))
                point_at(tensor, before, geometry)
        if lent:
            self._lent.add(storage)
        self.weights.setdefault(storage, kept if lent else None)

    def now_of(self, storage: DeferredStorage) -> DeferredStorage:
        """What a real tensor looks at that lies in the memory that a weight's `storage` had before the step."""
        kept = self.weights.get(storage)
        return storage if kept is None else kept._storage

    def refuse(self, weight: torch.Tensor, why: str) -> NoReturn:
        """
        Raises:
            TraceError: always.
        """
        raise TraceError(
            f"{here()}: the step gives a tensor of shape {list(weight.shape)} other memory by `.data = ...`, which "
            f"{why}, and others would share it. Write weight.data.copy_(...), or weight.data = ....clone()."
        )

    def settle(self) -> None:
        """The step has been traced.

        Raises:
            TraceError: where somebody holds the memory of a weight that is on no backend.
        """
        for weight, line in self._real:
            storage = weight.untyped_storage()
            if self._trace.views_of(weight) > 1 or storage_use_count(storage) > 2:
                raise TraceError(
                    f"{line}: the step gives a tensor of shape {list(weight.shape)} other memory by `.data = ...`, and "
                    "another tensor, or an array of NumPy's, shows the memory that it has. Write "
                    "weight.data.copy_(...), which the other will show, too, or make the other one of a clone."
                )

    def rejoin(self) -> None:
        """Everybody looks at what he looked at before the step."""
        for tensor, before, geometry, shows, _ in self.viewers:
            viewer = tensor()
            if viewer is not None and viewer._storage is shows._storage:
                point_at(viewer, before, geometry)

    def outdated(self) -> bool:
        """Whether somebody looks at a weight's memory who did not when the step was traced."""
        return any(
            len(storage.alive()) > 1 or storage.resident.is_exported != (storage in self._lent)
            for storage in self.weights
        )
