"""The folder in which compiled steps are kept between runs.

By default a folder of this user's and of Firstloss's own, where the platform keeps caches: `FIRSTLOSS_CACHE` moves it.
It is only a cache: a step runs without it. Its executables are run, so it is not used if somebody else may write there.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import CacheFolderWarning
from .program.source import warn

# At this size, the files that were used least recently are deleted.
LIMIT = 4 << 30  # bytes
# What remains of it then.
_REMAINS = 0.8
# The least time between two looks at the size.
_EVERY = 24 * 60 * 60  # seconds
_LOOKED = ".size-checked"

_refused: dict[Path, str] = {}


def default() -> Path:
    """The folder, unless the backend is given another one: `FIRSTLOSS_CACHE`, else Firstloss's in the platform's."""
    own = os.environ.get("FIRSTLOSS_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    if sys.platform == "win32":
        caches = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
    elif sys.platform == "darwin":
        caches = os.path.expanduser("~/Library/Caches")
    else:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches).absolute() / "firstloss"


def prepare(folder: Path) -> bool:
    """Create a folder for executables; returns whether it can be used. If not, a `CacheFolderWarning` says why."""
    is_new = not folder.exists()
    why = _obstacle(folder)
    if why is None:
        if is_new and folder.is_relative_to(default()):
            print(f"firstloss: compiled steps are cached in {folder}; FIRSTLOSS_CACHE moves them", file=sys.stderr)
        return True
    if _refused.get(folder) != why:
        _refused[folder] = why
        warn(CacheFolderWarning(f"compiled steps are not cached in {folder}: {why}. Set FIRSTLOSS_CACHE to another."))
    return False


def _obstacle(folder: Path) -> str | None:
    """Why executables cannot be kept in a folder, which is created if it does not exist."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return "it cannot be written"
    return None if is_own(status) else "others may write to it, and what is in it would be run"


def is_own(status: os.stat_result) -> bool:
    """Whether only this user can have written a file, or put files into a folder."""
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def bound(folder: Path, limit: int = LIMIT) -> None:
    """Delete the files that were used least recently, if all are more than `limit` bytes; at most once a day."""
    looked = folder / _LOOKED
    with contextlib.suppress(OSError):
        if looked.exists() and time.time() - looked.stat().st_mtime < _EVERY:
            return
        looked.touch()
    files = []
    for path in _files(folder):
        with contextlib.suppress(OSError):
            status = path.stat()
            files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= limit:
        return
    for _, size, path in sorted(files):
        with contextlib.suppress(OSError):
            path.unlink()
            total -= size
        if total <= limit * _REMAINS:
            return


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names if name != _LOOKED)
