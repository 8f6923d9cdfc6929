"""Atomic file writes, a lock for writers of a folder, and queries and removal of files.

A file is written under a temporary name, synced to disk, and renamed into place.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from .errors import SaveError
from .interpreter import Uninterrupted


def is_of_the_system(error: OSError) -> bool:
    """Whether the operating system reported an error, and not a signal's handler that raises one, like TimeoutError."""
    return error.errno is not None


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file or a folder. `os.path.exists` answers no if a signal's handler raises a TimeoutError."""
    return _mode(path) is not None


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a folder; likewise."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: str | os.PathLike[str]) -> int | None:
    try:
        return os.stat(path).st_mode
    except ValueError:  # not a path
        return None
    except OSError as error:
        if not is_of_the_system(error):
            raise
        return None


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Remove a folder and what is in it. `shutil.rmtree`, interrupted, may close a descriptor twice, by then another
    file's."""
    with Uninterrupted():
        shutil.rmtree(path)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Context with a temporary path beside `path`; the file written there is renamed to `path` at the end.

    Readers see the old file or the new one, never a part. An error in the block leaves `path` unchanged and removes the
    temporary file. The block must sync the file to disk; the folder must exist.
    """
    path = os.path.realpath(path)  # the rename must replace the file, not a symlink to it
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:12]}.part")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(folder)


@contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Like `replacing`, with the temporary file open, and synced at the end; `mode` is `"wb"` or `"w"` (UTF-8)."""
    with replacing(path) as temporary:
        # Not opened with tempfile, so that it gets the permissions of any new file.
        with open(temporary, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


def lock(descriptor: int, folder: str) -> None:
    """Lock `folder` for one writing process, through `descriptor` of the folder itself or of a file in it. The lock is
    released when that is closed or the process ends. No effect on systems and file systems without locks.

    Raises:
        SaveError: if another process holds the lock.
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
    """Hold the `lock` of `folder` during the block."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: str) -> None:
    """Sync a rename to disk, on systems that support it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_of_the_system(error):
            raise
