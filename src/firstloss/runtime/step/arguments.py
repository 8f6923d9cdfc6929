"""Arguments of a call of a traced step: which are inputs, and which are part of the compiled step's key.

Data is read anew at each call: while the step is traced, a tensor without a value stands in for it. What the step does
to the stand-in (writing to it, giving it a gradient, replacing it in a dict or list) is done to the argument at each
call. An argument that the step also reaches in another way, such as one of its weights, is itself an input, and the
compiled step is for that object only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...capture.step import StepTrace
from ...capture.tensor import DeferredStorage, DeferredTensor
from ...compat.torch_names import PARAMETER_FLAG, backward_hooks, pytree
from ...errors import TraceError
from ...program.graph import Geometry, Value, contiguous_stride, is_dense
from ...program.source import here
from ..guards.effects import Bind, Effects
from ..guards.reconstruct import ArgumentStandIns, CallFrame, Reconstructor, same_memory
from ..pytrees import containers, flattened_attributes

_OUR_ATTRIBUTES = {"_storage", PARAMETER_FLAG}


class Itself:
    """An object as part of a key, compared by identity."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return type(other) is Itself and other.held is self.held

    def __repr__(self) -> str:
        return f"{type(self.held).__name__} object"


class Arguments:
    """The arguments of one call.

    Attributes:
        leaves: the leaves, in the order of `spec`, followed by the gradients of leaf tensors.
        spec: their pytree structure.
        gradients: the index of a leaf's gradient, by the index of the leaf.
        itself: the indices of leaves that are inputs themselves.
        padded: the indices of leaves that are padded copies.
    """

    __slots__ = ("leaves", "spec", "gradients", "itself", "padded", "_given", "_count", "_containers")

    def __init__(self, given: tuple, leaves: list[Any], spec: Any, padded: frozenset[int] = frozenset()) -> None:
        """
        Args:
            given: the positional and keyword arguments.
            leaves: their leaves, padded.
        """
        self.leaves = list(leaves)
        self.spec = spec
        self.padded = padded
        self._given = given
        self._count = len(leaves)
        self._containers: list[Any] | None = None
        self.gradients: dict[int, int] = {}
        self.itself: set[int] = set()
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if is_unlike_others(leaf):
                    self.itself.add(i)
                elif leaf.requires_grad and leaf.is_leaf and leaf.grad is not None:
                    self.gradients[i] = len(self.leaves)
                    self.leaves.append(leaf.grad)

    def key(self) -> tuple:
        """The properties of these arguments, besides their kind, on which a compiled step depends."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        alone = len({id(tensor) for tensor in tensors}) == len(tensors)
        shared = self._container_passed_twice()
        strides = [(tensor.stride(), contiguous_stride(tuple(tensor.shape))) for tensor in tensors]
        strided = tuple([(i, own) for i, (own, dense) in enumerate(strides) if own != dense])
        if alone and not shared and not strided and not self.itself and not self.gradients:
            return ()
        pattern = (() if alone else _pattern(self.leaves), _pattern(self.containers()) if shared else (), strided)
        return pattern, tuple(self.gradients), tuple([(i, Itself(self.leaves[i])) for i in sorted(self.itself)])

    def _container_passed_twice(self) -> bool:
        """Whether a dict or a list is passed twice."""
        args, kwargs = self._given
        if all(pytree.tree_is_leaf(value) for value in (*args, *kwargs.values())):
            return False
        held = self.containers()
        return len({id(container) for container in held}) < len(held)

    def rebuilt(self, leaves: list[Any]) -> tuple:
        """The arguments with other leaves, in new containers, shared as in the original."""
        made = pytree.tree_unflatten(leaves, self.spec)
        return _unified(self._given, made, {}) if self._container_passed_twice() else made

    def data(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The tensors that are data, with their indices."""
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor) and i not in self.itself:
                yield i, leaf

    def guarded(self) -> list[Any]:
        """The arguments into which guards look: all except data."""
        return [leaf for i, leaf in enumerate(self.leaves) if not isinstance(leaf, torch.Tensor) or i in self.itself]

    @property
    def given(self) -> list[Any]:
        """The leaves as passed, without gradients."""
        return self.leaves[: self._count]

    def containers(self) -> list[Any]:
        """The dicts, lists and objects that contain them; see `pytrees.containers`."""
        if self._containers is None:
            self._containers = list(containers(self._given))
        return self._containers


