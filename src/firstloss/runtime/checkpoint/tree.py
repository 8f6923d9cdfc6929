"""Encoding of nested Python data as JSON that decodes to the same types and values.

Lists, None, booleans, integers, strings and dicts with string keys are JSON's own. Anything else is an object with one
key that begins with "$": {"$tuple": [...]}, {"$dict": [[key, value], ...]}, {"$float": "nan"}. Tensors are stored
elsewhere, by name: {"$tensor": "model.weight"}.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...compat.torch_names import STATE_DICT_METADATA
from ...errors import CheckpointError, UnsavableError

_PLAIN = (type(None), bool, int, str)


_MAX_DEPTH = 200  # of nested containers; deeper ones would end in a RecursionError, here or in json


class Encoder:
    """Encodes objects as JSON; `store` is called with each tensor and its path, and returns its name."""

    def __init__(self, store: Callable[[torch.Tensor, str], str]) -> None:
        self._storage = store
        self._open: set[int] = set()

    def encode(self, obj: Any, where: str = "") -> Any:
        """Encode `obj`, whose path is `where`.

        Raises:
            UnsavableError: for anything that a checkpoint cannot hold, with its path.
        """
        kind = type(obj)
        if kind in _PLAIN:
            return obj
        if kind is float:
            return obj if math.isfinite(obj) else {"$float": repr(obj)}
        if isinstance(obj, torch.Tensor):
            return {"$tensor": self._storage(obj, where)}
        if kind in _CONTAINERS:
            if id(obj) in self._open:
                raise UnsavableError(f"{where or 'the object'} contains itself, which a checkpoint cannot hold.")
            if len(self._open) == _MAX_DEPTH:
                raise UnsavableError(
                    f"{where[:80]}... is nested more than {_MAX_DEPTH} levels deep, which a checkpoint cannot hold."
                )
            self._open.add(id(obj))
            try:
                return _CONTAINERS[kind](self, obj, where)
            finally:
                self._open.remove(id(obj))
        if isinstance(obj, np.ndarray):
            return {"$array": self._storage(_as_tensor(obj, where), where)}
        if isinstance(obj, (np.bool_, np.integer, np.floating)):
            return self.encode(obj.item(), where)
        if isinstance(obj, torch.dtype):
            return {"$dtype": str(obj).removeprefix("torch.")}
        if isinstance(obj, torch.device):
            return {"$device": str(obj)}
        if kind is complex:
            return {"$complex": [self.encode(obj.real), self.encode(obj.imag)]}
        if kind is bytes:
            return {"$bytes": base64.b64encode(obj).decode()}
        raise UnsavableError(
            f"{where or 'the object'} is of type {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, "
            "numbers, strings, None, and dicts, lists and tuples of them. Save its state_dict(), or leave it out."
        )

    def _list(self, obj: Any, where: str) -> list[Any]:
        return [self.encode(item, _join(where, i)) for i, item in enumerate(obj)]

    def _set(self, obj: set[Any], where: str) -> list[Any]:
        return self._list(sorted(obj, key=lambda item: (str(type(item)), repr(item))), where)

    def _pairs(self, obj: dict[Any, Any], where: str) -> list[Any]:
        return [[self.encode(k, _join(where, "(key)")), self.encode(v, _join(where, k))] for k, v in obj.items()]

    def _dict(self, obj: dict[Any, Any], where: str) -> dict[Any, Any]:
        if all(type(key) is str and not key.startswith("$") for key in obj):
            return {key: self.encode(value, _join(where, key)) for key, value in obj.items()}
        return {"$dict": self._pairs(obj, where)}

    def _ordered(self, obj: OrderedDict[Any, Any], where: str) -> dict[Any, Any]:
        metadata = getattr(obj, STATE_DICT_METADATA, None)
        out: dict[str, Any] = {"$ordered": self._pairs(obj, where)}
        return (
            out
            if metadata is None
            else {"$state_dict": [out, self.encode(metadata, _join(where, STATE_DICT_METADATA))]}
        )


_CONTAINERS: dict[type, Callable[[Encoder, Any, str], Any]] = {
    list: Encoder._list,
    tuple: lambda self, obj, where: {"$tuple": self._list(obj, where)},
    torch.Size: lambda self, obj, where: {"$size": self._list(obj, where)},
    dict: Encoder._dict,
    OrderedDict: Encoder._ordered,
    Counter: lambda self, obj, where: {"$counter": self._pairs(obj, where)},
    set: lambda self, obj, where: {"$set": self._set(obj, where)},
    frozenset: lambda self, obj, where: {"$frozenset": self._set(obj, where)},
}


def decode(data: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Decode `data`; `tensor` returns tensors by name.

    Raises:
        CheckpointError: if `data` was not written by an Encoder.
    """

    return _Decoder(tensor).decode(data)


class _Decoder:
    """Decodes what an Encoder has written."""

    def __init__(self, tensor: Callable[[str], torch.Tensor]) -> None:
        self.tensor = tensor

    def decode(self, data: Any) -> Any:
        """Decode `data`, at any depth."""
        if isinstance(data, list):
            return [*map(self.decode, data)]
        if not isinstance(data, dict):
            return data
        mark = next(iter(data)) if len(data) == 1 else ""
        if not mark.startswith("$"):
            return {key: self.decode(value) for key, value in data.items()}
        content = data[mark]
        if mark == "$tensor":
            return self.tensor(content)
        if mark == "$array":
            return self.tensor(content).numpy()
        try:
            return _READERS[mark](self, content)
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{mark} of {content!r:.80} cannot be decoded") from error

    def items(self, content: Any) -> Any:
        """The decoded items of a list."""
        return map(self.decode, content)

    def pairs(self, content: Any) -> dict[Any, Any]:
        """A dict of decoded pairs."""
        return dict(map(self.items, content))

    def state_dict(self, content: Any) -> Any:
        """A state dict, with its metadata."""
        out, metadata = self.items(content)
        setattr(out, STATE_DICT_METADATA, metadata)
        return out


_READERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$float": lambda self, content: float(content),
    "$tuple": lambda self, content: tuple(self.items(content)),
    "$size": lambda self, content: torch.Size(content),
    "$dict": _Decoder.pairs,
    "$ordered": lambda self, content: OrderedDict(self.pairs(content)),
    "$state_dict": _Decoder.state_dict,
    "$counter": lambda self, content: Counter(self.pairs(content)),
    "$set": lambda self, content: set(self.items(content)),
    "$frozenset": lambda self, content: frozenset(self.items(content)),
    "$dtype": lambda self, content: _dtype(content),
    "$device": lambda self, content: torch.device(content),
    "$complex": lambda self, content: complex(*self.items(content)),
    "$bytes": lambda self, content: base64.b64decode(content),
}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(name)
    return dtype


def _as_tensor(array: np.ndarray, where: str) -> torch.Tensor:
    try:
        return torch.from_numpy(array.copy(order="C"))
    except TypeError:
        raise UnsavableError(
            f"{where or 'the array'} is a numpy array of {array.dtype}, which torch does not have."
        ) from None


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)
