"""Writes the page of all public names from the package's own table, so that none is missing and none is stale."""

from __future__ import annotations

import ast
import os

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAINER = ("firstloss.trainer", "firstloss.trainer.loggers")


def table() -> dict[str, str]:
    """{public name: module}, read from `firstloss/__init__.py` without importing it."""
    with open(os.path.join(ROOT, "src", "firstloss", "__init__.py"), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "_WHERE":
            return ast.literal_eval(node.value)
    raise ValueError("firstloss/__init__.py has no table of its public names")


def page() -> str:
    """The page in Markdown, with mkdocstrings' marks."""
    names, modules = [], ["firstloss.optim.lr_scheduler", "firstloss.utils.data"]
    for name, where in sorted(table().items()):
        if where == f".{name}":
            modules.append(f"firstloss.{name}")
        else:
            names.append(f"## fl.{name}\n\n::: firstloss{where}.{name}\n")
    parts = ["\n".join(names)]
    for module in (*sorted(modules), *TRAINER):
        if module == "firstloss.utils":
            continue  # it holds `data` alone
        title = module if module in TRAINER else module.replace("firstloss.", "fl.", 1)
        parts.append(f"## {title}\n\n::: {module}\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """mkdocs' hook."""
    if page.file.src_uri == "reference.md":
        return markdown + "\n" + globals()["page"]()
    return markdown
