"""Private names of other libraries are listed in `firstloss.compat`, resolve as installed, and are on the page."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from firstloss.compat import jax_names, names, python_names, torch_names
from firstloss.errors import CompatibilityError

from . import page

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "firstloss"
LIBRARIES = {"torch", "jax", "jaxlib", "numpy", "sys", "functools", "os"}
# Names that begin with an underscore but are documented, or are an ATen operation's name or a NamedTuple's method.
PUBLIC = re.compile(r"_foreach_\w+|_replace|_fields|_asdict|_make|_assert_async|_firstloss")
ROWS = [(table, name) for table in (torch_names, jax_names, python_names) for name in table.NAMES]


@functools.cache
def files() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not PUBLIC.fullmatch(name)


def defined(tree: ast.Module) -> set[str]:
    """The names that a file defines: functions, classes, variables, attributes, slots and fields."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            names.update(entry.value for entry in ast.walk(node.value) if isinstance(entry, ast.Constant))
    return names


def private_names(tree: ast.Module, defined_here: set[str]) -> list[str]:
    """Private names of other libraries in a file: imports, and attributes that no file of this project defines."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            names += [f"{node.module}: {node.names[0].name}"] * any(map(is_private, parts))
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names if any(map(is_private, alias.name.split(".")))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = ast.unparse(node.value)
            if owner in ("aten", "_aten", "torch.ops.aten"):
                continue
            if node.attr not in defined_here or owner.split(".")[0] in LIBRARIES:
                names.append(f"{owner}.{node.attr}")
    return names


REST = [path for path in files() if path.parent.name != "compat"]


@functools.cache
def ours() -> set[str]:
    return set().union(*(defined(files()[path]) for path in REST))


@functools.cache
def imported() -> set[tuple[str, str]]:
    """(module, name) of every import."""
    nodes = [node for tree in files().values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {((node.module or "").rpartition(".")[2], alias.name) for node in nodes for alias in node.names}


@pytest.mark.parametrize("path", REST, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_are_only_in_compat(path):
    assert not private_names(files()[path], ours())


def test_the_check_finds_private_names():
    text = (
        "import torch._C\nfrom jax._src import core\ntorch._C.x\nx._cdata\nx._ours\ntorch._foreach_add\naten._to_copy"
    )
    assert set(private_names(ast.parse(text), {"_ours"})) == {"torch._C", "jax._src: core", "x._cdata"}


@pytest.mark.parametrize(("table", "name"), ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_name_resolves(table, name):
    assert not isinstance(names.resolve(table.NAMES[name]), names.Missing)
    assert getattr(table, name) is not None


@pytest.mark.parametrize(("table", "name"), ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_name_is_used(table, name):
    module = table.__name__.rpartition(".")[2]
    own = (SOURCE / "compat" / f"{module}.py").read_text()
    by_helpers = own.count(f'"{name}"') > 1 or table.NAMES[name].target == torch_names.PARAMETER_FLAG
    assert (module, name) in imported() or by_helpers


@pytest.mark.parametrize("use", [
    lambda gone: gone(),
    lambda gone: gone.attribute,
    lambda gone: gone[0],
    lambda gone: isinstance(1, gone),
    lambda gone: types.new_class("Of", (gone,)),
    lambda gone: gone.__enter__(),
    lambda gone: list(gone),
    lambda gone: bool(gone),
])  # fmt: skip
def test_a_name_that_is_gone_breaks_its_users_by_an_error_that_names_it(use):
    gone = names.resolve(names.Name("torch._C._is_no_more", "a reason", "tracing"))
    with pytest.raises(CompatibilityError, match=r"torch \S+ has no torch._C._is_no_more.*tracing does not work"):
        use(gone)


def test_a_name_that_is_gone_breaks_nobody_else():
    """Without the name everything still imports, and features that do not need it work."""
    code = """
import torch
del torch._C._current_graph_task_id, torch.nn.BatchNorm1d._check_input_dim
from firstloss.errors import CompatibilityError
import firstloss as fl
import firstloss.capture.running_averages
model = fl.deferred_init(torch.nn.Linear, 3, 2)
fl.materialize_module(model)
model(torch.ones(1, 3)).sum().backward()
lazy = fl.deferred_init(torch.nn.Linear, 3, 2)
try:
    torch.nn.functional.linear(torch.ones(1, 3), lazy.weight)
except CompatibilityError as error:
    print("refused", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torch._C._current_graph_task_id" in done.stdout


def test_the_page_is_written_from_the_tables():
    assert page.PAGE.read_text() == page.text(), "run: python -m tests.compat.page"
