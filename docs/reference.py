"""Writes the pages of docs/reference from the docstrings of all public names, as griffe reads them: none is missing.

    python docs/reference.py        # part of `make docs`; a test compares the pages

What stands above MARK on a page is written by hand.
"""

from __future__ import annotations

import ast
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
MARK = "<!-- What follows is written by `make docs`, from the docstrings. -->\n"

# Page -> what it documents, in the order of use: names of `fl`, or modules by their full names.
PAGES: dict[str, tuple[str, ...]] = {
    "deferred": ("deferred", "deferred_init", "is_deferred", "materialize_module", "materialize_tensor",
                 "init_program", "lower", "save_initialized", "check_init"),
    "sharding": ("shard", "mark_sharding", "run_stablehlo", "distributed"),
    "steps": ("backend", "compile", "trace", "Pad", "load_step", "step_closure", "checkpoint_closure",
              "current_backend", "current_torch_device", "use_cs", "register_lowering", "timeline"),
    "data": ("utils.data", "current_executor", "save", "load"),
    "optimizers": ("optim", "optim.lr_scheduler", "amp", "metrics"),
    "trainer": ("firstloss.trainer", "firstloss.trainer.loggers"),
    "errors": ("errors",),
    "cstorch": ("cstorch",),
}  # fmt: skip
NOT_BY_ITSELF = {"utils"}  # it holds `data` alone

LISTS = {
    "parameters": "Arguments",
    "other parameters": "Arguments",
    "attributes": "Attributes",
    "returns": "Returns",
    "yields": "Yields",
    "raises": "Raises",
    "warns": "Warns",
}
PARSER = {
    "warnings": False,
    "warn_unknown_params": False,
    "returns_multiple_items": False,
    "returns_named_value": False,
}
WIDEST = 100  # a signature of more characters has a line for each argument


