"""Where a step's inputs lie between its calls, and what stands for each at a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch

from ...capture.recorder import DeferredStorage, DeferredTensor
from ...program.graph import Value
from ..backend import Backend
from ..device.cell import Cell, renew
from ..device.lazy import LazyArray, ready
from ..jaxlib import given, to_host
from ..mesh.mesh import fit, put
from .homes import Home, Homes
from .parameter_groups import Hyperparameter


class Inputs:
    """What stands for a step's inputs: storages on the backend, arguments of the call, numbers in an optimizer's
    groups, and tensors from outside the backend.

    Attributes:
        where: on a mesh, where each input lies.
        lent: at this call some lie in memory that was handed out (`Cell.memory`); see `settle`.
    """

    def __init__(
        self,
        backend: Backend,
        homes: Homes,
        numbers: Mapping[Value, Hyperparameter],
    ) -> None:
        """`numbers` says which number stands for an input; all are read anew at each call."""
        self._backend = backend
        self._homes = homes.inputs
        self._places = homes.arguments
        self._numbers = numbers
        self.where: dict[Value, Any] = {}
        self.lent = False

    def state(
        self, changed: Mapping[Value, Home], leaves: list[Any], wait: bool = True
    ) -> tuple[tuple, Sequence[Cell | None]]:
        """What stands for the state that the step changes, and who keeps what it makes of it: no cell keeps a tensor
        from outside the backend. There may be a thousand arrays, and from one step to the next nobody has touched most
        of them: only the others are asked for."""
        self.lent = False
        cells = _cells(changed)
        if self.where or not wait:
            arrays = self.arrays(changed, leaves, wait, donated=True)
        else:
            found = [cell.current if cell is not None else None for cell in cells]
            arrays = tuple(
                [self.array(v, leaves, True) if a is None else a for v, a in zip(changed, found, strict=True)]
            )
        return arrays, cells if all(cells) else _cells(changed)  # some have been made since

    def arrays(self, values: Iterable[Value], leaves: list[Any], wait: bool = True, donated: bool = False) -> tuple:
        """What stands for the inputs `values`; without `wait`, lazily those that are still being made."""
        return tuple((None if wait else self._later(value)) or self.array(value, leaves, donated) for value in values)

    def _later(self, value: Value) -> LazyArray | None:
        home = self._homes[value]
        return home.resident.later() if isinstance(home, DeferredStorage) and home.resident is not None else None

    def array(self, value: Value, leaves: list[Any], donated: bool = False) -> Any:
        """What stands for an input `value` at this call; `donated`, if the step may write to it."""
        number = self._numbers.get(value)
        if number is not None:
            return np.float64(number.read())
        place = self._places.get(value)
        home = self._homes[value] if place is None else leaves[place]
        where = self.where.get(value)
        array: jax.Array
        if isinstance(home, DeferredStorage):
            if home.resident is None:
                self._backend.claim(home.alive())
            array = self._argument(home.resident, donated)
        elif type(home) is DeferredTensor and home._store.resident is not None and home._ref().whole:
            array = self._argument(home._store.resident)
        elif where is not None:
            return put(home, where)
        else:  # a copy, since the step runs on while the caller may go on to write to the tensor
            return given(home.detach().clone(memory_format=torch.contiguous_format))
        return array if where is None else fit(array, where)

    def _argument(self, cell: Cell, donated: bool = False) -> jax.Array:
        array = cell.argument(donated)
        self.lent = self.lent or cell.lent
        return array

    def settle(self, cells: Iterable[Cell | None], arrays: Iterable[Any]) -> None:
        """The step has been dispatched, and is to make `arrays`. If it was lent memory that others may write to, or
        read, when the call has returned, it is waited for, and that memory shows what it has made."""
        if not self.lent:
            return
        jax.block_until_ready([ready(array) for array in arrays])
        for cell in cells:
            if cell is not None:
                cell.settle()

    def lie(self, values: Iterable[Value]) -> dict[Value, Any]:
        """Where `values` are to lie on the backend's mesh, from now on; nowhere in particular without one."""
        found = {value: self._sharding(value) for value in values}
        self.where = found if self._backend.mesh is not None else {}
        return found

    def _sharding(self, value: Value) -> Any:
        mesh = self._backend.mesh
        if mesh is None:
            return None
        home = self._homes[value]
        if value in self._numbers or value not in self._places and not isinstance(home, DeferredStorage):
            return mesh.whole
        if not isinstance(home, DeferredStorage):
            return mesh.of_batch(tuple(value.shape))
        if home.resident is None:
            self._backend.claim(home.alive())
        return home.resident.sharding or mesh.whole


def _cells(homes: Mapping[Value, Home]) -> list[Cell | None]:
    return [home.resident if type(home) is DeferredStorage else None for home in homes.values()]


def keep(homes: Iterable[Home], cells: Sequence[Cell | None], arrays: Sequence[Any]) -> None:
    """A step has made `arrays` of the content of `homes`, whose cells these are; some may be lazy."""
    if not all(cells):
        with torch.no_grad():
            for home, array in zip(homes, arrays, strict=True):
                if isinstance(home, torch.Tensor):  # from outside the backend
                    home.copy_(to_host(ready(array)))
    renew(cells, arrays)
