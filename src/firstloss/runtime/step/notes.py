"""Notes for the next start, in the artifact folder: what went well this time may be put off then.

A step's backward pass is lowered before the first loss is returned, so that what cannot be lowered is an error at the
call. One that has been lowered before is lowered after the loss: on a CPU it takes cores from the forward pass. A note
says no more than when to do something. If it is wrong, an error comes at the next use of the step's state instead.
"""

from __future__ import annotations

from pathlib import Path

_folder: Path | None = None


def set_folder(folder: str) -> None:
    """Keep notes in `folder` from here on."""
    global _folder
    _folder = Path(folder)


def folder() -> Path | None:
    """Where notes are kept."""
    return _folder


def is_noted(digest: str) -> bool:
    """Whether there is a note of `digest`."""
    return _folder is not None and (_folder / digest).exists()


def note(digest: str) -> None:
    """Leave a note of `digest`."""
    if _folder is not None:
        _folder.mkdir(parents=True, exist_ok=True)
        (_folder / digest).touch()
