"""How Python code uses a name, found in its bytecode.

Most uses are reads. Adding to a collection (`losses.append(loss)`) is not, since the step does not depend on what the
collection holds.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib.util
import sys
import types
from typing import Any, NamedTuple

from ...program.source import Source


class Collect(NamedTuple):
    """`losses.append(...)`."""

    method: str


class ItemCollect(NamedTuple):
    """`history["loss"].append(...)`."""

    method: str


class Load(NamedTuple):
    """Another use of what an instruction loads: it is read, or passed on."""

    code: types.CodeType
    offset: int


Use = Collect | ItemCollect | Load | None  # None: it is read
Passed = tuple[int, types.CodeType, int]  # the id of an object, and where the call is that it is passed in

_COLLECT = {"append", "appendleft", "add", "extend", "extendleft"}
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_LOADS = (*_GLOBALS, "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_ATTR", "LOAD_METHOD",
          "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "LOAD_ZERO_SUPER_ATTR", "LOAD_ZERO_SUPER_METHOD")  # fmt: skip
_STORES = ("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR", "DELETE_DEREF")
_OF_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR", "IMPORT_FROM", "LOAD_SUPER_ATTR",
                  "LOAD_SUPER_METHOD", "LOAD_ZERO_SUPER_ATTR", "LOAD_ZERO_SUPER_METHOD"}  # fmt: skip
_NOISE = ("CACHE", "RESUME", "NOP", "EXTENDED_ARG", "PRECALL", "PUSH_NULL", "KW_NAMES", "NOT_TAKEN")
_CONSTANTS = ("LOAD_CONST", "LOAD_SMALL_INT")
_BUILDS = ("BUILD_LIST", "BUILD_TUPLE", "BUILD_MAP", "BUILD_CONST_KEY_MAP")


class Instruction(NamedTuple):
    """An instruction. No-ops, and what prepares calls, are left out."""

    offset: int
    name: str
    argument: Any
    symbol: str  # the operator, of BINARY_OP
    line: int
    effect: int  # by how much it changes the stack's depth, with what is left out before it


def _has(code: types.CodeType, *names: str) -> bool:
    """Whether `code` itself has one of these instructions, without decoding it: most code has none."""
    opcodes = code.co_code[::2]
    return any(dis.opmap[name] in opcodes for name in names)


@functools.lru_cache(maxsize=65536)
def instructions(code: types.CodeType) -> list[Instruction]:
    """The instructions of `code` itself."""
    decoded = []
    line, effect = code.co_firstlineno, 0
    for i in dis.get_instructions(code):
        if i.positions is not None and i.positions.lineno is not None:
            line = i.positions.lineno
        effect += dis.stack_effect(i.opcode, i.arg, jump=False)
        if i.opname not in _NOISE:
            decoded.append(Instruction(i.offset, i.opname, i.argval, i.argrepr, line, effect))
            effect = 0
    return decoded


def raises_again(code: types.CodeType) -> bool:
    """Whether `code` has a bare `raise`, which raises the exception that is being handled."""
    return any(step.name == "RAISE_VARARGS" and step.argument == 0 for step in instructions(code))


def _use(code: types.CodeType, steps: list[Instruction], i: int) -> Use:
    """How the value that the `i`-th instruction loads is used."""
    if i + 1 < len(steps) and steps[i + 1].name in ("LOAD_METHOD", "LOAD_ATTR") and steps[i + 1].argument in _COLLECT:
        return Collect(steps[i + 1].argument)
    return _item_collect(steps[i + 1 : i + 4]) or Load(code, steps[i].offset)


def _item_collect(after: list[Instruction]) -> ItemCollect | None:
    """`[key].append(...)`, where the key is a constant or a variable."""
    if len(after) < 3 or not after[0].name.startswith("LOAD_"):
        return None
    key, subscript, method = after
    subscripts = subscript.name == "BINARY_SUBSCR" or subscript.name == "BINARY_OP" and subscript.symbol == "[]"
    if "ATTR" in key.name or not subscripts or method.name not in ("LOAD_METHOD", "LOAD_ATTR"):
        return None
    return ItemCollect(method.argument) if method.argument in _COLLECT else None


@functools.lru_cache(maxsize=65536)
def _uses(code: types.CodeType) -> dict[int, Use]:
    """How the value that each load instruction loads is used, by the instruction's offset."""
    steps = instructions(code)
    return {step.offset: _use(code, steps, i) for i, step in enumerate(steps) if step.name in _LOADS}


