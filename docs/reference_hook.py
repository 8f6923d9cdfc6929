"""Writes the pages of all public names, by task, from the package's own table: none is missing, and none is stale."""

from __future__ import annotations

import ast
import os

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

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


def table() -> dict[str, str]:
    """{public name: module}, read from `firstloss/__init__.py` without importing it."""
    with open(os.path.join(ROOT, "src", "firstloss", "__init__.py"), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "_MODULES":
            return ast.literal_eval(node.value)
    raise ValueError("firstloss/__init__.py has no table of its public names")


def names(page: str) -> str:
    """The names of one page in Markdown, with mkdocstrings' marks."""
    where = table()
    parts = []
    for name in PAGES[page]:
        module = where.get(name, f".{name}")
        full = f"firstloss{module}.{name}" if module != f".{name}" else f"firstloss.{name}"
        title = f"fl.{name}" if not name.startswith("firstloss.") else name
        parts.append(f"## {title}\n\n::: {name if name.startswith('firstloss.') else full}\n")
    return "\n".join(parts)


def check() -> None:
    """Every public name is on one page."""
    listed = [name for page in PAGES.values() for name in page]
    missing = set(table()) - NOT_BY_ITSELF - set(listed)
    twice = {name for name in listed if listed.count(name) > 1}
    if missing or twice:
        raise ValueError(f"docs/reference_hook.py: on no page: {sorted(missing)}; on more than one: {sorted(twice)}")


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """mkdocs' hook."""
    folder, _, name = page.file.src_uri.rpartition("/")
    if folder == "reference" and name.removesuffix(".md") in PAGES:
        check()
        return markdown + "\n" + names(name.removesuffix(".md"))
    return markdown