def _pattern(objects: list[Any]) -> tuple[int, ...]:
    """For each object, the index of its first occurrence."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(held), i) for i, held in enumerate(objects)])


def _unified(given: Any, made: Any, known: dict[int, Any]) -> Any:
    """`made`, a copy of `given` with other leaves, with containers shared as in `given`."""
    names = () if isinstance(given, (dict, list, tuple)) else flattened_attributes(given)
    if not isinstance(given, (dict, list, tuple)) and not names:
        return made
    if isinstance(given, tuple):
        parts = [_unified(a, b, known) for a, b in zip(given, made, strict=True)]
        return type(made)(*parts) if hasattr(made, "_fields") else tuple(parts)
    if id(given) in known:
        return known[id(given)]
    known[id(given)] = made
    for name in names:
        object.__setattr__(made, name, _unified(getattr(given, name), getattr(made, name), known))
    if names:
        return made
    for key in range(len(given)) if isinstance(given, list) else list(given):
        made[key] = _unified(given[key], made[key], known)
    return made


def is_unlike_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor is more than data: a weight, or a tensor with hooks or attributes."""
    if isinstance(tensor, torch.nn.Parameter) or backward_hooks(tensor):
        return True
    if tensor.requires_grad and tensor.is_leaf and type(tensor) is DeferredTensor:
        return True
    return bool(tensor.__dict__) and not tensor.__dict__.keys() <= _OUR_ATTRIBUTES


def owner_of(tensor: torch.Tensor) -> DeferredStorage | torch.Tensor:
    """The owner of an argument's memory: the backend's storage if it has exactly this memory, else the tensor."""
    if type(tensor) is DeferredTensor and tensor._storage.resident is not None and tensor._ref().whole:
        return tensor._storage
    return tensor


