"""A journal of finished work, from which an interrupted run resumes: a text file with a line for each item.

Only one process may open it. An incomplete last line, of a process that was killed, is dropped.
"""

from __future__ import annotations

import os
import threading

from ...files import lock


class Journal:
    """The items that are done, on disk. A context manager; thread-safe."""

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
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            self._file.truncate(len(whole))
        self.done = set(whole.decode().splitlines())

    def add(self, *what: str) -> None:
        """Add lines, and sync them to disk."""
        with self._lock:
            self._file.write("".join(f"{line}\n" for line in what).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self.done.update(what)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
