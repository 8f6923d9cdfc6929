"""Atomic file writes, and the lock of whoever writes in a folder.

A file is written aside, fsynced, then renamed into place: it is either whole or not there.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from .errors import SaveError


@contextmanager
def placed(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name beside `path`: what is written there, and fsynced, becomes `path` when the block ends without an error.

    A reader sees the old file or the new one, never a part; an error in the block leaves `path` as it was and
    removes the temporary file. The folder must exist.
    """
    path = os.path.realpath(path)  # through a symlink: the rename must replace the file, not the link
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:12]}.part")
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    sync_folder(folder)


@contextmanager
def written_aside(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO]:
    """As `placed`, with the temporary file open: `mode` is `"wb"` or `"w"` (UTF-8)."""
    with placed(path) as aside:
        # Opened by its plain name rather than with tempfile, so that it gets the permissions any new file would get.
        with open(aside, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


def lock(descriptor: int, folder: str) -> None:
    """Only one process writes in `folder`: it has an open file there, or the folder itself, locked until it closes
    that, or ends, however it ends. On systems and file systems without locks this does nothing.

    Raises:
        SaveError: if another process has it.
    """
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise SaveError(f"{folder} is being written by another process") from None


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """As `lock`, of the folder itself, while the block runs."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: str) -> None:
    """Make the rename itself last; systems without folder descriptors have no way to ask for it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
