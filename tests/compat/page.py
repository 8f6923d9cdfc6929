"""Generate docs/compatibility.md from the tables of `firstloss.compat`: `python -m tests.compat.page`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firstloss.compat import jax_names, patches, python_names, torch_names

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

HEAD = """# Compatibility

<!-- Written by `python -m tests.compat.page`. -->

Firstloss depends on private names of PyTorch, JAX and Python, which may change in any release. All of them are listed
in the tables of `firstloss/compat/`, shown below, and used only through these. A name is resolved when it is first
imported, by feature detection rather than version number. A missing name breaks only the features that need it, when
they are used, with a `CompatibilityError` that names it.

`make test TORCH=2.15.0` runs the test suite on another PyTorch. The pinned versions (`requirements/`) run the whole
suite at each change, and PyTorch 2.11.0 and 2.15.0, the ends of the supported range, pass all of it, too. The other
versions below run the core tests: capture, engine, guards and generated programs.

| library | supported | core tested on |
| --- | --- | --- |
"""

REPLACED = """\
Importing Firstloss patches nothing. The patches that start with the first deferred tensor stay, since such a tensor
may occur anywhere from then on; the others are undone when the capture or the trace that needs them ends. If other
code has replaced the same function meanwhile, its replacement is left in place. Each patch calls the original
function unless a deferred tensor is involved.
"""


def text() -> str:
    """The page."""
    promised = {"PyTorch": "2.11 to 2.15", "JAX": "0.10 to 0.11", "Python": "3.11 to 3.13"}
    tables: dict[str, Any] = {"PyTorch": torch_names, "JAX": jax_names, "Python": python_names}
    lines = [f"| {name} | {promised[name]} | {', '.join(table.TESTED)} |" for name, table in tables.items()]
    for name, table in tables.items():
        lines += ["", f"## Private names of {name}", "", "| name | purpose | what breaks without it |"]
        lines += ["| --- | --- | --- |"]
        lines += [f"| `{row.path}` | {row.why} | {row.breaks} |" for row in table.NAMES.values()]
    lines += ["", "## Patches of PyTorch", "", REPLACED]
    lines += ["| function | when | why |", "| --- | --- | --- |"]
    for name, patch in patches.PATCHES.items():
        lines.append(f"| {', '.join(f'`{place}`' for place in (name, *patch.also))} | {patch.when} | {patch.why} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
