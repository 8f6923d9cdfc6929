"""Guards on `functools.lru_cache`: cached results, which a step may read without running any code.

Python reveals only the number of cached results; the results themselves are found by the garbage collector.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import islice
from typing import Any

from .snapshot import LARGEST


def results(cached: Any) -> list[Any]:
    """The cached results, unless there are too many."""
    referents, table = _parts(cached)
    if table is None:
        return []
    if cached.cache_info().maxsize is None:
        return list(islice(dict.values(table), LARGEST))
    # The function's type; key, result and type of each entry; the table; ...
    entries = [referents[at : at + 3] for at in range(1, next(i for i, r in enumerate(referents) if r is table), 3)]
    types = {type(entry) for entry in dict.values(table)}
    return [entry[1] for entry in entries[:LARGEST] if len(entry) == 3 and entry[2] in types]


def unchanged(cached: Any) -> Callable[[], bool]:
    """A function that returns whether all entries that are cached now are still cached."""
    before = _entries(cached)

    def read() -> bool:
        now = _entries(cached)
        return len(now) >= len(before) and all(a is b or a == b for a, b in zip(before, now, strict=False))

    return read


def _entries(cached: Any) -> list[Any]:
    """Keys and results of the oldest entries: the same objects while they are cached."""
    _, table = _parts(cached)
    if table is None:  # another layout of the cache: only the count of results is known
        return [cached.cache_info()[1:]]
    return [_Identity(value) for value in islice(dict.values(table), LARGEST)]


class _Identity:
    """Compares by identity, and keeps the object alive, so that its address is not reused."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _parts(cached: Any) -> tuple[list[Any], dict[Any, Any] | None]:
    """The objects that the garbage collector finds behind the function, and the cache's table."""
    referents = gc.get_referents(cached)
    attributes = cached.__dict__
    size = cached.cache_info().currsize
    tables = [part for part in referents if type(part) is dict and part is not attributes and len(part) == size]
    return referents, tables[-1] if tables else None  # cached results that are dicts come before the table
