"""Batches in structures that PyTorch's pytree does not know: dicts in all but name, as tokenizers return them."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

from torch.utils import _pytree as pytree


def flatten(structure: Any) -> tuple[list[Any], Any]:
    """As `pytree.tree_flatten`; a `UserDict` (such as a `transformers.BatchEncoding`) is a dict that keeps its type."""
    leaves, spec = pytree.tree_flatten(structure)
    strangers = {type(leaf) for leaf in leaves if isinstance(leaf, UserDict)}
    if not strangers:
        return leaves, spec
    for kind in strangers:
        _register(kind)
    return flatten(structure)


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
    """The dicts, lists and other containers that `flatten` takes apart, and the dicts of their attributes: all that
    can be changed in place, in an order that depends on the structure alone."""
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
