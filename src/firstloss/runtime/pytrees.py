"""Pytree support beyond PyTorch's: mappings such as tokenizers return, dataclasses, and batches of any class.

An object is taken apart if it is data: if it holds tensors or arrays, and besides them only numbers, texts and the
like, in attributes and items. A dataclass may hold anything besides. An object with a `state_dict` is no batch.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
import weakref
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..compat.python_names import is_python_class
from ..compat.torch_names import pytree
from .guards.access import (
    MISSING,
    builtin_base,
    items_of,
    own_attributes,
    set_items,
    set_table,
    slot_value,
    slots,
    table_of,
)

_ARRAYS = (torch.Tensor, np.ndarray)
_CONSTANTS = (*_ARRAYS, type(None), int, float, complex, str, bytes, enum.Enum, slice, range, np.generic, torch.dtype,
              torch.device, torch.Size, type, types.FunctionType, types.BuiltinFunctionType)  # fmt: skip


class BackReference(enum.Enum):
    """In place of a weak reference to an object that holds it, as PyTorch Geometric's batches have them: what it refers
    to follows from the structure."""

    TO_HOLDER = 0


def flatten(structure: Any) -> tuple[list[Any], Any]:
    """Like `pytree.tree_flatten`, but a `UserDict` (such as `transformers.BatchEncoding`) is a dict that keeps its
    type, and an object that is data is flattened by its attributes and items."""
    leaves, spec = pytree.tree_flatten(structure, is_leaf=is_size)
    of_data = {kind for leaf in leaves for kind in _kinds_of_data(leaf)}
    if not of_data:
        return leaves, spec
    for kind in of_data:
        _register_mapping(kind) if issubclass(kind, UserDict) else _register_object(kind)
    return flatten(structure)


def is_size(value: Any) -> bool:
    """Whether it is a `torch.Size`, a leaf here: of PyTorch's pytrees it comes back as a plain tuple."""
    return type(value) is torch.Size


def flattened_attributes(value: Any) -> list[str]:
    """The names of the attributes by which `flatten` flattens an object; empty for anything else."""
    flattened = type(value) in pytree.SUPPORTED_NODES and not isinstance(value, UserDict)
    return _attributes(value) if flattened and _has_attributes(type(value)) else []


# -- what is data --


def _kinds_of_data(value: Any) -> set[type]:
    """The classes to be taken apart in a leaf: its own and those of the objects that it holds, if it is data."""
    if isinstance(value, UserDict) or _is_dataclass(value) and _holds_array(value, set()):
        return {type(value)}
    kinds: set[type] = set()
    data = _may_be_data(value) and _holds_only_data(value, [], kinds) and any(issubclass(k, _ARRAYS) for k in kinds)
    return {kind for kind in kinds if not issubclass(kind, _CONSTANTS)} if data else set()


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(type(value)) and not isinstance(value, (torch.nn.Module, torch.Tensor))


def _may_be_data(value: Any) -> bool:
    cls = type(value)
    if not _has_attributes(cls) or hasattr(cls, "state_dict"):
        return False
    return builtin_base(cls) in (object, dict, collections.OrderedDict, list, types.SimpleNamespace)


def _has_attributes(cls: type) -> bool:
    return is_python_class(cls) or cls is types.SimpleNamespace


def _holds_array(value: Any, seen: set[int]) -> bool:
    """Whether an object contains a tensor or an array; `seen` guards against cycles."""
    seen.add(id(value))
    for part in pytree.tree_leaves(_parts(value)[0]):
        if isinstance(part, _ARRAYS):
            return True
        held = part.data if isinstance(part, UserDict) else part
        if any(isinstance(leaf, _ARRAYS) for leaf in pytree.tree_leaves(held)):
            return True
        if id(part) not in seen and (_is_dataclass(part) or _may_be_data(part)) and _holds_array(part, seen):
            return True
    return False


def _holds_only_data(value: Any, holders: list[Any], kinds: set[type]) -> bool:
    """Whether a value is an array or a constant, or contains nothing else; adds the classes of all but plain containers
    to `kinds`.

    Args:
        holders: the objects that hold it, to which it may refer by a weak reference.
    """
    if isinstance(value, weakref.ref):
        return any(value() is holder for holder in holders)
    if any(value is holder for holder in holders):
        return False
    if pytree.tree_is_leaf(value):
        kinds.add(type(value))
        if isinstance(value, _CONSTANTS):
            return True
        if not _may_be_data(value):
            return False
        parts = _parts(value)[0]
    else:
        parts = [part for _, part in pytree.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)[0]]
    return all(_holds_only_data(part, [*holders, value], kinds) for part in parts)


