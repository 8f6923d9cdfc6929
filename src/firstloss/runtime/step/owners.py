"""The owners of a step's inputs, tensors and storages, among them gradients, which others may replace between calls."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, TypeGuard

import torch

from ...capture import exported_memory, session
from ...capture.constants import owned_by_torch
from ...capture.data_assignment import InputView
from ...capture.step import StepTrace, storage_key, whole_storage
from ...capture.tensor import DeferredStorage, DeferredTensor
from ...compat.torch_names import HOOK_TABLES, DisableTorchDispatch, is_parameter, storage_use_count
from ...program.compare import same_bytes
from ...program.graph import Geometry, Node, Ref, Value, geometry_of
from ..guards.effects import Bind, Effects, always
from ..guards.reconstruct import CallFrame, Make, Reconstructor
from .arguments import Arguments, owner_of

Owner = DeferredStorage | torch.Tensor  # a storage on the backend, or a tensor outside it


def storage_or_itself(tensor: torch.Tensor) -> Owner:
    """The storage of a tensor on the backend, else the tensor itself."""
    return tensor._storage if type(tensor) is DeferredTensor else tensor


def memory_of(owner: Any) -> int:
    """A key that is equal for tensors and storages that share memory."""
    return memory_and_geometry(owner)[0] if isinstance(owner, torch.Tensor) else id(owner)


def memory_and_geometry(tensor: torch.Tensor) -> tuple[int, Geometry]:
    """A key that is equal for tensors that share memory, and the tensor's view of that memory."""
    exported = None if type(tensor) is DeferredTensor else exported_memory.storage_at(tensor)
    return (storage_key(tensor), geometry_of(tensor)) if exported is None else (id(exported[0]), exported[1])


