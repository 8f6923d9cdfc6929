"""The tensors that a step returns or leaves in Python: outputs of its Program, and new tensors at each call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...capture.autograd_boundary import returned
from ...capture.recorder import DeferredStorage, DeferredTensor
from ...capture.step import StepTrace, is_traced
from ...program.graph import Geometry, Ref, geometry_of
from ..guards.reconstruct import Reconstructor

if TYPE_CHECKING:
    from ..mesh.mesh import Mesh


class Outgoing(NamedTuple):
    """A traced tensor that the step returns or leaves: the output that holds it, and how it looks at that."""

    output: str
    geometry: Geometry | None  # None: it is all of the output
    shape: tuple[int, ...]
    dtype: torch.dtype
    computed: bool  # it requires a gradient, and is no leaf


class _Part(NamedTuple):
    """A traced tensor that the step returns or leaves, which may be gone."""

    storage: int  # the id of its storage
    ref: Ref
    geometry: Geometry
    computed: bool
    where: Any  # on a mesh

    @staticmethod
    def of(tensor: DeferredTensor, mesh: Mesh | None) -> _Part:
        return _Part(
            storage=id(tensor._storage),
            ref=tensor._ref(),
            geometry=geometry_of(tensor),
            computed=tensor.requires_grad and not tensor.is_leaf,
            where=None if mesh is None else mesh.storage_sharding(tensor._storage),
        )

    def outgoing(self, output: str, whole: bool) -> Outgoing:
        size, _, _, dtype = self.geometry
        return Outgoing(output, self.geometry if whole else None, size, dtype, self.computed)


class Outputs:
    """What comes out for Python, beside the state that the step changes.

    Attributes:
        refs: the outputs by name, in the order in which the executable returns them: results, then what is left.
        out: names of the results, one of which may be the first loss.
        made: names of what the step leaves in Python, which no caller waits for.
        where: on a mesh, the shardings of `made`.
        outgoing: the tensors by the number by which `CallFrame.fresh` is asked for them.
        held: by name, storages of tensors that are referenced from an object that was not found.
        retrace_reason: why the step has to be traced at each call, if it has to.
    """

    def __init__(
        self,
        left: Reconstructor,
        returned: int,
        tracing: StepTrace,
        mesh: Mesh | None,
        viewers: set[int],
        reachable: Iterable[torch.Tensor],
    ) -> None:
        """
        Args:
            left: holds the tensors, and is released.
            returned: how many of them the step returns: the first.
            viewers: the ids of storages that are kept for who shows a weight's earlier memory.
            reachable: the tensors that outlive a step; asked for when `left` is released.
        """
        self._tracing = tracing
        self.out: list[str] = []
        self.made: list[str] = []
        self.where: dict[str, Any] = {}
        self.held: dict[str, DeferredStorage] = {}
        self._unseen: dict[str, DeferredStorage] = {}  # of those, whose other tensors are in `outgoing`
        outputs: dict[str, Ref] = {}
        parts = [_Part.of(tensor, mesh) for tensor in left.tensors]
        self.retrace_reason = left.retrace_reason and cannot_be_rebuilt(left.retrace_reason)
        left.release()
        expected = {id(t._storage) for t in reachable if is_traced(t, tracing)}
        survivors = {id(storage): storage for storage in self._survivors(expected, viewers)}
        unseen = {key: storage for key, storage in survivors.items() if key not in expected}
        self.outgoing = self._views(parts, returned, outputs, mesh, unseen)
        for storage in survivors.values():
            if storage not in self._unseen.values():
                name = f"made{len(self.made)}"
                self.made.append(name)
                if mesh is not None:
                    self.where[name] = mesh.storage_sharding(storage)
                outputs[name] = Ref.of(storage.value)
                self.held[name] = storage
        self.held |= self._unseen
        self.refs = {name: outputs[name] for name in (*self.out, *self.made)}

    def same_shardings(self, other: Outputs) -> bool:
        """On a mesh: whether the outputs of another step that does the same have these shardings."""
        from ..mesh.mesh import named

        mine, theirs = ({name: named(at) for name, at in outputs.where.items()} for outputs in (self, other))
        return mine == theirs

    def _views(
        self,
        parts: list[_Part],
        returned: int,
        outputs: dict[str, Ref],
        mesh: Mesh | None,
        unseen: dict[int, DeferredStorage],
    ) -> list[Outgoing]:
        """Outputs for tensors: those of one storage are views of one output."""
        sharing: dict[int, list[int]] = {}
        for number, part in enumerate(parts):
            sharing.setdefault(part.storage, []).append(number)
        found: dict[int, Outgoing] = {}
        for key, numbers in sharing.items():
            names, kind = (self.out, "out") if numbers[0] < returned else (self.made, "made")
            name = f"{kind}{len(names)}"
            names.append(name)
            first = parts[numbers[0]]
            # What is only left keeps its strides (a gradient may be a transposed product), unless it is a part of one.
            whole = len(numbers) > 1 or kind == "made" and first.ref.covers or key in unseen
            if key in unseen:
                self._unseen[name] = unseen[key]
            if mesh is not None and kind == "made":
                self.where[name] = first.where if whole else mesh.whole
            outputs[name] = Ref.of(first.ref.value) if whole else first.ref
            for number in numbers:
                found[number] = parts[number].outgoing(name, whole)
        return [found[number] for number in range(len(parts))]

    def _survivors(self, expected: set[int], viewers: set[int]) -> list[DeferredStorage]:
        """Storages that the step has made and whose tensors are still referenced, from where the comparison has not
        looked."""
        tracing = self._tracing
        placeholders = {
            id(owner._storage) for owner in tracing.inputs.values() if type(owner) is DeferredTensor
        } | viewers

        def alive() -> list[DeferredStorage]:
            storages = [storage for made in tracing.made if (storage := made()) is not None]
            ours = [s for s in storages if s.trace is tracing and id(s) not in placeholders]
            return [storage for storage in ours if storage.alive()]

        found = alive()
        if any(id(storage) not in expected for storage in found):
            gc.collect(0)  # nothing was collected while the step was traced
            found = alive()
        held = _held([storage for storage in found if id(storage) not in expected])
        found = [storage for storage in found if id(storage) in expected or id(storage) in held]
        if self.retrace_reason is None and any(id(storage) not in expected for storage in found):
            self.retrace_reason = cannot_be_rebuilt("a tensor in a place that cannot be seen")
        return found

    def fresh(self, arrays: Mapping[str, Any], refs: Mapping[str, Ref], step: str) -> Callable[[int], torch.Tensor]:
        """Gives the new tensors of one call by their numbers, each once.

        Args:
            arrays: what the call has computed, by the name of the output.
            refs: the Program's outputs.
            step: the step's name.
        """
        from ..device.lazy_array import LazyArray  # here, because they bring JAX
        from ..device.tensors import deferred_storage_of, resident

        tensors: dict[int, torch.Tensor] = {}
        storages = dict(self._unseen)

        def fresh(number: int) -> torch.Tensor:
            tensor = tensors.get(number)
            if tensor is None:
                output, geometry, shape, dtype, computed = self.outgoing[number]
                if geometry is None:
                    array = arrays[output]  # of another dtype than was traced, where that is cbfloat16
                    tensor = resident(array, shape, dtype) if type(array) is LazyArray else resident(array)
                else:
                    if output not in storages:
                        storages[output] = deferred_storage_of(arrays[output], refs[output].value)
                    tensor = DeferredTensor.wrap(storages[output], *geometry)
                if computed:
                    returned(tensor, step)
                tensors[number] = tensor
            return tensor

        return fresh


def cannot_be_rebuilt(what: str) -> str:
    """Why a step has to be traced at each call."""
    return f"it leaves {what}, which cannot be recreated at each call"


def _held(storages: list[DeferredStorage]) -> set[int]:
    """The ids of those storages whose tensors are referenced by a Python object, and not only by autograd's graph, of
    which the results of a step keep nothing.

    One search through all of Python's objects finds them.
    """
    if not storages:
        return set()
    tensors = [tensor for storage in storages for tensor in storage.alive()]
    owners = {id(tensor): id(tensor._storage) for tensor in tensors}
    found: set[int] = set()
    for referrer in gc.get_referrers(*tensors):
        if referrer is not tensors:
            found.update(owners[id(held)] for held in gc.get_referents(referrer) if id(held) in owners)
    return found
