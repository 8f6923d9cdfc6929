"""`Shapes`: kinds of batches. One of new shapes is compiled for as well, padded to a known shape, or rejected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...capture.input_numbers import is_plain_number
from ...capture.input_texts import is_text
from ...errors import NotTraceableError, ShapeError, TraceError
from ...program.graph import is_not_strided, layout_name
from ...program.source import here
from ..guards.kind import kind_of
from ..pytrees import flatten, flatten_with_path
from .arguments import Arguments, ByIdentity

# How many kinds are remembered: shapes, or objects, may be others at each call.
_MAX_KINDS = 1024


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
        self._kinds: dict[Any, dict[tuple[Any, ...], None]] = {}  # kinds, by everything except shapes
        self._varying: dict[Any, dict[int, str]] = {}  # likewise, indices and names of changed numbers and texts

    def admit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, tuple[Any, ...]]:
        """The arguments to run the step on, padded if necessary, and their kind.

        Raises:
            ShapeError: for a new kind, if those are refused.
            TraceError: for an argument that is neither a tensor nor a constant.
        """
        leaves, spec = flatten(args_and_kwargs := (args, kwargs))
        kind = tuple(map(_kind, leaves))
        kinds = self._kinds.setdefault(spec, {})
        padded: frozenset[int] = frozenset()
        varying = self._varying.get(spec, {})
        if varying:
            kind = _without_values(kind, varying)
        if kind not in kinds and kinds and (changed := _changed_inputs(_last(kinds), kind)):
            names = self._names(args, kwargs)
            varying = self._varying[spec] = {**varying, **{i: names[i] for i in changed}}
            kind = _without_values(kind, varying)
            self._kinds[spec] = kinds = dict.fromkeys(_without_values(k, varying) for k in kinds)
        if kind in kinds:
            return Arguments(args_and_kwargs, leaves, spec, varying=varying), kind
        if isinstance(self._policy, Pad):
            self._check_names(args, kwargs)
        if kinds and self._policy == "refuse":
            change = self._change(_last(kinds), kind, args, kwargs)
            raise ShapeError(f"{here()}: {self._step} is called with {change}.")
        news = None
        if kinds and isinstance(self._policy, Pad):
            target = self._target(kinds, kind)
            if target is not None:
                names = self._names(args, kwargs)
                leaves = [self._padded(*item) for item in zip(leaves, kind, target, names, strict=True)]
                padded = frozenset(i for i, leaf in enumerate(leaves) if kind[i] != target[i])
                if target in kinds:
                    return Arguments(args_and_kwargs, leaves, spec, padded, varying), target
                kind, new = target, kind
                news = self._change(_last(kinds), new, args, kwargs)
        elif kinds:
            news = self._change(_last(kinds), kind, args, kwargs)
        kinds[kind] = None
        if len(kinds) > _MAX_KINDS:
            del kinds[next(iter(kinds))]
        return Arguments(args_and_kwargs, leaves, spec, padded, varying, news), kind

    def _target(self, kinds: Iterable[tuple[Any, ...]], kind: tuple[Any, ...]) -> tuple[Any, ...] | None:
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
        out = []
        for path, _ in flatten_with_path((args, kwargs)):
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
        kinds = [b for a, b in zip(before, now, strict=True) if a != b]
        if any(type(kind[1]) is ByIdentity for kind in kinds):
            advice = ": a compiled step is for one such object. Pass the same again, or the tensors that it holds"
        elif any(kind[0] is not torch.Tensor for kind in kinds):
            advice = ": a number is part of the compiled step. Pass what changes as a tensor"
        else:
            advice = (
                ". Use batches of one shape (drop_last=True, padding in the loader), or write "
                "@fl.trace(shapes=fl.Pad(...))"
            )
        return "; ".join(changed) + advice


def _kind(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        if is_not_strided(leaf):
            raise NotTraceableError(
                f"{here()}: a compiled step takes dense tensors, but one of its arguments has the layout "
                f"{layout_name(leaf)}. Make it dense by `.to_dense()`, `.to_padded_tensor(0.0)` or `.dequantize()`."
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
    # Not None, a dtype or another constant without weak references, nor a class, which its name describes.
    is_one_of_many = (
        type(leaf).__hash__ is object.__hash__ and type(leaf).__weakrefoffset__ and not isinstance(leaf, type)
    )
    return (type(leaf), ByIdentity(leaf) if is_one_of_many else leaf)


def _last(kinds: dict[tuple[Any, ...], None]) -> tuple[Any, ...]:
    return next(reversed(kinds))


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
