"""Rooms import only what docs/architecture.md allows, lazy imports included.

Imports under TYPE_CHECKING are free, but may form cycles only between the rooms listed here. Exceptions still to be
removed are listed too; the lists may only shrink.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
# Modules at the root of the package, available to every room.
COMMON = {
    "compat",
    "errors",
    "timeline",
    "timeline_picture",
    "c_library",
    "files",
    "malloc_settings",
    "interpreter",
    "workers",
    "dependencies",
    "settings",
    "cache_folder",
    "no_effect",
    "processor",
}
PUBLIC = {"trainer", "cli", "utils", "distributed", "cstorch", "__main__", ""}  # they use the public API, and more

# Imports that the table does not allow: (from, to), both as modules.
FORBIDDEN: set[tuple[str, str]] = set()


@functools.cache
def modules() -> dict[str, Path]:
    paths = {}
    for path in (SOURCE / "firstloss").rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE / "firstloss").with_suffix("").parts)
        paths[name.removesuffix(".__init__").removesuffix("__init__")] = path
    return paths


@functools.cache
def nodes(name: str) -> tuple[ast.AST, ...]:
    """All nodes of a module's syntax tree."""
    return tuple(ast.walk(ast.parse(modules()[name].read_text())))


def imports(name: str, types: bool = False) -> Iterator[tuple[str, str | None]]:
    """(imported module of ours, imported name) of each import anywhere in a module.

    With `types`, includes imports under TYPE_CHECKING.
    """
    path = modules()[name]
    typed = {
        inner
        for node in nodes(name)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes(name):
        if node in typed and not types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "firstloss":
                    yield alias.name.removeprefix("firstloss").removeprefix("."), None
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").split(".")[0] == "firstloss"):
            if node.level:
                above = package.split(".") if package else []
                base = ".".join([*above[: len(above) - node.level + 1], *([node.module] if node.module else [])])
            else:
                base = (node.module or "").removeprefix("firstloss").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".removeprefix(".")
                yield (inner, None) if inner in modules() else (base, alias.name)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and str(argument.value).startswith("firstloss."):
                yield argument.value.removeprefix("firstloss."), None


@functools.cache
def graph(types: bool = False) -> dict[str, frozenset[str]]:
    return {name: frozenset(to for to, _ in imports(name, types) if to != name) for name in modules()}


def room(name: str) -> str:
    return name.split(".")[0]


def table() -> dict[str, set[str]]:
    """The rooms of docs/architecture.md, and what each may import: those above it in the table that it names."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)/`(?:, `(\w+)/`)? \|[^|]*\| ([^|]*) \|$", text, re.MULTILINE)
    known: dict[str, set[str]] = {}
    for first, second, knows in rows:
        allowed = set(re.findall(r"\w+", knows)) & known.keys() if knows != "all above" else set(known)
        for name in filter(None, (first, second)):
            known[name] = allowed | {first, second, name} - {""}
    return known


def circles(types: bool = False) -> list[set[str]]:
    """The strongly connected components of the graph with more than one module (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in graph(types)[name]:
            if other not in modules():
                continue
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            part = set(stack[at:])
            del stack[at:]
            if len(part) > 1:
                components.append(part)

    for name in modules():
        if name not in number:
            visit(name)
    return components


def test_the_table_has_all_rooms():
    rooms = {room(name) for name in modules()} - COMMON - PUBLIC
    assert rooms <= table().keys()


@pytest.mark.parametrize("name", sorted({room(name) for name in modules()} - COMMON - PUBLIC))
def test_rooms_import_only_what_the_table_allows(name):
    allowed = table()[name] | COMMON
    edges = {(module, to) for module in modules() if room(module) == name for to in graph()[module]}
    wrong = {edge for edge in edges if room(edge[1]) not in allowed}
    assert wrong == {edge for edge in FORBIDDEN if room(edge[0]) == name}


def inner_room(name: str) -> str:
    """The inner room of a module, or None if it is shared by the inner rooms."""
    parts = name.split(".")
    if modules()[name].name != "__init__.py":
        parts.pop()
    return parts[1] if len(parts) > 1 else ""


def inner_table() -> dict[str, set[str]]:
    """The inner rooms of the runtime, and those that each may import."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `runtime/(\w+)/` \|[^|]*\| ([^|]*) \|$", text, re.MULTILINE)
    return {name: set(re.findall(r"\w+", knows)) & {other for other, _ in rows} for name, knows in rows}


def test_the_table_has_all_inner_rooms():
    assert inner_table().keys() == {inner_room(name) for name in modules() if room(name) == "runtime"} - {""}


@pytest.mark.parametrize("name", sorted(inner_table()))
def test_inner_rooms_import_only_what_the_table_allows(name):
    edges = {(module, to) for module in modules() for to in graph()[module]}
    inner_edges = {(a, b) for a, b in edges if room(a) == room(b) == "runtime" and inner_room(a) == name}
    assert {(a, b) for a, b in inner_edges if inner_room(b) not in {"", name, *inner_table()[name]}} == set()


def test_files_named_on_the_page_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text))
    assert len(named) > 40
    places = (SOURCE / "firstloss", SOURCE / "firstloss" / "init", ROOT)  # init's rooms are named in its row
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()


@pytest.mark.parametrize("name", ["trainer", "cli"])
def test_users_of_the_public_api_list_other_imports(name):
    """By its row of the table: the files outside the public API that it imports, and no others."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    knows = re.search(rf"^\| `{name}/` \|[^|]*\| the public API; ([^|]*) \|$", text, re.MULTILINE)
    named = {file.removesuffix(".py").replace("/", ".") for file in re.findall(r"`([\w/]+\.py)`", knows[1])}
    known = {to for module in modules() if room(module) == name for to in graph(types=True)[module]}
    private = {to for to in known if to.count(".") and room(to) in {"runtime", "init", "capture", "program", "lower"}}
    private |= {to for to in known if to.startswith("utils.data.")}
    assert private == named


def test_there_are_no_import_cycles():
    assert circles() == []


# A callback gets the Trainer, which has callbacks.
ROUND_BY_TYPES = [{"trainer"}]


def test_there_are_no_import_cycles_for_the_type_checker():
    """Except within the trainer, where the two are each other's arguments."""
    rooms = [{room(name) for name in circle} for circle in circles(types=True)]
    assert all(cycle in ROUND_BY_TYPES for cycle in rooms)


# Attributes of deferred tensors that the package shares: other attributes of a tensor are PyTorch's or a user's.
OF_TENSORS = {"_storage", "_ref"}
# An attribute of JAX's with the name of one of ours, and the C module that a file wraps.
NOT_OURS = {"compat.jax_names": {"_params"}, "runtime.guards.native": {"_guards"}}


def defined(name: str) -> set[str]:
    """The names that a module defines: functions, classes, variables, attributes and slots."""
    names = set()
    for node in nodes(name):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            names.update(entry.value for entry in ast.walk(node.value) if isinstance(entry, ast.Constant))
    return names


@functools.cache
def defined_anywhere() -> frozenset[str]:
    return frozenset().union(*map(defined, modules()))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("name", sorted(modules()))
def test_private_names_are_not_imported(name):
    """Imports, and attributes of anything but `self`, whose class may derive from another file's."""
    used = {what for _, what in imports(name) if what is not None and is_private(what)}
    for node in nodes(name):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr in defined_anywhere():
            if ast.unparse(node.value) not in ("self", "cls", "torch", "aten", "_aten", "torch.ops.aten"):
                used.add(node.attr)
    assert used - defined(name) - NOT_OURS.get(name, set()) <= OF_TENSORS


def test_the_checks_find_violations(monkeypatch):
    assert ("runtime.mesh.sharded_weights", "engine.cpu_engine") in {(m, to) for m in modules() for to in graph()[m]}
    assert any(to == "init.stablehlo.module" for to, _ in imports("init.init_program")), "a lazy import"
    assert ("runtime.device.buffer", "runtime.mesh.sharded_arrays") in {(m, to) for m in modules() for to in graph()[m]}
    rooms = [inner_room(name) for name in ("runtime.device.buffer", "runtime.guards", "runtime.backend", "runtime")]
    assert rooms == ["device", "guards", "", ""]
    assert "trainer.trainer" not in graph()["trainer.callback"], "an import for the type checker alone"
