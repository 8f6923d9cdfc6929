"""Arguments of a call of a traced step: which are inputs, and which are part of the compiled step's key.

Data is read anew at each call: while the step is traced, a tensor without a value stands in for it. What the step does
to the placeholder (writing to it, giving it a gradient, replacing it in a dict or list) is done to the argument at each
call. An argument that the step also reaches in another way, such as one of its weights, is itself an input, and the
compiled step is for that object only.

A batch of new shapes is compiled for as well, padded to a known shape, or rejected (`Shapes`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...capture.input_numbers import NUMBERS, Expression, Source, is_plain_number
from ...capture.input_texts import InputText, is_text
from ...capture.step import StepTrace
from ...capture.tensor import DeferredStorage, DeferredTensor
from ...compat.torch_names import PARAMETER_FLAG, backward_hooks, pytree
from ...errors import GraphChangeWarning, NotTraceableError, ShapeError, TraceError
from ...program.graph import Value, contiguous_stride, is_not_strided
from ...program.source import here, warn
from ..guards.effects import Bind, Effects
from ..guards.kind import kind_of
from ..guards.reconstruct import ArgumentPlaceholders, CallFrame, Reconstructor
from ..pytrees import BackReference, containers, copied, flatten

_OUR_ATTRIBUTES = {"_storage", PARAMETER_FLAG}


class ByIdentity:
    """An object as part of a key, compared by identity."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held: Any = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return type(other) is ByIdentity and other.held is self.held

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
        varying: the indices of numbers and texts that are inputs, since they have been seen to change; with names.
        known: numbers that were computed for this call.
    """

    __slots__ = (
        "leaves", "spec", "gradients", "itself", "padded", "varying", "known", "_args_and_kwargs", "_count",
        "_containers",
    )  # fmt: skip

    def __init__(
        self,
        args_and_kwargs: tuple[Any, ...],
        leaves: list[Any],
        spec: Any,
        padded: frozenset[int] = frozenset(),
        varying: Mapping[int, str] | None = None,
    ) -> None:
        """
        Args:
            args_and_kwargs: the positional and keyword arguments.
            leaves: their leaves, padded.
        """
        self.varying: Mapping[int, str] = {} if varying is None else varying
        self.known: dict[Expression, Any] = {}
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
        pattern = (() if alone else _pattern(self.leaves), _pattern(self.containers()) if shared else (), strided)
        return pattern, tuple(self.gradients), tuple([(i, ByIdentity(self.leaves[i])) for i in sorted(self.itself)])

    def _container_passed_twice(self) -> bool:
        """Whether a dict or a list is passed twice."""
        args, kwargs = self._args_and_kwargs
        if all(pytree.tree_is_leaf(value) for value in (*args, *kwargs.values())):
            return False
        held = self.containers()
        return len({id(container) for container in held}) < len(held)

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
        """The dicts, lists and objects that contain them; see `pytrees.containers`."""
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


@dataclass(frozen=True)
class Pad:
    """Pad batches of new shapes at the end of each dimension to a shape that has been compiled already.

    A batch that is larger than all before, in any dimension, is compiled. The step must ignore padding, and returns
    results of the padded shape: pad labels with the index that the loss ignores (`Pad(values={"labels": -100})` for
    `cross_entropy`), masks with 0.

    Examples:
        >>> device = fl.backend("XLA")
        >>> @fl.trace(shapes=fl.Pad(multiple_of=4))
        ... def total(x):
        ...     return x.sum()
        >>> [total(torch.ones(rows)).item() for rows in (8, 5, 7)]  # compiled once: 5 and 7 are padded to 8
        [8.0, 5.0, 7.0]

    Attributes:
        value: the padding value.
        values: padding values by a tensor's name: its key in the batch, or the argument's name.
        multiple_of: new shapes are rounded up to multiples of this, in the dimensions that differ from earlier shapes.
    """

    value: float = 0
    values: Mapping[str, float] = field(default_factory=dict)
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise ShapeError(f"Pad(values={self.values!r}): pass a dict of numbers by name, as {{'labels': -100}}.")
        for value in (self.value, *self.values.values()):
            if not isinstance(value, (int, float)):
                raise ShapeError(f"Pad pads with numbers, not with {value!r}.")
        if not isinstance(self.multiple_of, int) or isinstance(self.multiple_of, bool) or self.multiple_of < 1:
            raise ShapeError(f"Pad(multiple_of={self.multiple_of!r}): pass a positive integer.")


class Shapes:
    """The kinds of batches that a step has been called with, and the handling of new ones.

    A kind is the structure of the arguments, with each leaf's shape and dtype, or its value if it is not a tensor.
    """

    def __init__(self, step: str, policy: Any, parameters: Sequence[str] = ()) -> None:
        """`parameters`: the names of the step's positional parameters."""
        if policy not in ("recompile", "refuse") and not isinstance(policy, Pad):
            raise TraceError(f"shapes={policy!r}: write 'recompile', 'refuse' or firstloss.Pad(...).")
        self._step = step
        self._policy = policy
        self._parameters = parameters
        self._kinds: dict[Any, tuple[Any, ...]] = {}  # kinds, by everything except shapes
        self._varying: dict[Any, dict[int, str]] = {}  # likewise, indices and names of changed numbers and texts

    def admit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, tuple[Any, ...]]:
        """The arguments to run the step on, padded if necessary, and their kind.

        Raises:
            ShapeError: for a new kind, if those are refused.
            TraceError: for an argument that is neither a tensor nor a constant.
        """
        leaves, spec = flatten(args_and_kwargs := (args, kwargs))
        kind = tuple(map(_kind, leaves))
        kinds = self._kinds.setdefault(spec, ())
        padded: frozenset[int] = frozenset()
        varying = self._varying.get(spec, {})
        if varying:
            kind = _without_values(kind, varying)
        if kind not in kinds and kinds and (changed := _changed_inputs(kinds[-1], kind)):
            names = self._names(args, kwargs)
            varying = self._varying[spec] = {**varying, **{i: names[i] for i in changed}}
            kind = _without_values(kind, varying)
            self._kinds[spec] = kinds = tuple(dict.fromkeys(_without_values(k, varying) for k in kinds))
        if kind in kinds:
            return Arguments(args_and_kwargs, leaves, spec, varying=varying), kind
        if isinstance(self._policy, Pad):
            self._check_names(args, kwargs)
        if kinds and self._policy == "refuse":
            raise ShapeError(f"{here()}: {self._step} is called with {self._change(kinds[-1], kind, args, kwargs)}.")
        if kinds and isinstance(self._policy, Pad):
            target = self._target(kinds, kind)
            if target is not None:
                names = self._names(args, kwargs)
                leaves = [self._padded(*item) for item in zip(leaves, kind, target, names, strict=True)]
                padded = frozenset(i for i, leaf in enumerate(leaves) if kind[i] != target[i])
                if target in kinds:
                    return Arguments(args_and_kwargs, leaves, spec, padded, varying), target
                kind, new = target, kind
                self._warn(self._change(kinds[-1], new, args, kwargs))
        elif kinds:
            self._warn(self._change(kinds[-1], kind, args, kwargs))
        certain = any(type(leaf[1]) is ByIdentity for leaf in kind)  # may be other objects at each call
        self._kinds[spec] = (kind,) if certain else (*kinds, kind)
        return Arguments(args_and_kwargs, leaves, spec, padded, varying), kind

    def _target(self, kinds: tuple[Any, ...], kind: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The kind to pad to: the smallest known one that is large enough, else a new one; None if no known kind is
        similar."""
        fits = [old for old in kinds if _holds(old, kind)]
        if fits:
            return min(fits, key=_size)
        similar = [old for old in kinds if _same_but_sizes(old, kind)]
        if not similar:
            return None
        return tuple(self._rounded(k, similar[-1][i]) for i, k in enumerate(kind))

    def _rounded(self, leaf: tuple[Any, ...], before: tuple[Any, ...]) -> tuple[Any, ...]:
        if leaf[0] is not torch.Tensor:
            return leaf
        n = self._policy.multiple_of
        shape = tuple(a if a == b else -(-a // n) * n for a, b in zip(leaf[1], before[1], strict=True))
        return (torch.Tensor, shape, *leaf[2:])

    def _padded(self, leaf: Any, kind: tuple[Any, ...], target: tuple[Any, ...], name: str) -> Any:
        if kind == target:
            return leaf
        sizes: list[int] = []
        for size, target_size in zip(reversed(kind[1]), reversed(target[1]), strict=True):
            sizes += [0, target_size - size]
        value = self._policy.values.get(name, self._policy.value)
        return torch.nn.functional.pad(leaf, sizes, value=value)

    def _names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """For each leaf, the last key on the path to it that is a name: in the batch, or of the step's parameter."""
        paths, _ = pytree.tree_flatten_with_path((args, kwargs))
        out = []
        for path, _ in paths:
            keys = [getattr(entry, "key", getattr(entry, "name", None)) for entry in path]
            strings = [key for key in keys if isinstance(key, str)]
            position = getattr(path[1], "idx", None) if len(path) > 1 and not strings else None
            parameter = "" if position is None or position >= len(self._parameters) else self._parameters[position]
            out.append(strings[-1] if strings else parameter)
        return out

    def _check_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check that every name in `Pad(values=...)` is one of the batch."""
        names = self._names(args, kwargs)
        for name in self._policy.values:
            if name not in names:
                known = ", ".join(repr(known) for known in dict.fromkeys(names) if known) or "none"
                raise ShapeError(
                    f"{here()}: Pad(values={{{name!r}: ...}}): {self._step} is called with no tensor of that name. The "
                    f"names of its arguments are: {known}."
                )

    def _change(
        self, before: tuple[Any, ...], now: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[Any, Any]
    ) -> str:
        changed = [
            f"{name or 'its argument'} {_show(b)} (before: {_show(a)})"
            for name, a, b in zip(self._names(args, kwargs), before, now, strict=True)
            if a != b
        ]
        numbers = any(b[0] is not torch.Tensor for a, b in zip(before, now, strict=True) if a != b)
        advice = (
            ": a number is part of the compiled step. Pass what changes as a tensor"
            if numbers
            else ". Use batches of one shape (drop_last=True, padding in the loader), or write "
            "@fl.trace(shapes=fl.Pad(...))"
        )
        return "; ".join(changed) + advice

    def _warn(self, text: str) -> None:
        warn(GraphChangeWarning(f"{here()}: {self._step} is recompiled for {text}."))


def _kind(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        if is_not_strided(leaf):
            layout = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else leaf.layout
            raise NotTraceableError(
                f"{here()}: a compiled step takes dense tensors, but one of its arguments is {layout}. Pass a dense "
                "tensor, as made by `.to_dense()`, `.to_padded_tensor(0.0)` or `.dequantize()`."
            )
        return (torch.Tensor, tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    try:
        hash(leaf)
    except TypeError:
        if kind_of(type(leaf)).has_only_attributes:  # a dataclass, for example
            return (type(leaf), ByIdentity(leaf))
        raise NotTraceableError(
            f"{here()}: a traced step was given an argument of type {type(leaf).__name__}. Pass tensors, in tuples, "
            "lists, dicts and objects that hold nothing else, or constants: torch.from_numpy(array) for a NumPy array."
        ) from None
    return (type(leaf), leaf)


class _AnyValue:
    def __repr__(self) -> str:
        return "any value"


_ANY = _AnyValue()


def _without_values(kind: tuple[Any, ...], varying: Mapping[int, str]) -> tuple[Any, ...]:
    """A kind without the values of the numbers and texts that vary."""
    return tuple([(leaf[0], _ANY) if i in varying and len(leaf) == 2 else leaf for i, leaf in enumerate(kind)])


def generalizes(kind: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a kind is another one, or that without the values of some numbers and texts."""
    return len(kind) == len(other) and all(
        a == b or a[0] is b[0] and len(a) == 2 and a[1] is _ANY for a, b in zip(kind, other, strict=True)
    )


def _changed_inputs(old: tuple[Any, ...], kind: tuple[Any, ...]) -> list[int]:
    """The indices of numbers and texts that have changed."""
    return [
        i
        for i, (a, b) in enumerate(zip(old, kind, strict=True))
        if a != b and a[0] is b[0] and len(a) == 2 and (is_plain_number(b[1]) or is_text(b[1]))
    ]


def _same_but_sizes(old: tuple[Any, ...], kind: tuple[Any, ...]) -> bool:
    """Whether two kinds differ only in sizes."""
    return all(
        a == b or a[0] is b[0] is torch.Tensor and a[2:] == b[2:] and len(a[1]) == len(b[1])
        for a, b in zip(old, kind, strict=True)
    )


def _holds(old: tuple[Any, ...], kind: tuple[Any, ...]) -> bool:
    return _same_but_sizes(old, kind) and all(
        all(n >= m for n, m in zip(a[1], b[1], strict=True))
        for a, b in zip(old, kind, strict=True)
        if a[0] is torch.Tensor
    )


def _size(kind: tuple[Any, ...]) -> int:
    return sum(torch.Size(leaf[1]).numel() for leaf in kind if leaf[0] is torch.Tensor)


def _show(leaf: tuple[Any, ...]) -> str:
    if leaf[0] is not torch.Tensor:
        return repr(leaf[1])
    gradients = " that requires gradients" if leaf[3] else ""
    return f"{str(leaf[2]).removeprefix('torch.')}{list(leaf[1])}{gradients}"