# -- how it is taken apart --


def _attributes(value: Any) -> list[str]:
    """The names of an object's slots that are set, and of its other attributes."""
    in_slots = [name for name in slots(type(value)) if slot_value(value, name) is not MISSING]
    return [*in_slots, *(own_attributes(value) or ())]


def _parts(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """What an object holds, and the names of its attributes, with its keys or indices."""
    names, table = tuple(_attributes(value)), own_attributes(value) or {}
    parts = [table[name] if name in table else slot_value(value, name) for name in names]
    if isinstance(value, dict):
        items = table_of(value)
    else:
        items = dict(enumerate(items_of(value))) if isinstance(value, list) else {}
    return [*parts, *items.values()], (names, tuple(items))


def _register_object(kind: type) -> None:
    def parts(value: Any) -> tuple[list[Any], Any]:
        held, context = _parts(value)
        return [BackReference.TO_HOLDER if isinstance(part, weakref.ref) else part for part in held], context

    def entries(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        held, (names, keys) = parts(value)
        paths = [*map(pytree.GetAttrKey, names), *map(pytree.MappingKey, keys)]
        return list(zip(paths, held, strict=True)), (names, keys)

    def made(held: Any, context: Any) -> Any:
        names, keys = context
        value: Any = builtin_base(kind).__new__(kind)  # like a copy: without the constructor, and also if frozen
        held = list(held)
        for name, part in zip(names, held, strict=False):
            object.__setattr__(value, name, part)
        if keys:
            items = held[len(names) :]
            set_items(value, items) if issubclass(kind, list) else set_table(value, dict(zip(keys, items, strict=True)))
        return value

    pytree.register_pytree_node(kind, parts, made, flatten_with_keys_fn=entries)


def _register_mapping(kind: type[UserDict[Any, Any]]) -> None:
    def entries(value: UserDict[Any, Any]) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        return [(pytree.MappingKey(key), item) for key, item in value.data.items()], tuple(value.data)

    pytree.register_pytree_node(
        kind,
        lambda value: (list(value.data.values()), tuple(value.data)),
        lambda items, keys: kind(dict(zip(keys, items, strict=True))),
        flatten_with_keys_fn=entries,
    )


def copied(original: Any, copy: Any, copies: dict[int, Any]) -> Any:
    """`copy`, which is `original` with other leaves, with containers shared, and referred to, as in `original`.

    Args:
        copies: by the id of a container in `original`, its copy.
    """
    names = flattened_attributes(original)
    if not isinstance(original, (dict, list, tuple)) and not names or is_size(original):
        return copy
    if isinstance(original, tuple):
        parts = [copied(a, b, copies) for a, b in zip(original, copy, strict=True)]
        return type(copy)(*parts) if hasattr(copy, "_fields") else type(copy)(parts)
    if id(original) in copies:
        return copies[id(original)]
    copies[id(original)] = copy
    for name in names:
        part = getattr(original, name)
        if isinstance(part, weakref.ref):
            new: Any = weakref.ref(copies[id(part())]) if id(part()) in copies else part
        else:
            new = copied(part, getattr(copy, name), copies)
        object.__setattr__(copy, name, new)
    if isinstance(original, list):
        set_items(copy, [copied(*pair, copies) for pair in zip(items_of(original), items_of(copy), strict=True)])
    elif isinstance(original, dict):
        before, now = table_of(original), table_of(copy)
        set_table(copy, {key: copied(before[key], now[key], copies) for key in before})
    return copy


def containers(structure: Any) -> Iterator[Any]:
    """The containers that `flatten` flattens, and the dicts of their attributes, in an order that depends only on the
    structure. (Not `()`, of which Python has one.)"""
    kind: Any = namedtuple if isinstance(structure, tuple) and hasattr(structure, "_fields") else type(structure)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None or is_size(structure):
        return
    if structure or not isinstance(structure, tuple):
        yield structure
    if not isinstance(structure, tuple):
        attributes = getattr(structure, "__dict__", None)
        if type(attributes) is dict:
            yield attributes
        if isinstance(structure, UserDict):
            yield structure.data
    for part in node.flatten_fn(structure)[0]:
        yield from containers(part)
