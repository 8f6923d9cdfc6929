"""Visits of the leaves of nested data, each with its path, as in `cerebras.pytorch.utils.nest`."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...compat.torch_names import pytree

Scope = list[str]
Visit = Callable[[Any], Iterator[tuple[Scope, Any]]]
_visits: dict[tuple[type, ...], Visit] = {}


def register_visit_fn(*types: type) -> Callable[[Visit], Visit]:
    """A decorator: the function yields `(path, value)` of each part of objects of these types."""

    def register(visit: Visit) -> Visit:
        _visits[types] = visit
        return visit

    return register


def unregister_visit_fn(*types: type) -> None:
    """Undo `register_visit_fn`."""
    _visits.pop(types, None)


def find_visit_fn(struct: Any) -> Visit | None:
    """The function registered for an object's type; None for leaves."""
    return next((visit for types, visit in _visits.items() if isinstance(struct, types)), None)


@register_visit_fn(dict, UserDict)
def visit_dict(struct: Any) -> Iterator[tuple[Scope, Any]]:
    """The values of a dict, by key."""
    for key, value in struct.items():
        yield [str(key)], value


@register_visit_fn(list, tuple)
def visit_list_tuple(struct: Any) -> Iterator[tuple[Scope, Any]]:
    """The items of a list or tuple, by index."""
    for index, value in enumerate(struct):
        yield [str(index)], value


def visit_structure(
    data_structure: Any, select_fn: Callable[[Any], bool], strict: bool = False, scope: Scope | None = None
) -> Iterator[tuple[Scope, Any]]:
    """Yield `(path, leaf)` of each leaf that `select_fn` selects; `scope` is the path to the whole.

    Raises:
        ValueError: if `strict`, for a leaf that is not selected.
    """
    scope = scope or []
    visit = find_visit_fn(data_structure)
    if visit is not None:
        for path, value in visit(data_structure):
            yield from visit_structure(value, select_fn, strict, scope + path)
    elif select_fn(data_structure):
        yield scope, data_structure
    elif strict:
        raise ValueError(f"{'.'.join(scope) or 'the data'} is of type {type(data_structure).__name__}")


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def visit_torch_tensors(
    data_structure: Any, strict: bool = False, scope: Scope | None = None
) -> Iterator[tuple[Scope, torch.Tensor]]:
    """`visit_structure` of the tensors."""
    return visit_structure(data_structure, _is_tensor, strict, scope)


def visit_device_tensors(
    data_structure: Any, device_type: str, strict: bool = False, scope: Scope | None = None
) -> Iterator[tuple[Scope, torch.Tensor]]:
    """`visit_torch_tensors` of those on devices of one type."""
    tensors = visit_torch_tensors(data_structure, strict, scope)
    return ((path, tensor) for path, tensor in tensors if tensor.device.type == device_type)


def map_structure(
    map_fn: Callable[[Scope, Any], Any],
    data_structure: Any,
    select_fn: Callable[[Any], bool],
    scope: Scope | None = None,
) -> Any:
    """The data with `map_fn(path, leaf)` in place of each leaf that `select_fn` selects."""

    def map_leaf(path: Any, leaf: Any) -> Any:
        return map_fn([*(scope or []), *map(_key, path)], leaf) if select_fn(leaf) else leaf

    return pytree.tree_map_with_path(map_leaf, data_structure)


def _key(entry: Any) -> str:
    return str(next(value for name in ("key", "idx", "name") if (value := getattr(entry, name, None)) is not None))


def map_torch_tensors(map_fn: Callable[[Scope, Any], Any], data_structure: Any, scope: Scope | None = None) -> Any:
    """`map_structure` of the tensors."""
    return map_structure(map_fn, data_structure, _is_tensor, scope)


def diff(data_structure_1: Any, data_structure_2: Any) -> Iterator[str]:
    """Descriptions of the differences between two nested data."""
    first, second = ({".".join(path): leaf for path, leaf in visit_structure(data, lambda _: True)} for data in
                     (data_structure_1, data_structure_2))  # fmt: skip
    for path in [*first, *(path for path in second if path not in first)]:
        if path not in first or path not in second:
            yield f"{path}: only in the {'first' if path in first else 'second'}"
        elif not _is_equal(first[path], second[path]):
            yield f"{path}: {first[path]!r} and {second[path]!r}"


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