@functools.lru_cache(maxsize=65536)
def call_with(load: Load) -> int | None:
    """The offset of the call of which a loaded value is itself an argument, as of `log` in `log(history, x + 1)`, or an
    item of a list, tuple or dict in it, as in `log({"history": history})`; None if it is used otherwise."""
    steps = instructions(load.code)
    above = 0  # the number of values above it on the stack
    for step in steps[[step.offset for step in steps].index(load.offset) + 1 :]:
        looks_up = step.name in ("LOAD_ATTR", "LOAD_METHOD")
        if not looks_up and not step.name.startswith(("LOAD_", "CALL", "BINARY_", "UNARY_", "COMPARE_", "BUILD_")):
            return None
        pops = 1 if looks_up else max(0, 1 - step.effect)  # most push one value
        if pops <= above:
            above += step.effect
        elif step.name in _BUILDS:
            above = 0  # above what is built
        else:
            return step.offset if step.name.startswith("CALL") and "INTRINSIC" not in step.name else None
    return None


def call_at(code: types.CodeType, offset: int) -> int:
    """The offset of the instruction that a frame of `code` is at, which may stand behind it, at its cache."""
    return max((step.offset for step in instructions(code) if step.offset <= offset), default=offset)


def use_at(code: types.CodeType, offset: int) -> Use:
    """How the attribute that the instruction at `offset` looks up is used."""
    return _uses(code).get(offset)


@functools.lru_cache(maxsize=65536)
def uses_of(code: types.CodeType, name: str) -> list[Use]:
    """How `code` itself uses the globals and the variables of enclosing functions that it loads."""
    uses = _uses(code)
    steps = [s for s in instructions(code) if s.name in _LOADS and "ATTR" not in s.name and "METHOD" not in s.name]
    return [uses[step.offset] for step in steps if step.argument == name]


@functools.lru_cache(maxsize=65536)
def global_names(code: types.CodeType) -> frozenset[str]:
    """The globals that `code` itself loads."""
    return frozenset(s.argument for s in instructions(code) if s.name in _GLOBALS)


