"""What commands print: rich tables and progress for people, one JSON object for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


def console(as_json: bool = False) -> Console:
    """Where tables and progress go: stdout, or stderr when stdout is to hold the JSON object alone."""
    from rich.console import Console

    return Console(stderr=as_json, highlight=False)


def progress(on: Console) -> Progress:
    """A progress bar, silent when nobody looks at a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=on, disable=not on.is_terminal, transient=True)


def print_json(data: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, indent=2))


def size(count: float) -> str:
    """A number of bytes for people: `3.9 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
