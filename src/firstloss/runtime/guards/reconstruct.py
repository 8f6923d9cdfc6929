"""Recreate at each call what a step returns or leaves in Python: tensors, and containers and objects that hold them."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...capture.conjugate_views import bits_of, unmirrored, vector_of
from ...capture.input_numbers import Expression
from ...capture.input_texts import input_of, value_of
from ...capture.tensor import DeferredTensor, Hooks
from ...errors import TraceError
from ...program.graph import Geometry, contiguous_stride, geometry_of, is_dense
from ...program.source import here
from .access import MISSING, own_attributes
from .equality import same
from .guards import with_article
from .kind import kind_of


class CallFrame:
    """The state of one call: its new tensors, its arguments and their containers, and replacements of tensors that
    existed when the step was traced."""

    __slots__ = ("fresh", "arguments", "containers", "current", "created", "known")

    def __init__(
        self,
        fresh: Callable[[int], torch.Tensor],
        arguments: list[Any],
        containers: Callable[[], list[Any]],
        current: dict[int, torch.Tensor],
        known: dict[Expression, Any] | None = None,
    ) -> None:
        """`known`: numbers of this call that were computed already."""
        self.fresh: Callable[[int], torch.Tensor] = fresh
        self.arguments: list[Any] = arguments
        self.containers: Callable[[], list[Any]] = containers
        self.current: dict[int, torch.Tensor] = current
        self.created: dict[int, Any] = {}
        self.known: dict[Expression, Any] = {} if known is None else known


Make = Callable[[CallFrame], Any]


class ArgumentPlaceholders(NamedTuple):
    """The traced tensors and containers that stand for the arguments of a step while it is traced.

    Attributes:
        tensors: by id, the traced tensors, each with the number of its argument.
        storages: by id, their storages, likewise.
        containers: by id, the dicts, lists and objects that hold them, each with its number.
        outside: the whole tensor from outside of the step that a storage stands for, if any.
        shares_memory: whether a real tensor that the step has created shares memory with an array from before it.
    """

    tensors: dict[int, int]
    storages: dict[int, int]
    containers: dict[int, int]
    outside: Callable[[Any], torch.Tensor | None]
    shares_memory: Callable[[torch.Tensor], bool]


NO_ARGUMENTS = ArgumentPlaceholders({}, {}, {}, lambda storage: None, lambda tensor: False)


# How many objects are searched for a tensor of the step.
_MAX_REFERENTS = 1000


def _is_searched(obj: Any) -> bool:
    if isinstance(obj, dict):
        return "__builtins__" not in obj  # not a module's
    return isinstance(obj, (tuple, list, set, frozenset, types.CellType)) or hasattr(type(obj), "__next__")


class Reconstructor:
    """Builds, for the values that a step returns or leaves, functions that recreate them at each call.

    Attributes:
        tensors: the traced tensors among the values, each once; `CallFrame.fresh` returns their values by index.
        plain: the numbers, texts and classes among the values, as they are in the trace; not those that equal what they
            replace, which another trace of the same call may not replace: a count to which a 0 is added.
        retrace_reason: a description of what cannot be recreated, so that the step has to be traced at each call.
    """

    def __init__(
        self,
        is_traced: Callable[[Any], bool],
        is_old: Callable[[Any], bool],
        arguments: ArgumentPlaceholders = NO_ARGUMENTS,
    ) -> None:
        """
        Args:
            is_traced: whether a tensor was created by the step.
            is_old: whether an object existed before the step.
            arguments: the placeholders for the arguments.
        """
        self.tensors: list[DeferredTensor] = []
        self.plain: list[Any] = []
        self.retrace_reason: str | None = None
        self._numbers: dict[int, int] = {}
        self._is_traced = is_traced
        self._is_old = is_old
        self._arguments = arguments
        self._makes: dict[int, Make] = {}
        self._constant: set[int] = set()
        self._values: list[Any] = []

    def number(self, tensor: DeferredTensor) -> int:
        """The index of a traced tensor among those that are recreated."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]

    def release(self) -> None:
        """Release the tensors, once all values have been added."""
        self.tensors.clear()
        self._values.clear()
        self._is_old = lambda obj: True
        self._arguments = NO_ARGUMENTS  # also releases what existed before the step

    def container(self, container: Any) -> Make:
        """A function that returns `container` at each call: itself, unless it stands for a container of arguments."""
        if id(container) not in self._arguments.containers:
            return constant(container)
        number = self._arguments.containers[id(container)]
        return lambda env: env.containers()[number]

    def holds_arguments(self, container: Any) -> bool:
        """Whether it stands for a container of arguments, which differs at each call."""
        return id(container) in self._arguments.containers

    def make(self, value: Any, before: Any = MISSING) -> Make:
        """A function that recreates `value` at each call; `before` is what it replaces."""
        if id(value) in self._arguments.containers:
            return self.container(value)
        cached = self._makes.get(id(value))
        if cached is not None:
            return cached
        if type(value) in (torch.SymFloat, torch.SymInt):
            value = value.node.number()  # what C++ code has read, as by `super().item()`
        if (expression := input_of(value)) is not None:
            self._note(value_of(value), before)
            return computed(expression)
        if type(value) in _PLAIN or isinstance(value, type):
            self._note(value, before)
        kind = kind_of(type(value))
        if type(value) is UnavailableNumber:
            value.refuse()
        if kind.is_leaf or not isinstance(value, torch.Tensor) and self._is_old(value):
            return constant(value)
        self._values.append(value)  # so that its id is not reused
        box: list[Make] = []
        self._makes[id(value)] = lambda env: box[0](env)  # the value may contain itself
        new: Make = kind.make(value, self)
        box.append(new)
        self._makes[id(value)] = new
        return new

    def _note(self, value: Any, before: Any) -> None:
        if not same(value, before):
            self.plain.append(value)

    # -- for kinds --

    def cannot(self, value: Any) -> Make:
        """Note that `value` cannot be recreated: it is left as it is in the trace.

        Raises:
            TraceError: if it refers to a tensor of the step, which has no value.
        """
        if self._refers_to_traced(value):
            raise TraceError(
                f"{here()}: the step leaves {with_article(type(value).__qualname__)} that refers to a tensor that it "
                "has computed, and such an object cannot be created again at each call. Leave the tensor, or a list."
            )
        self.retrace_reason = self.retrace_reason or f"an object of type {type(value).__name__}"
        return constant(value)

    def _refers_to_traced(self, value: Any) -> bool:
        """Whether an object, which may be of C, refers to a tensor of the step, directly or in containers and iterators
        that it refers to."""
        seen, found = {id(value)}, [value]
        for held in found:
            for part in gc.get_referents(held):
                if isinstance(part, torch.Tensor):
                    if self._is_traced(part):
                        return True
                elif id(part) not in seen and len(found) < _MAX_REFERENTS and _is_searched(part):
                    seen.add(id(part))
                    found.append(part)
        return False

    @staticmethod
    def once(value: Any, create: Callable[[], Any], fill: Callable[[Any, CallFrame], Any]) -> Make:
        """Recreated once per call, even if it occurs in several places or contains itself.

        Args:
            create: makes a new, empty object.
            fill: puts in it what it holds, given the call's frame.
        """
        key = id(value)

        def make(env: CallFrame) -> Any:
            if key not in env.created:
                env.created[key] = new = create()
                fill(new, env)
            return env.created[key]

        return make

    def attributes(self, value: Any) -> Callable[[Any, CallFrame], None]:
        """A function that copies the attributes of `value` to a recreated object."""
        parts = {key: self.make(part) for key, part in (own_attributes(value) or {}).items()}

        def copy_to(new: Any, env: CallFrame) -> None:
            if parts:
                own_attributes(new).update({key: part(env) for key, part in parts.items()})  # type: ignore[union-attr]

        return copy_to

    def tensor(self, value: torch.Tensor) -> Make:
        """A function that recreates a tensor."""
        argument = self._arguments.tensors.get(id(value))
        if argument is not None:
            return lambda env: env.arguments[argument]
        key = id(value)
        if not self._is_traced(value) and self._is_old(value):
            return lambda env: env.current.get(key, value)
        new, more = self._new_tensor(value), self._attributes_and_gradient(value)

        def make(env: CallFrame) -> Any:
            if key not in env.created:
                env.created[key] = tensor = new(env)
                more(tensor, env)
            return env.created[key]

        return make

    def _new_tensor(self, value: torch.Tensor) -> Make:
        """A tensor created by the step, without attributes and gradient."""
        if self._is_traced(value):
            assert type(value) is DeferredTensor
            if value._storage.mirrors is not None:
                shows, view_of = self._new_tensor(unmirrored(value)), bits_of(value)
                return lambda env: view_of(shows(env))
            geometry = geometry_of(value)
            argument = self._arguments.storages.get(id(value._storage))
            if argument is not None:
                return lambda env: argument_view(env.arguments[argument], geometry)
            outer = self._arguments.outside(value._storage)
            if outer is not None:
                key = id(outer)
                return lambda env: same_memory(env.current.get(key, outer), geometry)
            number = self.number(value)
            return lambda env: env.fresh(number)
        if type(value) is not DeferredTensor:
            if self._arguments.shares_memory(value):
                return lambda env: value.detach()
            with torch.no_grad():
                copy = value.detach().clone()
            return lambda env: copy.clone()
        if value._storage.resident is None and value._storage.value.known:  # computed from constants
            content = Hooks.value_of(value)
            return lambda env: content.clone()
        storage, geometry = value._storage, geometry_of(value)  # a view of a weight: shows later updates
        return lambda env: DeferredTensor.wrap(storage, *geometry)

    def _attributes_and_gradient(self, value: torch.Tensor) -> Callable[[torch.Tensor, CallFrame], None]:
        """Copies attributes and gradient of `value` to the recreated tensor."""
        parts = {key: self.make(part) for key, part in value.__dict__.items() if key != "_storage"}
        leaf = value.requires_grad and value.is_leaf
        gradient_before = value.grad if value.is_leaf or value.retains_grad else None
        gradient = None if gradient_before is None else self.make(gradient_before)

        def copy_to(new: torch.Tensor, env: CallFrame) -> None:
            if parts:
                new.__dict__.update({key: part(env) for key, part in parts.items()})
            if leaf:
                new.requires_grad_(True)
            if gradient is not None:
                if not new.is_leaf:
                    new.retain_grad()
                new.grad = gradient(env)

        return copy_to


