"""Pytree support beyond PyTorch's: mappings such as tokenizers return, and dataclasses with tensors."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ..compat.torch_names import pytree


def flatten(structure: Any) -> tuple[list[Any], Any]:
    """Like `pytree.tree_flatten`, but a `UserDict` (such as `transformers.BatchEncoding`) is a dict that keeps its
    type, and a dataclass that contains a tensor or an array is flattened by its attributes."""
    leaves, spec = pytree.tree_flatten(structure)
    strangers = {type(leaf) for leaf in leaves if isinstance(leaf, UserDict)}
    of_data = {type(leaf) for leaf in leaves if _is_dataclass(leaf) and _holds_data(leaf, set())}
    if not strangers and not of_data:
        return leaves, spec
    for kind in strangers:
        _register(kind)
    for kind in of_data - strangers:
        _register_dataclass(kind)
    return flatten(structure)


def flattened_attributes(value: Any) -> list[str]:
    """The names of the attributes by which `flatten` flattens a dataclass; empty for anything else."""
    return _attributes(value) if _is_dataclass(value) and type(value) in pytree.SUPPORTED_NODES else []


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(type(value)) and not isinstance(value, (torch.nn.Module, torch.Tensor))


def _holds_data(value: Any, seen: set[int]) -> bool:
    """Whether a dataclass contains a tensor or an array; `seen` guards against cycles."""
    seen.add(id(value))
    for part in pytree.tree_leaves([getattr(value, name) for name in _attributes(value)]):
        if isinstance(part, (torch.Tensor, np.ndarray)):
            return True
        inner = part.data if isinstance(part, UserDict) else part
        if inner is not part and _holds_data_in(inner, seen):
            return True
        if _is_dataclass(part) and id(part) not in seen and _holds_data(part, seen):
            return True
    return False


def _holds_data_in(entries: Any, seen: set[int]) -> bool:
    return any(
        isinstance(part, (torch.Tensor, np.ndarray))
        or (_is_dataclass(part) and id(part) not in seen and _holds_data(part, seen))
        for part in pytree.tree_leaves(entries)
    )


def _attributes(value: Any) -> list[str]:
    """The names of the dataclass's fields that are set, and of its other attributes."""
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return [*names, *(name for name in getattr(value, "__dict__", ()) if name not in names)]


def _register_dataclass(kind: type) -> None:
    def parts(value: Any) -> tuple[list[Any], Any]:
        names = tuple(_attributes(value))
        return [getattr(value, name) for name in names], names

    def entries(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        names = tuple(_attributes(value))
        return [(pytree.GetAttrKey(name), getattr(value, name)) for name in names], names

    def made(items: Any, names: Any) -> Any:
        value: Any = object.__new__(kind)  # like a copy: without the constructor, and also if frozen
        for name, item in zip(names, items, strict=True):
            object.__setattr__(value, name, item)
        return value

    pytree.register_pytree_node(kind, parts, made, flatten_with_keys_fn=entries)


def _register(kind: type[UserDict]) -> None:
    def entries(value: UserDict) -> tuple[list[tuple[Any, Any]], tuple]:
        return [(pytree.MappingKey(key), item) for key, item in value.data.items()], tuple(value.data)

    pytree.register_pytree_node(
        kind,
        lambda value: (list(value.data.values()), tuple(value.data)),
        lambda items, keys: kind(dict(zip(keys, items, strict=True))),
        flatten_with_keys_fn=entries,
    )


def containers(structure: Any) -> Iterator[Any]:
    """The containers that `flatten` flattens, and the dicts of their attributes: everything that can be mutated in
    place, in an order that depends only on the structure."""
    kind: Any = namedtuple if isinstance(structure, tuple) and hasattr(structure, "_fields") else type(structure)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None:
        return
    if not isinstance(structure, tuple):
        yield structure
        attributes = getattr(structure, "__dict__", None)
        if type(attributes) is dict:
            yield attributes
        if isinstance(structure, UserDict):
            yield structure.data
    for part in node.flatten_fn(structure)[0]:
        yield from containers(part)
