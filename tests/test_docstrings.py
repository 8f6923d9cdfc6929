"""The docstring of each public callable describes its arguments, its result and its errors."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
import types
from pathlib import Path

import pytest

import firstloss as fl

SECTION = re.compile(r"(Args|Returns|Yields|Raises|Attributes|Examples):")
# In addition to the names listed in the reference, which is generated from the package's own table.
MODULES = ("firstloss.trainer.callbacks", "firstloss.cstorch")


def modules() -> list[str]:
    path = Path(__file__).parents[1] / "docs" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    listed = [full for page in reference.PAGES for full in reference.targets(page).values()]
    return list(dict.fromkeys([*listed, *MODULES]))


def is_ours(thing) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("firstloss")


def named() -> dict[str, object]:
    """Functions and classes on the page of all public names, and those in its public modules."""
    things = {}
    for name in modules():
        holder, _, last = name.rpartition(".")
        thing = getattr(importlib.import_module(holder), last, None) if last in fl.__all__ else None
        if thing is not None and not isinstance(thing, types.ModuleType):
            things[f"fl.{last}"] = thing
            continue
        module = importlib.import_module(name)
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
        names = getattr(module, "__all__", [key for key in own if not key.startswith("_")])
        things |= {f"{name}.{key}".replace("firstloss.", "fl.", 1): getattr(module, key) for key in names}
    return {name: thing for name, thing in things.items() if callable(thing) and is_ours(thing)}


def public() -> dict[str, tuple[object, type | None]]:
    """(callable, class that it is a method of) by name; without overrides of documented methods."""
    callables: dict[str, tuple[object, type | None]] = {}
    seen = set()
    for name, thing in named().items():
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        callables[name] = thing, None
        for key, member in vars(thing).items() if isinstance(thing, type) else ():
            function = getattr(member, "__func__", member)
            inherited = any(key in vars(base) for base in thing.__mro__[1:])
            if isinstance(function, types.FunctionType) and not key.startswith("_") and not inherited:
                callables[f"{name}.{key}"] = function, thing
    return callables


def sections(doc: str) -> dict[str, str]:
    lines_by_section: dict[str, list[str]] = {}
    section = ""
    for line in doc.splitlines():
        match = SECTION.fullmatch(line)
        section = match[1] if match else "" if line and not line.startswith(" ") else section
        lines_by_section.setdefault(section, []).append(line)
    return {name: "\n".join(lines) for name, lines in lines_by_section.items()}


def described(doc: str) -> set[str]:
    """The arguments that a docstring names; `a, b: ...` names two."""
    text = "\n".join(sections(doc).get(name, "") for name in ("Args", "Attributes"))
    return {word.strip(" *") for names in re.findall(r"^    ([\w*, ]+):", text, re.M) for word in names.split(",")}


def arguments_left_out(thing, owner: type | None) -> set[str]:
    """Arguments named neither in the docstring nor in the class's or a base class's."""
    if isinstance(thing, type):
        makers = ("__init__", "__new__")
        maker = next((base for base in thing.__mro__ if any(key in vars(base) for key in makers)), thing)
        if issubclass(thing, BaseException) or not is_ours(maker) or getattr(thing, "_is_protocol", False):
            return set()  # PyTorch's constructor, or none
    parameters = dict(inspect.signature(thing).parameters)
    documented = described(inspect.getdoc(thing) or "")
    above = [base for base in (owner or thing).__mro__ if is_ours(base)] if isinstance(owner or thing, type) else []
    for base in above:
        for doc in (base.__doc__, vars(base).get("__init__", base).__doc__):
            documented |= described(inspect.cleandoc(doc or ""))
        if base is not thing and isinstance(thing, type):  # passed on to a base
            documented |= {name for name, p in parameters.items() if p.kind is p.VAR_KEYWORD}
    return {name for name in parameters if name not in documented | {"self", "cls"}}


def raised(function: types.FunctionType) -> set[str]:
    """The errors that a function's own lines raise."""
    errors = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            return
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            errors.add(ast.unparse(node.exc.func).rpartition(".")[2])
        for inner in ast.iter_child_nodes(node):
            visit(inner)

    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    for line in tree.body:
        visit(line)
    return {name for name in errors if name.endswith("Error")} - {"NotImplementedError"}  # documented in a base class


def problems(thing, owner: type | None = None) -> list[str]:
    doc = inspect.getdoc(thing)
    if not doc:
        return ["no docstring"]
    documented = sections(doc)
    missing = [f"the argument {name}" for name in sorted(arguments_left_out(thing, owner))]
    if isinstance(thing, types.FunctionType):
        returns = inspect.signature(thing).return_annotation
        if returns not in (None, "None", inspect.Signature.empty) and not {"Returns", "Yields"} & documented.keys():
            missing.append(f"what it returns: {returns}")
        missing += [
            f"when it raises {name}" for name in sorted(raised(thing)) if name not in documented.get("Raises", "")
        ]
    return missing


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_callables_are_documented(name):
    missing = problems(*PUBLIC[name])
    assert not missing, f"{name} does not say {', '.join(missing)}"


def test_the_check_finds_public_callables():
    assert len(PUBLIC) > 250
    for name in ("fl.trace", "fl.optim.Lamb", "fl.trainer.Trainer.fit", "fl.utils.data.DataLoader.of"):
        assert name in PUBLIC, name


def plain(count: int, *rest: int) -> int:
    """Without sections."""
    if count:
        raise ValueError("count")
    return count


def full(count: int, *rest: int) -> int:
    """With sections.

    Args:
        count: a number.
        *rest: numbers.

    Returns:
        A number.

    Raises:
        ValueError: always.
    """
    return plain(count, *rest)


def test_the_check_finds_missing_sections():
    assert problems(plain) == [
        "the argument count", "the argument rest", "what it returns: int", "when it raises ValueError"
    ]  # fmt: skip
    assert not problems(full)
    plain.__doc__, kept = full.__doc__.replace("Raises", "Examples"), plain.__doc__
    assert problems(plain) == ["when it raises ValueError"]
    plain.__doc__ = kept
