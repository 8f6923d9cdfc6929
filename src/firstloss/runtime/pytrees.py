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
from collections.abc import Callable, Iterable, Iterator
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


# Classes of objects that have been data: whatever they hold later, a step's arguments keep their structure. They are
# not registered with PyTorch, which would keep them alive, and refuse to register them for users.
_data_classes: weakref.WeakSet[type] = weakref.WeakSet()


def is_size(value: Any) -> bool:
    """Whether it is a `torch.Size`, a leaf here: of PyTorch's pytrees it comes back as a plain tuple."""
    return type(value) is torch.Size


def flatten(structure: Any, is_whole: Callable[[Any], bool] = is_size) -> tuple[list[Any], Any]:
    """Like `pytree.tree_flatten`, but a `UserDict` (such as `transformers.BatchEncoding`) is a dict that keeps its
    type, and an object that is data is flattened by its attributes and items. `pytree.tree_unflatten` makes all of it
    again.

    Args:
        is_whole: whether a part is a leaf, whatever it holds: a `torch.Size`, at least.
    """
    leaves, spec = pytree.tree_flatten(structure, is_leaf=is_whole)
    if not any(_is_data(leaf) and not is_whole(leaf) for leaf in leaves):
        return leaves, spec
    return pytree.tree_flatten(_as_nodes(leaves, spec, is_whole), is_leaf=is_whole)


def flatten_with_path(structure: Any) -> list[tuple[Any, Any]]:
    """The leaves of `flatten`, each after its path."""
    leaves, spec = pytree.tree_flatten(structure, is_leaf=is_size)
    return pytree.tree_flatten_with_path(_as_nodes(leaves, spec), is_leaf=is_size)[0]


def tree_map(function: Callable[[Any], Any], structure: Any) -> Any:
    """The structure with `function` applied to each of its leaves."""
    leaves, spec = flatten(structure)
    return pytree.tree_unflatten(map(function, leaves), spec)


def is_leaf(value: Any) -> bool:
    """Whether `flatten` does not take it apart."""
    return pytree.tree_is_leaf(value, is_leaf=is_size) and not _is_data(value)


def flattened_attributes(value: Any) -> list[str]:
    """The names of the attributes by which `flatten` flattens an object; empty for anything else."""
    cls = type(value)
    flattened = (cls in _data_classes or cls in pytree.SUPPORTED_NODES) and not isinstance(value, UserDict)
    return _attributes(value) if flattened and _has_attributes(type(value)) else []


# -- what is data --


def _is_data(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return False
    _data_classes.update(_kinds_of_data(leaf) if type(leaf) not in _data_classes else ())
    return type(leaf) in _data_classes


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


class _Node:
    """An object that is data, to PyTorch's pytrees."""

    def __init__(self, value: Any, is_whole: Callable[[Any], bool]) -> None:
        """`is_whole`: as for `flatten`."""
        self.value = value
        self.is_whole = is_whole


def _as_nodes(leaves: list[Any], spec: Any, is_whole: Callable[[Any], bool] = is_size) -> Any:
    nodes = [_Node(leaf, is_whole) if _is_data(leaf) and not is_whole(leaf) else leaf for leaf in leaves]
    return pytree.tree_unflatten(nodes, spec)


def _apart(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """What an object holds, and what else it is made of: its class, the names of its attributes, and its keys."""
    if isinstance(value, UserDict):
        return list(value.data.values()), (type(value), (), tuple(value.data))
    held, (names, keys) = _parts(value)
    return [BackReference.TO_HOLDER if isinstance(part, weakref.ref) else part for part in held], (
        type(value),
        names,
        keys,
    )


def _node_parts(node: _Node) -> tuple[list[Any], tuple[Any, ...]]:
    held, made_of = _apart(node.value)
    leaves, spec = pytree.tree_flatten(held, is_leaf=node.is_whole)
    return _as_nodes(leaves, spec, node.is_whole), made_of


def _node_entries(node: _Node) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    held, (kind, names, keys) = _node_parts(node)
    paths = [*map(pytree.GetAttrKey, names), *map(pytree.MappingKey, keys)]
    return list(zip(paths, held, strict=True)), (kind, names, keys)


def _made(held: Iterable[Any], made_of: tuple[Any, ...]) -> Any:
    kind, names, keys = made_of
    held = list(held)
    if issubclass(kind, UserDict):
        return kind(dict(zip(keys, held, strict=True)))
    value: Any = builtin_base(kind).__new__(kind)  # like a copy: without the constructor, and also if frozen
    for name, part in zip(names, held, strict=False):
        object.__setattr__(value, name, part)
    if keys:
        items = held[len(names) :]
        set_items(value, items) if issubclass(kind, list) else set_table(value, dict(zip(keys, items, strict=True)))
    return value


pytree.register_pytree_node(_Node, _node_parts, _made, flatten_with_keys_fn=_node_entries)


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
    is_object = kind in _data_classes
    if node is None and not is_object or is_size(structure):
        return
    if structure or not isinstance(structure, tuple):
        yield structure
    if not isinstance(structure, tuple):
        attributes = getattr(structure, "__dict__", None)
        if type(attributes) is dict:
            yield attributes
        if isinstance(structure, UserDict):
            yield structure.data
    for part in _apart(structure)[0] if is_object else node.flatten_fn(structure)[0]:
        yield from containers(part)
