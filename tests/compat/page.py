"""docs/compatibility.md, from the tables of `firstloss.compat`: `python -m tests.compat.page` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firstloss.compat import jax_names, patches, python_names, torch_names

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

HEAD = """# Compatibility

<!-- Written by `python -m tests.compat.page`. -->

Firstloss uses names of PyTorch, JAX and Python that these have not promised to keep. Each is in a table of
`firstloss/compat/`, and used from there alone; below are the tables. A name is looked up when it is first imported, by
what the installed version has and not by its number. One that is gone breaks only what needs it, when that is used, by
a `CompatibilityError` that names it.

`make test TORCH=2.15.0` runs the suite on another PyTorch. The pinned versions (`requirements/`) get all of it at each
change; those at the ends of the range the core: capture, the engine, guards and generated programs.

| library | promised | the core was tested on |
| --- | --- | --- |
"""

REPLACED = """Importing Firstloss replaces nothing. The rows that begin with the first deferred tensor
stay, since such a tensor may be met anywhere from then on; the others end with the captures or the trace that they are
for, and what other code has put in their place meanwhile is left alone. Each calls the original where no deferred
tensor is concerned.
"""


def text() -> str:
    """The page."""
    promised = {"PyTorch": "2.11 to 2.15", "JAX": "0.10 to 0.11", "Python": "3.11 to 3.13"}
    tables: dict[str, Any] = {"PyTorch": torch_names, "JAX": jax_names, "Python": python_names}
    lines = [f"| {name} | {promised[name]} | {', '.join(table.TESTED)} |" for name, table in tables.items()]
    for name, table in tables.items():
        lines += ["", f"## Private names of {name}", "", "| name | what for | without it does not work |"]
        lines += ["| --- | --- | --- |"]
        lines += [f"| `{row.path}` | {row.why} | {row.breaks} |" for row in table.NAMES.values()]
    lines += ["", "## What is replaced in PyTorch", "", REPLACED]
    lines += ["| function | when | why |", "| --- | --- | --- |"]
    for name, patch in patches.PATCHES.items():
        lines.append(f"| {', '.join(f'`{place}`' for place in (name, *patch.also))} | {patch.when} | {patch.why} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
