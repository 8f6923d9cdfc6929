"""The hash table behind a set, which decides in what order its items are iterated over, and which one `pop` takes.

Both depend on the set's history: on the size to which the table has grown, on items that were removed, and on where the
last `pop` ended. So the items alone do not restore a set; its table does.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from .access import items_of, set_items

# CPython's PySetObject after the head of every object: six numbers (the entries in use and removed; those in use; the
# table's size - 1; its address; a hash, which only frozensets have; where the next `pop` begins to search), the table
# of a small set, and the weak references. An entry is the address of an item and the item's hash.
_HEAD = object.__basicsize__
_Numbers = ctypes.c_ssize_t * 6
_ENTRY = 16
_SMALL = 8  # entries in the object itself
_SMALL_TABLE = _HEAD + ctypes.sizeof(_Numbers)
_SIZE = _SMALL_TABLE + _SMALL * _ENTRY + ctypes.sizeof(ctypes.c_void_p)
_allocate = ctypes.pythonapi.PyMem_Malloc
_allocate.restype = ctypes.c_void_p
_allocate.argtypes = [ctypes.c_size_t]
_hold = ctypes.pythonapi.Py_IncRef
_hold.argtypes = [ctypes.py_object]
_hold.restype = None


class SetTable:
    """The table of a set, as of its creation."""

    __slots__ = ("_entries", "_filled", "_items", "_next")

    def __init__(self, container: set[Any]) -> None:
        self._items = items_of(container)  # which are kept alive
        self._filled = self._next = 0
        self._entries = b""
        if can_read_tables():
            self._filled, _, mask, address, _, self._next = _Numbers.from_address(id(container) + _HEAD)
            self._entries = ctypes.string_at(address, (mask + 1) * _ENTRY)

    def order(self) -> tuple[Any, ...]:
        """What decides the order of the items: equal for tables that cannot be told apart."""
        return self._next, self._entries

    def restore(self, container: set[Any]) -> None:
        """Give the table to a set, in place of its own."""
        if not can_read_tables():
            set_items(container, self._items)
            return
        size = len(self._entries)
        small = size == _SMALL * _ENTRY
        address = id(container) + _SMALL_TABLE if small else _allocate(size)
        if address is None:
            raise MemoryError
        if not small:
            ctypes.memmove(address, self._entries, size)
        numbers = _Numbers(self._filled, len(self._items), size // _ENTRY - 1, address, -1, self._next)
        new = bytes(numbers) + (self._entries if small else bytes(_SMALL * _ENTRY))
        for item in self._items:  # references of the table's; an interrupt in between leaves some too many
            _hold(item)
        set.clear(container)
        ctypes.memmove(id(container) + _HEAD, new, len(new))


@functools.cache
def can_read_tables() -> bool:
    """Whether sets are laid out in memory as CPython 3.11 to 3.13 do it."""
    example: set[Any] = {1, 2, 3}
    if set.__basicsize__ != _SIZE:
        return False
    filled, used, mask, address, *_ = _Numbers.from_address(id(example) + _HEAD)
    return (filled, used, mask, address) == (3, 3, _SMALL - 1, id(example) + _SMALL_TABLE)
