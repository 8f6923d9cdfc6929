"""Files that are either whole or not there: written aside, fsynced, then renamed into place."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def written_aside(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO]:
    """Open a temporary file beside `path` that becomes `path` when the block ends without an error.

    A reader sees the old file or the new one, never a part; an error in the block leaves `path` as it was and
    removes the temporary file. `mode` is `"wb"` or `"w"` (UTF-8). The folder must exist.
    """
    path = os.path.realpath(path)  # through a symlink: the rename must replace the file, not the link
    folder, name = os.path.split(path)
    aside = os.path.join(folder, f".{name}.{uuid.uuid4().hex[:12]}.part")
    # Opened by its plain name rather than with tempfile, so that it gets the permissions any new file would get.
    file = open(aside, mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    sync_folder(folder)


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
