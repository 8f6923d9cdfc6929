"""Which names a piece of Python code reads and writes, and on which lines; from its bytecode."""

from __future__ import annotations

import dis
import functools
import types
from typing import NamedTuple

from ..capture.source import Source


class Uses(NamedTuple):
    """Of one code object: by name, the lines that read it, and those that write it.

    A read that only serves the name's own update (`n += 1`, `calls.append(x)`) is no read: it decides nothing.
    """

    reads: dict[str, Source]
    writes: dict[str, Source]


_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR",
          "LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS")  # fmt: skip
_STORES = ("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR")
_NOISE = ("CACHE", "RESUME", "NOP", "EXTENDED_ARG", "PRECALL", "SWAP", "COPY", "PUSH_NULL", "KW_NAMES", "ROT_TWO")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_COLLECTS = ("append", "add", "extend")


@functools.lru_cache(maxsize=65536)
def uses(code: types.CodeType) -> Uses:
    """What `code` itself uses, without the functions that are defined in it."""
    reads: dict[str, Source] = {}
    writes: dict[str, Source] = {}
    line = code.co_firstlineno
    steps: list[tuple[str, object, int]] = []
    for instruction in dis.get_instructions(code):
        positions = instruction.positions
        if positions is not None and positions.lineno is not None:
            line = positions.lineno
        if instruction.opname not in _NOISE:
            steps.append((instruction.opname, instruction.argval, line))
    for i, (op, name, line) in enumerate(steps):
        if op in _STORES and isinstance(name, str):
            writes.setdefault(name, Source(code.co_filename, line))
        elif op in _LOADS and isinstance(name, str):
            if _collects(steps[i + 1 :]):
                writes.setdefault(name, Source(code.co_filename, line))
            elif not _updates(name, steps[i + 1 : i + 4]):
                reads.setdefault(name, Source(code.co_filename, line))
        elif op in _CONSTANTS and isinstance(name, str) and name.isidentifier():
            reads.setdefault(name, Source(code.co_filename, line))  # getattr(self, "name")
    return Uses(reads, writes)


def _updates(name: str, after: list[tuple[str, object, int]]) -> bool:
    """Whether a value just loaded is only combined with a constant and stored under the same name."""
    if len(after) < 3:
        return False
    (constant, *_), (combine, *_), (store, target, _) = after
    return constant in _CONSTANTS and combine.startswith("BINARY_OP") and store in _STORES and target == name


def _collects(after: list[tuple[str, object, int]]) -> bool:
    """Whether a list or set just loaded is only added to."""
    if not after or after[0][1] not in _COLLECTS or after[0][0] not in ("LOAD_ATTR", "LOAD_METHOD"):
        return False
    depth = 0
    for op, _, _ in after[1:]:
        if op in ("LOAD_ATTR", "LOAD_METHOD") and depth > 40 or op.startswith(("STORE_", "RETURN_", "POP_JUMP")):
            return False
        if op == "POP_TOP":
            return True
        depth += 1
    return False
