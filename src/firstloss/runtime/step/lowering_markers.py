"""Markers in the artifact folder for steps that were lowered before and may be lowered after the first loss.

A step's backward pass is lowered before the first loss is returned, so that lowering errors are raised by the call. A
step that has been lowered before is lowered after the loss: on a CPU lowering takes cores from the forward pass. If a
marker is wrong, the error is raised at the next use of the step's state instead.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_folder: Path | None = None


def set_folder(folder: Path | None) -> None:
    """Keep markers in `folder` from now on; None: keep none."""
    global _folder
    _folder = folder


def folder() -> Path | None:
    """The folder of markers."""
    return _folder


def is_marked(digest: str) -> bool:
    """Whether `digest` is marked."""
    return _folder is not None and (_folder / digest).exists()


def mark(digest: str) -> None:
    """Mark `digest`."""
    if _folder is not None:
        with contextlib.suppress(OSError):  # only slower at the next start
            _folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (_folder / digest).touch()
