"""Texts of input numbers that a step prints: `print(f"step {i}: loss {loss.item():.4f}")`.

C code joins the pieces of such a text, and reads them. Where the code that formats a number does nothing with the
result but print or log it, its bytecode shows that; then a *mark* takes the number's place in the text, and is replaced
at each call (`runtime/step/closures.py`). Elsewhere the step is specialized on what the number is formatted to.
"""

from __future__ import annotations

import dis
import functools
import logging
import re
from types import CodeType, FrameType
from typing import Any

from ..compat.patches import is_replacement

# Between two characters that Unicode reserves for processes' own use: https://www.unicode.org/faq/private_use.html
_MARK = re.compile("\ufdd0([0-9]+)\ufdd1")

# What instructions take from the stack; some take as many more as their argument says.
_TAKEN = {
    **dict.fromkeys("LOAD_CONST LOAD_SMALL_INT LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_DEREF".split(), 0),
    **dict.fromkeys("LOAD_NAME LOAD_GLOBAL PUSH_NULL PRECALL KW_NAMES NOP EXTENDED_ARG CACHE BUILD_TUPLE".split(), 0),
    **dict.fromkeys("BUILD_STRING BUILD_LIST LOAD_FAST_BORROW LOAD_FAST_BORROW_LOAD_FAST_BORROW".split(), 0),
    **dict.fromkeys("LOAD_ATTR LOAD_METHOD UNARY_NEGATIVE UNARY_INVERT CONVERT_VALUE FORMAT_SIMPLE".split(), 1),
    **dict.fromkeys("BINARY_OP BINARY_SUBSCR FORMAT_WITH_SPEC CALL".split(), 2),
    **dict.fromkeys("BINARY_SLICE CALL_KW".split(), 3),
}
_COUNTED = ("BUILD_STRING", "BUILD_TUPLE", "BUILD_LIST", "CALL", "CALL_KW")
_NAMES = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF")
_CALLS = ("CALL", "CALL_KW")
_LOGGING = ("debug", "info", "warning", "error", "critical", "exception")


def mark(number: int) -> str:
    """What takes the place of the number with this index."""
    return f"\ufdd0{number}\ufdd1"


def pieces(text: Any) -> list[str | int]:
    """A text's pieces, with the indices of numbers in place of their marks; none if it has no marks."""
    if type(text) is not str or "\ufdd0" not in text:
        return []
    found = _MARK.split(text)
    return [int(piece) if place % 2 else piece for place, piece in enumerate(found)]


def is_for_print(frame: FrameType) -> bool:
    """Whether `frame`, which formats a value within an f-string, only prints or logs the result."""
    names = _called_with(frame.f_code, frame.f_lasti)
    if names is None:
        return False
    first, *rest = names
    scopes = (frame.f_locals, frame.f_globals, frame.f_builtins)
    called = next((scope[first] for scope in scopes if first in scope), None)
    if not rest:
        return is_replacement("builtins.print", called)
    *attributes, method = rest
    for name in attributes:
        called = getattr(called, "__dict__", {}).get(name)
    is_logger = called is logging or type(called) in (logging.Logger, logging.RootLogger)
    return is_logger and method in _LOGGING and logging.getLogRecordFactory() is logging.LogRecord


@functools.lru_cache(1 << 10)
def _called_with(code: CodeType, offset: int) -> tuple[str, ...] | None:
    """The names in the expression for the function whose argument the value at `offset` becomes, perhaps as a piece of
    a text: `print`, or `self.log.info`. None if it may become anything else."""
    instructions = list(dis.get_instructions(code))
    start = next((n for n, one in enumerate(instructions) if one.offset == offset), None)
    if start is None or not instructions[start].opname.startswith("FORMAT_"):
        return None
    if instructions[start].opname == "FORMAT_VALUE" and (instructions[start].arg or 0) & 3:  # repr or str before
        return None
    above = 0  # the number of values on the stack above it
    for one in instructions[start + 1 :]:
        if one.is_jump_target:
            return None
        count = one.arg or 0
        if one.opname == "FORMAT_VALUE":
            taken = 2 if count & 4 else 1
        elif one.opname in _TAKEN:
            taken = _TAKEN[one.opname] + (count if one.opname in _COUNTED else 0)
        else:
            return None
        if taken > above and one.opname == "BUILD_STRING":
            above = 0
        elif taken > above:
            is_argument = one.opname in _CALLS and above < count + (one.opname == "CALL_KW")
            return _names_called(instructions, one) if is_argument else None
        elif one.opname in _CALLS:
            above += 1 - taken
        elif one.opname != "PRECALL":  # of Python 3.11, whose effect belongs to CALL's
            above += dis.stack_effect(one.opcode, one.arg, jump=False)
    return None


def _names_called(instructions: list[dis.Instruction], call: dis.Instruction) -> tuple[str, ...] | None:
    """The names in the expression for what `call` calls, if it consists of names."""
    at = call.positions
    if at is None or at.lineno is None or at.col_offset is None:  # as by `python -X no_debug_ranges`
        return None
    begin, before = (at.lineno, at.col_offset), (one for one in instructions if one.offset < call.offset)
    here = [one for one in before if one.positions and (one.positions.lineno, one.positions.col_offset) == begin]
    loads = [one for one in here if one.positions != at and one.opname not in ("PUSH_NULL", "EXTENDED_ARG", "CACHE")]
    are_names = [one.opname in ("LOAD_ATTR", "LOAD_METHOD") for one in loads]
    are_names[:1] = [loads[0].opname in _NAMES] if loads else [False]
    return tuple([one.argval for one in loads]) if all(are_names) else None
