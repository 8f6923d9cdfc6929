"""A journal of completed work, from which an interrupted run resumes: a text file with a line for each item.

Only one process may open it. An incomplete last line, of a process that was killed, is discarded.
"""

from __future__ import annotations

import os
import threading

from ...files import lock


class Journal:
    """The completed items, on disk. A context manager; thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "a+b")
        self._lock = threading.Lock()
        try:
            lock(self._file.fileno(), os.path.dirname(path))
            self._file.seek(0)
            text = self._file.read()
        except BaseException:
            self._file.close()
            raise
        complete = text[: text.rfind(b"\n") + 1]
        if len(complete) < len(text):
            self._file.truncate(len(complete))
        self.done = set(complete.decode().splitlines())

    def add(self, *lines: str) -> None:
        """Add lines, and sync them to disk."""
        with self._lock:
            self._file.write("".join(f"{line}\n" for line in lines).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self.done.update(lines)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
