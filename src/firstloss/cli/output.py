"""Output of commands: rich tables and progress for people, one JSON object for programs."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

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


_stdout: TextIO | None = None  # the real one, while everybody else's output goes to stderr


@contextlib.contextmanager
def only_json(to_the_end: bool = False) -> Iterator[None]:
    """In the block stdout is for `print_json` alone: what the user's code prints, and what it starts, goes to stderr.

    Args:
        to_the_end: afterwards too, for what is printed while the process ends.
    """
    global _stdout
    before, _stdout = sys.stdout, sys.stdout
    saved = None
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:  # else somebody who captures it is no file descriptor
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            saved = os.dup(1)
            os.dup2(2, 1)
            _stdout = open(os.dup(saved), "w", encoding=before.encoding, errors=before.errors)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        if saved is not None:
            with contextlib.suppress(BrokenPipeError):
                _stdout.close()
            if not to_the_end:
                before.flush()
                os.dup2(saved, 1)
            os.close(saved)
        _stdout = None
        if not to_the_end:
            sys.stdout = before


def print_json(data: Any) -> None:
    """One JSON object on stdout; what is no number or infinite, which JSON has not, is null."""
    print(json.dumps(_finite(data), indent=2, allow_nan=False), file=_stdout, flush=True)


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def size(count: float) -> str:
    """A number of bytes for people: `3.9 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
