"""What a step's Python code changes and nobody can undo: output, files, queues, databases, hashes.

A trace that fails undoes what it has changed, so that the step's Python can run instead. What is written cannot be
undone, so it is there twice then, as after a trace that is repeated. Whether something is written is found out as that
code runs, by the C functions that it calls.
"""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from typing import Any

from ...program.source import Source
from .external_state import ExternalCall, is_external_call, name_of
from .kind import kind_of
from .packages import PACKAGE, is_closed, is_installed, is_runtime


class ExternalWrites:
    """Calls of C functions that may have changed something for good.

    Attributes:
        calls: the calls, by the function's name.
    """

    def __init__(self, is_held: Callable[[Any], bool]) -> None:
        """`is_held`: whether an object existed before the step."""
        self.calls: dict[str, ExternalCall] = {}
        self._is_held = is_held

    def called(self, function: Any, frame: types.FrameType) -> bool:
        """Record a call of a C function by the code of `frame`.

        Returns:
            Whether to report further calls of this function.
        """
        owner = function.__self__
        module, called = name_of(function)
        if owner is None or isinstance(owner, (type, types.ModuleType)):
            names = _WRITING.get(module, ())
            if function is not print and function.__name__ not in names and not _is_unknown(function, module, frame):
                return False
        elif not kind_of(type(owner)).hides_content:
            return False
        elif not (self._is_held(owner) or isinstance(owner, io.IOBase) and not isinstance(owner, _IN_MEMORY)):
            return True
        if called not in self.calls and (line := _line_of(frame)) is not None:
            self.calls[called] = ExternalCall(called, line)
        return True


_OF_FILES = {"write", "writev", "pwrite", "remove", "unlink", "rename", "replace", "mkdir", "rmdir", "truncate",
             "ftruncate", "link", "symlink", "kill", "posix_spawn"}  # fmt: skip
_WRITING = {"posix": _OF_FILES, "nt": _OF_FILES, "_posixsubprocess": {"fork_exec"}}
_IN_MEMORY = (io.StringIO, io.BytesIO)


def _is_unknown(function: Any, module: str, frame: types.FrameType) -> bool:
    """Whether it is a function of another package, which may do anything."""
    return module.partition(".")[0] not in sys.stdlib_module_names and is_external_call(function, module, frame)


def _line_of(frame: types.FrameType | None) -> Source | None:
    """The line of user code that makes the call of `frame`, through whatever library; None if the runtime makes it, or
    an import, which is done once."""
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if is_runtime(name) or name.startswith("importlib._bootstrap") or frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if not is_closed(name) and not is_installed(name):
            return Source(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None