_PLAIN = (int, float, bool, str, bytes, complex, type(None))


def computed(expression: Expression) -> Make:
    """Computes an input number, or reads an input text, anew at each call."""
    return lambda env: expression.value(env.arguments, env.known)


def same_memory(tensor: torch.Tensor, geometry: Any) -> torch.Tensor:
    """A tensor with this geometry in the same storage."""
    if type(tensor) is DeferredTensor:
        return DeferredTensor.wrap(tensor._storage, *geometry)
    size, stride, offset, dtype = geometry
    return vector_of(tensor.detach(), dtype).as_strided(size, stride, offset)


def argument_view(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
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
        steps = _as_steps(tuple(tensor.shape), size, stride, offset)
        if steps is None:
            tensor = tensor.contiguous()
        else:
            strides, begin = steps
            tensor_stride = tensor.stride()
            stride = tuple(sum(n * s for n, s in zip(row, tensor_stride, strict=True)) for row in strides)
            offset = sum(n * s for n, s in zip(begin, tensor_stride, strict=True))
    return same_memory(tensor, (size, stride, offset + int(tensor.storage_offset()), dtype))


def _as_steps(
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
    digits = []
    for step, size in zip(contiguous_stride(shape), shape, strict=True):
        steps, number = divmod(number, step) if size > 1 else (0, number)
        digits.append(steps)
    return digits


class NothingAgain(Reconstructor):
    """For an undo, after which nothing is recreated: what the step has left may be refused."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: False, lambda obj: True)

    def make(self, value: Any, before: Any = MISSING) -> Make:
        return constant(value)


class _Constant:
    """Returns the same object at each call."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, env: CallFrame) -> Any:
        return self.value


def constant(value: Any) -> Make:
    """Returns the same object at each call."""
    return _Constant(value)


def is_constant(make: Make) -> bool:
    """Whether it returns the same object at each call."""
    return isinstance(make, _Constant)


class UnavailableNumber:
    """Replaces, while a step is traced, a number in a parameter group that a scheduler sets after the step."""

    def __init__(self, obj: str, scheduler: str, error: type[TraceError] = TraceError) -> None:
        self._error = error
        self._text = (
            f"the traced step reads {obj} after {scheduler}.step(), which runs in Python after the compiled step. "
            "Read it before, or outside of the traced step."
        )

    def refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Raise the error on any use."""
        raise self._error(f"{here()}: {self._text}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = refuse
    __pow__ = __rpow__ = __float__ = __int__ = __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __format__ = refuse
    __iter__ = __getitem__ = __len__ = refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers = [value for value in (*args, *(kwargs or {}).values()) if type(value) is cls]
        return numbers[0].refuse() if numbers else NotImplemented