@functools.lru_cache(maxsize=65536)
def stored_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals, and the variables of enclosing functions, that `code` itself sets or deletes."""
    steps = instructions(code)
    globals_ = frozenset(s.argument for s in steps if s.name in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME"))
    return globals_, frozenset(s.argument for s in steps if s.name in ("STORE_DEREF", "DELETE_DEREF"))


@functools.lru_cache(maxsize=65536)
def attribute_names(code: types.CodeType) -> frozenset[str]:
    """The attributes, of any object, that `code` itself looks up, sets or deletes."""
    return frozenset(s.argument for s in instructions(code) if s.name in _OF_ATTRIBUTES)


@functools.lru_cache(maxsize=65536)
def stored_attributes(code: types.CodeType) -> frozenset[str]:
    """The attributes, of any object, that `code` itself sets or deletes."""
    return frozenset(s.argument for s in instructions(code) if s.name in ("STORE_ATTR", "DELETE_ATTR"))


@functools.lru_cache(maxsize=65536)
def attributes_set(code: types.CodeType) -> frozenset[tuple[str, ...]]:
    """The dotted paths that `code` itself sets or deletes from a global, as in `torch.nn.functional.gelu = ...`."""
    if not _has(code, "STORE_ATTR", "DELETE_ATTR"):
        return frozenset()
    steps = instructions(code)
    paths = []
    for i, step in enumerate(steps):
        if step.name in ("STORE_ATTR", "DELETE_ATTR"):
            path = [step.argument]
            while i > 0 and steps[i := i - 1].name == "LOAD_ATTR":
                path.append(steps[i].argument)
            if steps[i].name in _GLOBALS:
                paths.append((steps[i].argument, *reversed(path)))
    return frozenset(paths)


def imports(code: types.CodeType, table: dict[Any, Any]) -> list[str]:
    """The modules that `code` itself imports with the globals in `table`, and those that it may import by a computed
    name."""
    modules = []
    for name, level, names in _import_statements(code):
        with contextlib.suppress(ImportError):  # a relative import outside of a package
            module = importlib.util.resolve_name("." * level + name, _package(table)) if level else name
            parts = module.split(".")
            modules += [".".join(parts[: i + 1]) for i in range(len(parts))]
            modules += [f"{module}.{name}" for name in names if f"{module}.{name}" in sys.modules]
    if not _BY_NAME.isdisjoint(code.co_names) or "modules" in code.co_names and "sys" in code.co_names:
        modules += [name for name in list(sys.modules) if name != "__main__"]
        modules += [constant for constant in code.co_consts if isinstance(constant, str)]
    return modules


def imported_modules(code: types.CodeType, table: dict[Any, Any]) -> list[types.ModuleType]:
    """The modules that `code`, and the functions within it, may import."""
    names = {name for inner in with_inner(code) for name in imports(inner, table)}
    return [module for name in names if type(module := sys.modules.get(name)) is types.ModuleType]


_BY_NAME = {"import_module", "__import__"}


def _package(table: dict[Any, Any]) -> str:
    name = table.get("__package__")
    return name if name is not None else str(table.get("__name__", "")).rpartition(".")[0]


@functools.lru_cache(maxsize=65536)
def _import_statements(code: types.CodeType) -> list[tuple[str, int, tuple[str, ...]]]:
    """For each import statement: the module, the number of leading dots, and the imported names."""
    if not _has(code, "IMPORT_NAME"):
        return []
    steps = instructions(code)
    return [
        (step.argument, steps[i - 2].argument, steps[i - 1].argument or ())
        for i, step in enumerate(steps)
        if step.name == "IMPORT_NAME"
    ]


def with_inner(code: types.CodeType) -> list[types.CodeType]:
    """`code`, and the code of the functions within it."""
    out = [code]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            out += with_inner(constant)
    return out


def _is_update(steps: list[Instruction], i: int) -> bool:
    """Whether a name that is loaded is set again at once, as by `n += 1`."""
    return any(step.name in _STORES and step.argument == steps[i].argument for step in steps[i + 1 : i + 5])


class NameLines(NamedTuple):
    """The first lines of a code object that read and that write each name."""

    reads: dict[str, Source]
    writes: dict[str, Source]


@functools.lru_cache(maxsize=65536)
def lines(code: types.CodeType) -> NameLines:
    """The lines where `code` reads and writes names, for messages; an update counts as a write."""
    reads: dict[str, Source] = {}
    writes: dict[str, Source] = {}
    steps = instructions(code)
    for i, step in enumerate(steps):
        source = Source(code.co_filename, step.line)
        if step.name in _STORES and isinstance(step.argument, str):
            writes.setdefault(step.argument, source)
        elif step.name in _LOADS and isinstance(step.argument, str):
            if isinstance(_use(code, steps, i), Load) and not _is_update(steps, i):
                reads.setdefault(step.argument, source)
            else:
                writes.setdefault(step.argument, source)
        elif step.name in _CONSTANTS and isinstance(step.argument, str) and step.argument.isidentifier():
            reads.setdefault(step.argument, source)  # getattr(self, "name")
    return NameLines(reads, writes)
