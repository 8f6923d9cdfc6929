"""Texts of input numbers that a step prints: `print(f"step {i}: loss {loss.item():.4f}")`.

C code joins the pieces of such a text, and reads them. Where the code that formats a number, in an f-string or by
`"...".format(...)`, does nothing with the result but print or log it, its bytecode shows that; then a *mark* takes the
number's place in the text, and is replaced at each call (`runtime/step/closures.py`). Elsewhere the step is specialized
on what the number is formatted to.
"""

from __future__ import annotations

import dis
import functools
import inspect
import logging
import re
import string
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
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_NO_LOADS = ("PUSH_NULL", "EXTENDED_ARG", "CACHE", "KW_NAMES")
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
    """Whether `frame`, which formats a value within an f-string or `str.format`, only prints or logs the result."""
    calls = _uses(frame.f_code, frame.f_lasti)
    return calls is not None and all(_prints(names, frame) for names in calls)


def _prints(names: tuple[str, ...], frame: FrameType) -> bool:
    """Whether these names in a frame's code are `print`, or a logger's method."""
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


_Calls = frozenset[tuple[str, ...]]


@functools.lru_cache(1 << 10)
def _uses(code: CodeType, offset: int) -> _Calls | None:
    """What the text that the instruction at `offset` makes becomes an argument of, perhaps as a piece of another text,
    or by a local variable: the names in the expressions for these functions, such as `print`, or `self.log.info`. None
    if it may become anything else."""
    instructions = list(dis.get_instructions(code))
    start = next((n for n, one in enumerate(instructions) if one.offset == offset), None)
    if start is None:
        return None
    maker = instructions[start]
    if maker.opname in _CALLS:
        if not _is_format(instructions, maker):
            return None
    elif not maker.opname.startswith("FORMAT_"):
        return None
    elif maker.opname == "FORMAT_VALUE" and (maker.arg or 0) & 3:  # repr or str before
        return None
    return _uses_on_stack(code, instructions, start, 0, frozenset())


def _uses_on_stack(
    code: CodeType, instructions: list[dis.Instruction], start: int, above: int, followed: frozenset[str]
) -> _Calls | None:
    """As `_uses`, of what is on the stack after an instruction.

    Args:
        above: the number of values on the stack above it.
        followed: the local variables that it has been in.
    """
    for one in instructions[start + 1 :]:
        if one.is_jump_target:
            return None
        count = one.arg or 0
        if one.opname == "STORE_FAST" and not above:
            return _uses_of_variable(code, instructions, one.argval, followed)
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
            if not (is_argument and _is_format(instructions, one, texts=True)):
                names = _names_called(instructions, one) if is_argument else None
                return None if names is None else frozenset([names])
            above = 0
        elif one.opname in _CALLS:
            above += 1 - taken
        elif one.opname != "PRECALL":  # of Python 3.11, whose effect belongs to CALL's
            above += dis.stack_effect(one.opcode, one.arg, jump=False)
    return None


def _uses_of_variable(
    code: CodeType, instructions: list[dis.Instruction], name: str, followed: frozenset[str]
) -> _Calls | None:
    """As `_uses`, of what a local variable has."""
    if name in followed:
        return frozenset()
    if code.co_flags & _SUSPENDED or not _READING_LOCALS.isdisjoint(code.co_names):
        return None
    calls: _Calls = frozenset()
    for n, one in enumerate(instructions):
        if not one.opname.startswith(("LOAD_FAST", "STORE_FAST_")):
            continue
        variables = one.argval if isinstance(one.argval, tuple) else (one.argval,)  # of two instructions in one
        for above, variable in enumerate(reversed(variables)):
            if variable != name:
                continue
            if one.opname.startswith("STORE_FAST_"):
                return None
            uses = _uses_on_stack(code, instructions, n, above, followed | {name})
            if uses is None:
                return None
            calls |= uses
    return calls


_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # may go on at a later call
_READING_LOCALS = {"locals", "vars", "eval", "exec", "dir"}


def _is_format(instructions: list[dis.Instruction], call: dis.Instruction, texts: bool = False) -> bool:
    """Whether a call is `"...".format(...)`, which places what its arguments are formatted to as it is.

    Args:
        texts: whether it has to place texts as they are.
    """
    match _loads_of_callee(instructions, call):
        case [template, method] if template.opname == "LOAD_CONST" and type(template.argval) is str:
            try:
                fields = [f for f in string.Formatter().parse(template.argval) if f[1] is not None]
            except ValueError:
                return False
            if texts and any(to or spec or "." in str(name) or "[" in str(name) for _, name, spec, to in fields):
                return False
            in_specs = any("{" in (spec or "") for _, _, spec, _ in fields)
            return method.opname in _ATTRIBUTES and method.argval == "format" and not in_specs
    return False


def _names_called(instructions: list[dis.Instruction], call: dis.Instruction) -> tuple[str, ...] | None:
    """The names in the expression for what `call` calls, if it consists of names."""
    loads = _loads_of_callee(instructions, call)
    are_names = [one.opname in _ATTRIBUTES for one in loads]
    are_names[:1] = [loads[0].opname in _NAMES] if loads else [False]
    return tuple([one.argval for one in loads]) if all(are_names) else None


def _loads_of_callee(instructions: list[dis.Instruction], call: dis.Instruction) -> list[dis.Instruction]:
    """The instructions that load what `call` calls; none if they are not known."""
    at = call.positions
    if at is None or at.lineno is None or at.col_offset is None:  # as by `python -X no_debug_ranges`
        return []
    begin, before = (at.lineno, at.col_offset), (one for one in instructions if one.offset < call.offset)
    here = [one for one in before if one.positions and (one.positions.lineno, one.positions.col_offset) == begin]
    loads = [one for one in here if one.positions != at and one.opname not in _NO_LOADS]
    return [one for one in loads if not isinstance(one.argval, tuple)]  # the names of keywords