def table() -> dict[str, str]:
    """{public name: module}, read from `firstloss/__init__.py` without importing it."""
    tree = ast.parse((ROOT / "src" / "firstloss" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "_MODULES":
            return ast.literal_eval(node.value)
    raise ValueError("firstloss/__init__.py has no table of its public names")


def targets(page: str) -> dict[str, str]:
    """{title: full name} of what is on a page, in order."""
    where, out = table(), {}
    for name in PAGES[page]:
        module = where.get(name, f".{name}")
        title = name if name.startswith("firstloss.") else f"fl.{name}"
        out[title] = title if title == name else f"firstloss{module}" + ("" if module == f".{name}" else f".{name}")
    return out


def check() -> None:
    """Every public name is on one page."""
    listed = [name for page in PAGES.values() for name in page]
    missing = set(table()) - NOT_BY_ITSELF - set(listed)
    twice = {name for name in listed if listed.count(name) > 1}
    if missing or twice:
        raise ValueError(f"docs/reference.py: on no page: {sorted(missing)}; on more than one: {sorted(twice)}")


class Writer:
    """The text of pages. What a function of a page returns is documented behind it, if it is a class of Firstloss's."""

    def __init__(self) -> None:
        logging.getLogger("griffe").setLevel(logging.ERROR)
        loader = griffe.GriffeLoader(
            search_paths=[str(ROOT / "src")], docstring_parser="google", docstring_options=PARSER
        )
        self._package: Any = loader.load("firstloss")
        loader.resolve_aliases(implicit=False)
        self._seen: set[str] = set()

    def page(self, page: str) -> str:
        """The generated part of a page."""
        blocks: list[str] = []
        for title, full in targets(page).items():
            blocks += self._documented(title, self._find(full), 2)
        return "\n\n".join(blocks) + "\n"

    def _find(self, full: str) -> Any:
        thing = self._package
        for part in full.split(".")[1:]:
            thing = _target(thing.members[part])
        return thing

    def _documented(self, title: str, thing: Any, level: int, of_class: bool = False) -> Iterator[str]:
        if thing.path in self._seen and level > 2:
            return
        self._seen.add(thing.path)
        yield f"{'#' * level} {title}"
        if not thing.is_module:
            yield f"```py\n{_signature(title.rpartition('.')[2], thing)}\n```"
        yield from _docstring(thing)
        members = [*self._public(thing)] if thing.is_module or thing.is_class else []
        for name, member in members:
            yield from self._documented(f"{title}.{name}", member, min(level + 1, 4), thing.is_class)
        for maker in [member for _, member in members] if thing.is_class else [] if of_class else [thing]:
            yield from self._results(maker, level)

    def _public(self, thing: Any) -> Iterator[tuple[str, Any]]:
        exported = thing.exports if thing.is_module else None
        names = [str(name) for name in exported] if exported is not None else list(thing.members)
        for name in names:
            member = thing.members.get(name)
            if (
                (name.startswith("_") and name != "__call__")
                or member is None
                or (member.is_alias and exported is None)
            ):
                continue
            member = _target(member)
            if member is not None and member.is_module:  # a function whose module has its name; else a page of its own
                member = member.members.get(name)
            if member is not None and member.has_docstring:
                yield name, member

    def _results(self, function: Any, level: int) -> Iterator[str]:
        forms = [function, *(getattr(function, "overloads", None) or ())]
        for name in re.findall(r"\w+", " ".join(str(getattr(form, "returns", "")) for form in forms)):
            try:
                found = _target(function.module[name])
            except KeyError:
                continue
            if found is not None and found.is_class and found.path.startswith("firstloss.") and found.has_docstring:
                yield from self._documented(found.name, found, min(max(level, 3), 4))


def _target(thing: Any) -> Any:
    """What a name stands for; None if it is of another package."""
    try:
        return thing.final_target if thing.is_alias else thing
    except griffe.GriffeError:
        return None


def _signature(name: str, thing: Any) -> str:
    """A call as one would write it, with annotations and defaults."""
    function = thing
    if thing.is_class:
        made = thing.all_members.get("__init__")
        name, function = f"class {name}", None if made is None else _target(made)
    if function is None or not function.is_function:
        return f"{name}: {thing.annotation}" if getattr(thing, "annotation", None) is not None else name
    arguments, bare_star = [], False
    for parameter in function.parameters:
        if parameter.name == "self" and not arguments:
            continue
        kind = parameter.kind
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(kind, "")
        if kind is griffe.ParameterKind.keyword_only and not bare_star:
            arguments.append("*")
        bare_star |= stars == "*" or kind is griffe.ParameterKind.keyword_only
        typed = "" if parameter.annotation is None else f": {parameter.annotation}"
        default = (
            ""
            if stars or parameter.default is None
            else f" = {parameter.default}"
            if typed
            else f"={parameter.default}"
        )
        arguments.append(f"{stars}{parameter.name}{typed}{default}")
    end = "" if thing.is_class or function.returns is None else f" -> {function.returns}"
    if len(text := f"{name}({', '.join(arguments)}){end}") <= WIDEST:
        return text
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){end}"


def _docstring(thing: Any) -> Iterator[str]:
    if not thing.has_docstring:
        return
    for section in thing.docstring.parsed:
        kind = section.kind.value
        if kind == "text":
            yield section.value.strip()
        elif kind == "examples":
            yield "\n\n".join(
                value if part.value == "text" else f"```pycon\n{value}\n```" for part, value in section.value
            )
        elif kind in ("returns", "yields"):  # as written, since griffe takes what stands before a colon for a type
            yield f"**{LISTS[kind]}:**\n\n{_section(thing.docstring.value, LISTS[kind])}"
        elif kind in LISTS:
            yield f"**{LISTS[kind]}:**\n\n" + "\n".join(_item(each) for each in section.value)
        else:  # "Note:" and the like
            yield f"**{section.title or kind}:** {section.value.contents}"


def _section(docstring: str, title: str) -> str:
    """The text of a section of a docstring."""
    found = re.search(rf"^{title}:\n((?: .*\n?|\n)*)", docstring, flags=re.M)
    assert found is not None, docstring
    return textwrap.dedent(found[1]).strip()


def _item(each: Any) -> str:
    """An argument, an attribute or an error."""
    name = getattr(each, "name", None) or each.annotation
    return f"- `{name}`: " + textwrap.indent(each.description.strip(), "  ").strip()


def written(page: str) -> str:
    """What is written by hand on a page."""
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8").partition(MARK)[0].rstrip() + "\n"


def main() -> None:
    check()
    writer = Writer()
    for page in PAGES:
        (FOLDER / f"{page}.md").write_text(f"{written(page)}\n{MARK}\n{writer.page(page)}", encoding="utf-8")


if __name__ == "__main__":
    main()
