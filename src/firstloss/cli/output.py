"""Output of commands: rich tables and progress bars, or one JSON object."""

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
    """The console for tables and progress: stdout, or stderr if stdout is reserved for the JSON object."""
    from rich.console import Console

    return Console(stderr=as_json, highlight=False)


def progress(on: Console) -> Progress:
    """A progress bar, shown only on a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=on, disable=not on.is_terminal, transient=True)


_stdout: TextIO | None = None  # the original stdout, while sys.stdout is redirected to stderr


@contextlib.contextmanager
def only_json(keep: bool = False) -> Iterator[None]:
    """Context that reserves stdout for `print_json`: all other output, also of subprocesses, goes to stderr.

    Args:
        keep: stay redirected after the block, for output while the process ends.
    """
    global _stdout
    before, _stdout = sys.stdout, sys.stdout
    saved = None
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:  # otherwise it is captured, and not a file descriptor
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
            if not keep:
                before.flush()
                os.dup2(saved, 1)
            os.close(saved)
        _stdout = None
        if not keep:
            sys.stdout = before


def print_json(data: Any) -> None:
    """Print a JSON object to stdout; NaN and infinity, which JSON lacks, become null."""
    print(json.dumps(_finite(data), indent=2, allow_nan=False), file=_stdout, flush=True)


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def size(count: float) -> str:
    """Format a number of bytes: `3.9 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