class Owners:
    """The owners of a traced step's inputs.

    Attributes:
        inputs: the owner of each input; for arguments, that of the trace.
        arguments: the index of an argument's leaf, by the input that stands in for it.
        changed: the state that the step changes, by input; it is updated in place.
        read: the inputs that are only read.
        edited: the indices of arguments that the step changes.
        current: the current tensor, by the id of the tensor at the time of the trace.
    """

    def __init__(self, tracing: StepTrace, arguments: dict[Value, int]) -> None:
        self._tracing = tracing
        self.inputs: dict[Value, Any] = tracing.inputs
        self.arguments = arguments
        self.changed: dict[Value, Owner] = {}
        self.read: list[Value] = []
        self.edited: list[int] = []
        self.current: dict[int, torch.Tensor] = {}
        self._storages: set[int] | None = None  # the ids of the inputs' owners, without arguments
        self._origins: dict[int, int] = {}  # by the id of the current owner, that of the traced one
        self._rebinds = session.rebinds
        self._writes_external = False

    def find_changed(
        self, move_to_device: Callable[[list[torch.Tensor]], None] | None, gradients: Container[int] = ()
    ) -> None:
        """Determine what the traced step changes. Without `move_to_device` everything stays where it is.

        Args:
            gradients: the ids of tensors that stay where they are, since their weights refer to them in C++.
        """
        changes = self._tracing.changes
        for value in changes:
            owner = self.inputs[value]
            outside = value not in self.arguments and id(owner) not in gradients
            if move_to_device is not None and isinstance(owner, torch.Tensor) and outside and _is_sole_owner(owner):
                # It moves to the backend; otherwise each step would have to be waited for.
                move_to_device([owner])
                assert type(owner) is DeferredTensor
                InputView.record(owner, self._tracing.views)
                owner = self.inputs[value] = owner._storage
            self.changed[value] = owner._storage if type(owner) is DeferredTensor else owner
        self.edited = [self.arguments[value] for value in changes if value in self.arguments]
        self._writes_external = bool(self.edited) or any(isinstance(h, torch.Tensor) for h in self.changed.values())

    def find_read(self, nodes: Iterable[Node], outputs: Iterable[Ref]) -> None:
        """Determine the other inputs that the Program needs."""
        needed = {ref.value for ref in outputs}
        for node in nodes:
            needed.update(ref.value for ref in node.refs())
            needed.update(ref.value for ref in node.writes)
        self.read = [v for v in self.inputs if v in needed and v not in self.changed]

    def forget_arguments(self) -> None:
        """Drop the arguments of the trace: each call has its own."""
        for value in self.arguments:
            self.inputs[value] = torch.empty(value.shape, dtype=value.dtype, device="meta")

    def order(self) -> tuple[list[int], list[int]]:
        """The indices of inputs that are changed, and of those that are only read."""
        order = {value: i for i, value in enumerate(self.inputs)}
        return [order[v] for v in self.changed], [order[v] for v in self.read]

    def owners_at_call(self, leaves: list[Any]) -> Mapping[Value, Owner]:
        """The owners of the state that a call changes, including its own arguments."""
        if not self.edited:
            return self.changed
        return {v: owner_of(leaves[self.arguments[v]]) if v in self.arguments else h for v, h in self.changed.items()}

    def moved(self) -> None:
        """Note that owners in `inputs` have been replaced."""
        self._storages = None

    # -- identification --

    def among(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of `tensors` that, or whose gradients, are inputs."""
        owners = set(map(id, self.inputs.values()))
        return [
            tensor
            for tensor in tensors
            if any(id(storage_or_itself(t)) in owners for t in (tensor, tensor.grad) if t is not None)
        ]

    def weights(self) -> list[torch.Tensor]:
        """The weights that are inputs, without arguments."""
        viewing = [tensor for view in self._tracing.views.values() if (tensor := view()) is not None]
        real = [tensor for tensor, _, _ in self._tracing.outside.values()]
        return [t for t in (*viewing, *real) if t.is_leaf and (t.requires_grad or is_parameter(t))]

    def external_inputs(self, per_call: Container[Value]) -> list[Owner | None]:
        """The inputs, changed ones first; None for those passed `per_call`."""
        values = (*self.changed, *self.read)
        return [None if v in per_call or v in self.arguments else self.inputs[v] for v in values]

    def shared(self, arguments: Arguments) -> set[int]:
        """The indices of arguments that the step also reaches in another way, or that share memory with others, if any
        of them is written to."""
        indices: set[int] = set()
        data = list(arguments.data())
        for i, leaf in data:
            storages = []
            if type(leaf) is DeferredTensor:
                storages = [leaf._storage]
            elif exported_memory.begins:
                storages = [storage for storage, _ in exported_memory.overlapping_storages(leaf)]
            if storages:
                if self._storages is None:
                    self._storages = {id(h) for v, h in self.inputs.items() if v not in self.arguments}
                if not self._storages.isdisjoint(map(id, storages)):
                    indices.add(i)
        if not self._writes_external:
            return indices
        by_memory: dict[int, list[int]] = {}
        for i, leaf in data:
            by_memory.setdefault(storage_key(leaf), []).append(i)
        written = {storage_key(arguments.leaves[i]) for i in self.edited}
        for key, numbers in by_memory.items():
            alone = len({id(arguments.leaves[i]) for i in numbers}) == 1
            if key in written and not alone or self._tracing.shares(arguments.leaves[numbers[0]]):
                indices.update(numbers)
        return indices

    # -- replacement --

    def move(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Replace the first tensor of each pair by the second, which is like it; returns whether the step can continue
        with that."""
        owners = {id(owner): value for value, owner in self.inputs.items()}
        moved: list[tuple[Value, torch.Tensor]] = []
        for old, new in pairs:
            origin = self._origin(old)
            if origin in self._tracing.read_outside or old is new:
                return False
            value = owners.get(id(storage_or_itself(old)))
            view = self._tracing.views.get(id(old))
            if value is None and view is not None and view() is old and id(view.storage) in owners:
                if type(new) is not DeferredTensor or new._storage is not view.storage:  # others view it, too
                    return False
            if type(new) is DeferredTensor and not (new._ref().whole and new._storage.trace is None):
                return False
            if value is None:
                if origin in self._tracing.outside:  # a view of an input
                    return False
                continue
            if type(old) is DeferredTensor and len(old._storage.alive()) > 1:  # other tensors view the same memory
                return False
            if type(old) is not DeferredTensor and self._tracing.views_of(origin) > 1:
                return False
            if type(old) is DeferredTensor and not old._ref().whole or tuple(value.shape) != tuple(new.shape):
                return False
            if type(new) is not DeferredTensor and memory_of(new) != memory_of(old):
                leaves = any(new is other for other, _ in pairs)  # its own place, for this one
                if exported_memory.storage_at(new) is not None or self._tracing.shares(new) and not leaves:
                    return False
            if id(storage_or_itself(new)) in owners and owners[id(storage_or_itself(new))] is not value:
                if not any(storage_or_itself(other) is storage_or_itself(new) for other, _ in pairs):
                    return False
            moved.append((value, new))
        storages = [id(storage_or_itself(new)) for _, new in moved]
        if len(set(storages)) != len(storages):
            return False
        self._storages = None
        for value, new in moved:
            self.inputs[value] = storage_or_itself(new)
            if value in self.changed:
                self.changed[value] = storage_or_itself(new)
        renamed = {id(new): self._origin(old) for old, new in pairs}
        for old, _ in pairs:
            self._origins.pop(id(old), None)
        for _, new in pairs:
            self.current[renamed[id(new)]] = new
        self._origins.update(renamed)
        for old, new in pairs:
            self._tracing.views.pop(id(old), None)
            if type(new) is DeferredTensor and (id(new._storage) in owners or id(new._storage) in storages):
                InputView.record(new, self._tracing.views)
        return True

    def rebound(self) -> bool:
        """Whether a tensor that viewed the storage of an input views another one, or another part of it."""
        if self._rebinds == session.rebinds:
            return False
        if any(view.changed() for view in list(self._tracing.views.values())):
            return True
        self._rebinds = session.rebinds
        return False

    def _origin(self, tensor: torch.Tensor) -> int:
        """The id of the tensor in whose place it is."""
        return self._origins.get(id(tensor), id(tensor))


def differ(a: Owner, b: Owner) -> bool:
    """Whether two tensors of the same shape and dtype are different objects with different bytes."""
    if a is b or not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.data_ptr() != b.data_ptr() and not same_bytes(a, b)


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether nothing but `tensor` holds its memory: no view, no NumPy array."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_inference() or not owned_by_torch(tensor):
        return False
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.numel() * tensor.itemsize and tensor.is_contiguous()
    return whole and storage_use_count(storage) <= 2  # the tensor's own, and `storage`


class Shared(Exception):
    """Raised if the step also reaches some of its arguments in another way, so that they must be inputs themselves.

    Attributes:
        leaves: the indices of the arguments' leaves.
    """

    def __init__(self, leaves: set[int]) -> None:
        super().__init__(leaves)
        self.leaves = leaves


class Gradients:
    """The gradients of a traced step's weights; at later calls no Python code of the step reads or sets them."""

    def __init__(self, weights: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
        """To be created before the step is traced.

        Args:
            others: tensors whose `requires_grad` may change.
        """
        self._before = {p: p.grad for p in weights}
        self._hooks = [(p, name, dict(getattr(p, name) or {})) for p in self._before for name in HOOK_TABLES]
        self._requires_grad = {t: t.requires_grad for t in (*self._before, *others) if t.is_leaf}
        self._with_new_gradients: list[torch.Tensor] = []  # weights whose gradients the step leaves or clears
        # By the input that is their memory: weights, and their gradients' views of it.
        self._read: dict[Value, list[tuple[torch.Tensor, Ref | Geometry | None]]] = {}

    def traced(self, inputs: dict[Value, Owner], effects: Effects, reconstructor: Reconstructor) -> None:
        """Record the trace's results, with these `inputs`; a gradient left by the step is a side effect like others."""
        self._record_new_gradients()
        real = {storage_key(owner): owner for owner in inputs.values() if _is_real(owner)}
        by_owner: dict[int, list[tuple[torch.Tensor, Ref | Geometry | None]]] = {}
        for parameter, gradient in self._before.items():
            if _is_real(gradient):
                owner = real.get(storage_key(gradient))
                by_owner.setdefault(id(owner), []).append(
                    (parameter, None if owner is gradient else geometry_of(gradient))
                )
            elif gradient is not None:
                by_owner.setdefault(id(storage_or_itself(gradient)), []).append((parameter, _view(gradient)))
        self._read = {value: by_owner[id(owner)] for value, owner in inputs.items() if id(owner) in by_owner}
        for parameter, before in self._before.items():
            if parameter.grad is not before:
                self._with_new_gradients.append(parameter)
                effects.add(_setter(parameter, before), _maker(parameter, reconstructor.make(parameter.grad)))
        for tensor, requires_grad in self._requires_grad.items():
            if tensor.requires_grad != requires_grad:
                effects.add(
                    _requires_grad_setter(tensor, requires_grad),
                    always(_requires_grad_setter(tensor, not requires_grad)),
                )

    def _record_new_gradients(self) -> None:
        """Record gradients of weights that required none before the step and have one now: the step unfreezes them."""
        self._before |= {t: None for t in self._requires_grad if t not in self._before and t.grad is not None}

    def undo(self) -> None:
        """Restore the gradients, and hooks, after a failed trace."""
        self._record_new_gradients()
        for parameter, gradient in self._before.items():
            parameter.grad = gradient
        for parameter, name, before in self._hooks:
            now = getattr(parameter, name)
            if now is not None and dict(now) != before:
                now.clear()
                now.update(before)
        for tensor, requires_grad in self._requires_grad.items():
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)

    def fit(self, inputs: dict[Value, Owner]) -> bool:
        """Whether the step can be called with the current gradients: each must have the layout that it had in the
        trace, and share memory with no other input."""
        others: set[int] | None = None
        memories: list[int] = []
        for value, readers in self._read.items():
            if not all(_is_laid_out(value, parameter.grad, view) for parameter, view in readers):
                return False
            memory = {memory_of(parameter.grad) for parameter, _ in readers}
            if len(memory) > 1:
                return False
            memories += memory
            if memory_of(inputs[value]) in memory:
                continue
            if others is None:
                others = {memory_of(owner) for other, owner in inputs.items() if other not in self._read}
            if not memory.isdisjoint(others):
                return False
        return len(set(memories)) == len(memories)

    @property
    def read(self) -> Iterable[Value]:
        """The gradients that are inputs."""
        return self._read

    def ids(self) -> set[int]:
        """The ids of the gradients from before the step."""
        return {id(gradient) for gradient in self._before.values()}

    def follow(self, inputs: dict[Value, Owner], changed: dict[Value, Any], current: dict[int, Any]) -> bool:
        """Before a later call, replace inputs by gradients that eager backward passes have made.

        Returns:
            Whether there were any.
        """
        others = False
        for value, readers in self._read.items():
            for parameter, _ in readers:
                current[id(self._before[parameter])] = parameter.grad
            parameter, view = readers[0]
            gradient: Any = parameter.grad
            now: Any = storage_or_itself(gradient)
            if view is not None and not isinstance(view, Ref):  # a part of a real tensor
                if storage_key(gradient) == storage_key(inputs[value]):  # type: ignore[arg-type]
                    continue
                now = whole_storage(gradient)
            if now is not inputs[value]:
                others = True
                inputs[value] = now
                if value in changed:
                    changed[value] = now
        return others

    def now(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The gradients that a call will replace, for `restore`."""
        return [(parameter, parameter.grad) for parameter in self._with_new_gradients]

    def restore(self, before: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Restore the gradients `before` a failed call."""
        for parameter, gradient in before:
            parameter.grad = gradient


def _setter(parameter: torch.Tensor, gradient: torch.Tensor | None) -> Callable[[], None]:
    def put() -> None:
        parameter.grad = gradient

    return put


def _requires_grad_setter(tensor: torch.Tensor, requires_grad: bool) -> Callable[[], None]:
    def set_requires_grad() -> None:
        tensor.requires_grad_(requires_grad)

    return set_requires_grad


def _maker(parameter: torch.Tensor, make: Make) -> Callable[[CallFrame], Bind]:
    return lambda env: _setter(parameter, make(env))


def _view(gradient: torch.Tensor) -> Ref | None:
    """A gradient's view of its storage (a Linear's weight gradient is a transposed product); None for a real tensor."""
    return gradient._ref() if type(gradient) is DeferredTensor else None


def _is_real(gradient: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(gradient, torch.Tensor) and type(gradient) is not DeferredTensor


def _is_laid_out(value: Value, gradient: torch.Tensor | None, view: Ref | Geometry | None) -> bool:
    if gradient is None:
        return False
    now = _view(gradient)
    if view is not None and not isinstance(view, Ref):  # it was a view of a real tensor
        return now is None and geometry_of(gradient) == view and _bytes_from(gradient) == value.nbytes
    if now is None:
        fits = gradient.shape == value.shape and gradient.dtype == value.dtype and (view is None or view.whole)
        return fits and whole_storage(gradient) is gradient
    if view is None:
        return now.whole and _alike(now.value, value)
    return now[1:] == view[1:] and _alike(now.value, value)


def _bytes_from(gradient: torch.Tensor) -> int:
    with DisableTorchDispatch():
        return gradient.untyped_storage().nbytes()


def _alike(a: Value, b: Value) -> bool:
    return (a.shape, a.stride, a.dtype) == (b.shape, b.stride, b.dtype)