def view_of(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """The view of an argument that corresponds to a view `geometry` of the traced tensor, which has no gaps.

    If the argument has gaps, and the view merges several of its dimensions, it is a copy, as it would be in eager
    PyTorch.
    """
    size, stride, offset, dtype = geometry
    tensor = tensor.detach()
    if tensor.dtype != dtype:
        if is_dense(tensor):
            tensor = tensor.as_strided((tensor.numel(),), (1,)).view(dtype)
        else:
            tensor = tensor.contiguous().flatten().view(dtype)
    elif not is_dense(tensor):
        places = _places(tuple(tensor.shape), size, stride, offset)
        if places is None:
            tensor = tensor.contiguous()
        else:
            strides, begin = places
            own = tensor.stride()
            stride = tuple(sum(n * s for n, s in zip(row, own, strict=True)) for row in strides)
            offset = sum(n * s for n, s in zip(begin, own, strict=True))
    return same_memory(tensor, (size, stride, offset + int(tensor.storage_offset()), dtype))


def _places(
    shape: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> tuple[list[list[int]], list[int]] | None:
    """Strides and offset of a view as steps along each dimension of the viewed tensor; None if it merges dimensions."""
    begin = _digits(offset, shape)
    rows = [_digits(step if count > 1 else 0, shape) for count, step in zip(size, stride, strict=True)]
    for d, limit in enumerate(shape):
        reached = begin[d] + sum((count - 1) * row[d] for count, row in zip(size, rows, strict=True) if count > 1)
        if reached >= max(limit, 1):
            return None
    return rows, begin


def _digits(number: int, shape: tuple[int, ...]) -> list[int]:
    """A distance between elements in row-major order, as steps along each dimension."""
    found = []
    for step, size in zip(contiguous_stride(shape), shape, strict=True):
        steps, number = divmod(number, step) if size > 1 else (0, number)
        found.append(steps)
    return found


def setting(tensor: torch.Tensor, name: str, value: Any) -> Callable[[], None]:
    """A function that sets an attribute of an argument."""

    def put() -> None:
        if name == "requires_grad":
            tensor.requires_grad_(value)
        else:
            setattr(tensor, name, value)

    return put


class TracedArguments:
    """Stand-ins without values for the arguments that are data.

    Attributes:
        inputs: the index of a leaf, by the input that stands in for it.
    """

    def __init__(self, arguments: Arguments, tracing: StepTrace) -> None:
        self._before = leaves = arguments.leaves
        self._made: list[tuple[DeferredTensor, int]] = []
        self.inputs: dict[Value, int] = {}
        traced = list(leaves)
        made_of: dict[int, DeferredTensor] = {}
        for i, leaf in arguments.data():
            made = made_of.get(id(leaf))
            if made is None:
                made = made_of[id(leaf)] = tracing.new_input(leaf, f"batch{i}", may_change=True)
                self.inputs[made._storage.value] = i
                made.requires_grad_(leaf.requires_grad)
                self._made.append((made, i))
            traced[i] = made
        for i, j in arguments.gradients.items():
            traced[i].grad = traced[j]
        self._gradients = {i: traced[j] for i, j in arguments.gradients.items()}
        self._rebuilt = [arguments.rebuilt(traced[: len(arguments.given)])]
        self._containers = list(containers(self._rebuilt[0]))

    def take(self) -> tuple:
        """The arguments for the step's Python code, in new containers. May be called once: they are not kept alive."""
        return self._rebuilt.pop()

    def check(self, name: str) -> None:
        """Check the stand-ins after the step's Python code has run.

        Raises:
            TraceError: if it has done something that cannot be repeated on the caller's tensors.
        """
        for argument, i in self._made:
            before = self._before[i]
            if argument.shape != before.shape or argument.dtype != before.dtype:
                raise TraceError(
                    f"{here()}: {name} resizes its argument in place, or swaps its memory, which the caller's tensor "
                    "would not see. Resize a clone of it, or return it."
                )
            if argument.grad is not None and not before.is_leaf:
                raise TraceError(
                    f"{here()}: {name} computes gradients for its argument {list(argument.shape)}, which was computed "
                    "outside of the step and requires gradients: the tensors that it was computed from would get none. "
                    "Compute it in the step, or pass its detach()."
                )

    def given(self, tracing: StepTrace, shares_memory: Callable[[torch.Tensor], bool]) -> ArgumentStandIns:
        """The stand-ins, by which arguments are recognized in what the step leaves."""
        return ArgumentStandIns(
            {id(made): i for made, i in self._made},
            {id(made._storage): i for made, i in self._made},
            {id(container): n for n, container in enumerate(self._containers)},
            view_of,
            tracing.outside_of,
            shares_memory,
        )

    def follow(self, effects: Effects, left: Reconstructor) -> None:
        """Repeat at each call what the step does to its arguments, other than writing to them."""
        for made, i in self._made:
            leaf = self._before[i]
            found = {k: v for k, v in made.__dict__.items() if k not in ("_storage", *leaf.__dict__)}
            if made.requires_grad != leaf.requires_grad:
                found["requires_grad"] = made.requires_grad
            gradient = self._gradients.get(i)
            if made.grad is not gradient:
                found["grad"] = made.grad
            for name, value in found.items():
                effects.add(lambda: None, _on_argument(i, name, left.make(value)))


def _on_argument(number: int, name: str, make: Callable[[CallFrame], Any]) -> Callable[[CallFrame], Bind]:
    return lambda env: setting(env.arguments[number], name, make(env))
