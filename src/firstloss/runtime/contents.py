"""What objects hold beside attributes: items, bytes, the place where an iterator stands.

`reader(held)` says whether a step's Python may find something else in an object although no name is bound anew, and
how to look; `inside(held)` gives what can be reached through it.
"""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import os
import random
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

# What holds more items, or bytes, than this is data: only its length is watched.
LARGEST = 1024
_MOST_BYTES = 1 << 16

_SEQUENCES = (list, collections.deque)
_SETS = (set, frozenset)
_BUFFERS = (bytearray, array.array)
_WRAPPERS = (collections.UserDict, collections.UserList)


def reader(held: Any) -> Callable[[], Any] | None:
    """A function that gives what is in `held` now, to be compared with what it gave before; None if nothing can change
    that is not an attribute."""
    kind = type(held)
    if kind in _FIXED:
        return None
    if isinstance(held, dict):
        return lambda: (*dict.keys(held), *dict.values(held)) if len(held) <= LARGEST else len(held)
    if isinstance(held, (*_SEQUENCES, set)):
        return lambda: tuple(held) if len(held) <= LARGEST else len(held)
    if isinstance(held, np.ndarray):
        return held.tobytes if held.dtype != object and held.nbytes <= _MOST_BYTES else None
    if isinstance(held, _BUFFERS):
        return lambda: bytes(held) if len(held) <= _MOST_BYTES else len(held)
    if isinstance(held, contextvars.ContextVar):
        return lambda: held.get(None)
    if isinstance(held, types.GeneratorType):
        return lambda: _place_of(held)
    if isinstance(held, random.Random):
        return held.getstate
    if isinstance(held, np.random.Generator):
        return lambda: repr(held.bit_generator.state)
    if isinstance(held, np.random.RandomState):
        return lambda: repr(held.get_state())
    if held is os.environ:
        return lambda: tuple(os.environ._data.items())  # type: ignore[attr-defined]
    if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
        return lambda: _stands_at(held)
    return None


def inside(held: Any) -> Iterable[Any]:
    """The objects that can be reached through `held` without naming an attribute."""
    if isinstance(held, dict):
        return list(dict.values(held)) if len(held) <= LARGEST else ()
    if isinstance(held, (*_SEQUENCES, *_SETS, tuple)):
        return list(held) if len(held) <= LARGEST else ()
    if isinstance(held, _WRAPPERS):
        return (held.data,)
    if isinstance(held, weakref.ref):
        return (held(),)
    if isinstance(held, functools.partial):
        return (held.func, *held.args, *held.keywords.values())
    if isinstance(held, types.GeneratorType):
        return () if held.gi_frame is None else list(held.gi_frame.f_locals.values())
    if hasattr(type(held), "__next__") and type(held).__module__ in ("builtins", "itertools"):
        state = _stands_at(held)
        return state if isinstance(state, tuple) else ()
    return ()


def holds(held: Any) -> bool:
    """Whether something may be in `held`."""
    return type(held) not in _FIXED and (reader(held) is not None or bool(inside(held)))


_FIXED = {int, float, bool, str, bytes, complex, type(None), types.FunctionType, types.BuiltinFunctionType, type,
          types.ModuleType, torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, torch.Size}  # fmt: skip


def _place_of(generator: types.GeneratorType) -> Any:
    """Where a generator stands, and what its variables are."""
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, *frame.f_locals.values())


def _stands_at(iterator: Any) -> Any:
    """Where one of Python's own iterators stands: what pickle would save of it, flattened; None if it will not tell."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of itertools, whose iterators cannot be pickled from Python 3.14 on
            return tuple(_flattened(iterator.__reduce__()[1:]))
    except (AttributeError, TypeError):
        return repr(iterator)


def _flattened(state: Any) -> Iterable[Any]:
    for part in state:
        if isinstance(part, tuple):
            yield from _flattened(part)
        else:
            yield part
