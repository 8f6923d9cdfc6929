"""Arguments of a call of a traced step: which are inputs, and which are part of the compiled step's key.

Data is read anew at each call: while the step is traced, a tensor without a value stands in for it. What the step does
to the placeholder (writing to it, giving it a gradient, replacing it in a dict or list) is done to the argument at each
call. An argument that the step also reaches in another way, such as one of its weights, is itself an input, and the
compiled step is for that object only.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...capture.input_numbers import NUMBERS, Expression, Source
from ...capture.input_texts import InputText, is_text
from ...capture.step import StepTrace
from ...capture.tensor import DeferredStorage, DeferredTensor
from ...compat.torch_names import PARAMETER_FLAG, backward_hooks, pytree
from ...errors import TraceError
from ...program.graph import Value, contiguous_stride
from ...program.source import here
from ..guards.effects import Bind, Effects
from ..guards.reconstruct import ArgumentPlaceholders, CallFrame, Reconstructor
from ..pytrees import BackReference, containers, copied, is_leaf

_OUR_ATTRIBUTES = {"_storage", PARAMETER_FLAG}


class ByIdentity:
    """An object as part of a key, compared by identity. It is not kept alive, unless it is a tensor, which could not be
    swapped by `torch.utils.swap_tensors`, or has no weak references: a key with one that is gone equals no other."""

    __slots__ = ("is_weak", "_held", "_id", "_kind")

    def __init__(self, held: Any) -> None:
        self._id = id(held)
        self._kind = type(held).__name__
        self.is_weak: bool = bool(type(held).__weakrefoffset__) and not isinstance(held, torch.Tensor)
        self._held: Callable[[], Any] = weakref.ref(held) if self.is_weak else lambda: held

    @property
    def is_gone(self) -> bool:
        """Whether the object does not exist any more."""
        return self._held() is None

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return self is other or type(other) is ByIdentity and not self.is_gone and other._held() is self._held()

    def __repr__(self) -> str:
        return f"{self._kind} object"


class Arguments:
    """The arguments of one call.

    Attributes:
        leaves: the leaves, in the order of `spec`, followed by the gradients of leaf tensors.
        spec: their pytree structure.
        gradients: the index of a leaf's gradient, by the index of the leaf.
        itself: the indices of leaves that are inputs themselves.
        padded: the indices of leaves that are padded copies.
        varying: the indices of numbers and texts that are inputs, since they have been seen to change; with names.
        known: numbers that were computed for this call.
        news: how they differ from those of earlier calls, in words, if they are of a new kind.
        early: what another compiled step has computed at this call, up to a read that decided otherwise than in its
            trace, with what its inputs were; see `SegmentedRun.take_early`.
    """

    __slots__ = (
        "leaves", "spec", "gradients", "itself", "padded", "varying", "known", "news", "early", "_args_and_kwargs",
        "_count", "_containers",
    )  # fmt: skip

    def __init__(
        self,
        args_and_kwargs: tuple[Any, ...],
        leaves: list[Any],
        spec: Any,
        padded: frozenset[int] = frozenset(),
        varying: Mapping[int, str] | None = None,
        news: str | None = None,
    ) -> None:
        """
        Args:
            args_and_kwargs: the positional and keyword arguments.
            leaves: their leaves, padded.
        """
        self.varying: Mapping[int, str] = {} if varying is None else varying
        self.known: dict[Expression, Any] = {}
        self.news: str | None = news
        self.early: tuple[Any, list[Any]] | None = None
        self.leaves: list[Any] = list(leaves)
        self.spec: Any = spec
        self.padded: frozenset[int] = padded
        self._args_and_kwargs = args_and_kwargs
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

    def key(self) -> tuple[Any, ...]:
        """The properties of these arguments, besides their kind, on which a compiled step depends."""
        tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        alone = len({id(tensor) for tensor in tensors}) == len(tensors)
        shared = self._container_passed_twice()
        strides = [(tensor.stride(), contiguous_stride(tuple(tensor.shape))) for tensor in tensors]
        strided = tuple([(i, stride) for i, (stride, dense) in enumerate(strides) if stride != dense])
        if alone and not shared and not strided and not self.itself and not self.gradients:
            return ()
        pattern = (() if alone else _pattern(self.leaves), _pattern(self._mutable()) if shared else (), strided)
        return pattern, tuple(self.gradients), tuple([(i, ByIdentity(self.leaves[i])) for i in sorted(self.itself)])

    def _container_passed_twice(self) -> bool:
        """Whether a dict or a list is passed twice."""
        args, kwargs = self._args_and_kwargs
        if all(is_leaf(value) for value in (*args, *kwargs.values())):
            return False
        held = self._mutable()
        return len({id(container) for container in held}) < len(held)

    def _mutable(self) -> list[Any]:
        """The containers that can be mutated in place."""
        return [container for container in self.containers() if not isinstance(container, tuple)]

    def as_given(self) -> tuple[Any, ...]:
        """The positional and keyword arguments as the caller has passed them, unless they are padded."""
        return self.rebuilt(self.given) if self.padded else self._args_and_kwargs

    def rebuilt(self, leaves: list[Any]) -> tuple[Any, ...]:
        """The arguments with other leaves, in new containers, shared as in the original."""
        new = pytree.tree_unflatten(leaves, self.spec)
        linked = self._container_passed_twice() or any(leaf is BackReference.TO_HOLDER for leaf in leaves)
        return copied(self._args_and_kwargs, new, {}) if linked else new

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
        """The dicts, lists, tuples and objects that contain them; see `pytrees.containers`."""
        if self._containers is None:
            self._containers = list(containers(self._args_and_kwargs))
        return self._containers


def _pattern(objects: list[Any]) -> tuple[int, ...]:
    """For each object, the index of its first occurrence."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(held), i) for i, held in enumerate(objects)])


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

    def __init__(self, arguments: Arguments, tracing: StepTrace, inputs: tuple[type, ...] = NUMBERS) -> None:
        """`inputs`: the classes of the numbers and texts that are inputs if they vary; the step is specialized on
        others."""
        self._before = leaves = arguments.leaves
        self._placeholders: list[tuple[DeferredTensor, int]] = []
        self.inputs: dict[Value, int] = {}
        traced = list(leaves)
        placeholder_of: dict[int, DeferredTensor] = {}
        for i, leaf in arguments.data():
            placeholder = placeholder_of.get(id(leaf))
            if placeholder is None:
                placeholder = placeholder_of[id(leaf)] = tracing.new_input(leaf, f"batch{i}", may_change=True)
                self.inputs[placeholder._storage.value] = i
                placeholder.requires_grad_(leaf.requires_grad)
                self._placeholders.append((placeholder, i))
            traced[i] = placeholder
        for i, j in arguments.gradients.items():
            traced[i].grad = traced[j]
        numbers = tracing.numbers
        for i, name in arguments.varying.items():
            leaf, description = leaves[i], f"the argument {name}" if name else "an argument"
            source = Source(operator.itemgetter(i), type(leaf), description, name)
            if not isinstance(leaf, inputs):
                numbers.guard(Expression(None, (), source), leaf)
            elif is_text(leaf):
                traced[i] = InputText(leaf, numbers.read(source), numbers)
            else:
                traced[i] = numbers.number(leaf, source)
        self._gradients = {i: traced[j] for i, j in arguments.gradients.items()}
        self._rebuilt = [arguments.rebuilt(traced[: len(arguments.given)])]
        self._containers = list(containers(self._rebuilt[0]))

    def take(self) -> tuple[Any, ...]:
        """The arguments for the step's Python code, in new containers. May be called once: they are not kept alive."""
        return self._rebuilt.pop()

    def check(self, name: str) -> None:
        """Check the placeholders after the step's Python code has run.

        Raises:
            TraceError: if it has done something that cannot be repeated on the caller's tensors.
        """
        for argument, i in self._placeholders:
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

    def given(self, tracing: StepTrace, shares_memory: Callable[[torch.Tensor], bool]) -> ArgumentPlaceholders:
        """The placeholders, by which arguments are recognized in what the step leaves."""
        return ArgumentPlaceholders(
            {id(placeholder): i for placeholder, i in self._placeholders},
            {id(placeholder._storage): i for placeholder, i in self._placeholders},
            {id(container): n for n, container in enumerate(self._containers)},
            tracing.outside_of,
            shares_memory,
        )

    def follow(self, effects: Effects, reconstructor: Reconstructor) -> None:
        """Repeat at each call what the step does to its arguments, other than writing to them."""
        for placeholder, i in self._placeholders:
            leaf = self._before[i]
            attributes = {k: v for k, v in placeholder.__dict__.items() if k not in ("_storage", *leaf.__dict__)}
            if placeholder.requires_grad != leaf.requires_grad:
                attributes["requires_grad"] = placeholder.requires_grad
            gradient = self._gradients.get(i)
            if placeholder.grad is not gradient:
                attributes["grad"] = placeholder.grad
            for name, value in attributes.items():
                effects.add(lambda: None, _on_argument(i, name, reconstructor.make(value)))


def _on_argument(number: int, name: str, make: Callable[[CallFrame], Any]) -> Callable[[CallFrame], Bind]:
    return lambda env: setting(env.arguments[number], name, make(env))
