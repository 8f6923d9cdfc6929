"""The line of the user's code that an operation comes from."""

from __future__ import annotations

import os
import warnings
from types import FrameType
from typing import Any, NamedTuple

import torch

from ..compat.installed import is_installed_file
from ..compat.python_names import getframe

# Frames in these folders are not the user's. A library that defines models (transformers, timm) is.
_MACHINERY = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_is_machinery: dict[str, bool] = {}


class Source(NamedTuple):
    """A location in a source file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


UNKNOWN = Source("<unknown>", 0)

_warning_registries: dict[str, dict[Any, Any]] = {}  # by file


def here() -> Source:
    """The line of the innermost frame outside torch and Firstloss.

    `UNKNOWN` if there is none, as in a backward pass that torch itself has started.
    """
    frame = user_frame()
    return UNKNOWN if frame is None else Source(frame.f_code.co_filename, frame.f_lineno)


def script_line() -> Source:
    """The line of the innermost frame outside all installed packages; if there is none, that of `here`."""
    frame = user_frame()
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_machinery(name) and not is_installed_file(name):
            return Source(name, frame.f_lineno)
        frame = frame.f_back
    return here()


def user_frame() -> FrameType | None:
    """The innermost frame outside torch and Firstloss."""
    frame: FrameType | None = getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        skip = _is_machinery.get(name)
        if not (is_machinery(name) if skip is None else skip):
            return frame
        frame = frame.f_back
    return None


def warn(warning: Warning) -> None:
    """Like `warnings.warn`, at the user's line (`here`)."""
    frame = user_frame()
    if frame is None:
        warnings.warn(warning, stacklevel=2)
        return
    file = frame.f_code.co_filename
    # Not the registry in the module's globals, which a traced step may read.
    registry = _warning_registries.setdefault(file, {})
    module = frame.f_globals.get("__name__") or "__main__"  # a warning of a module without a name is not shown
    warnings.warn_explicit(warning, type(warning), file, frame.f_lineno, module, registry)


def raised_at(error: BaseException) -> Source:
    """Like `here`, for the frames in the traceback of `error`."""
    source, trace = UNKNOWN, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not is_machinery(name):
            source = Source(name, trace.tb_lineno)
        trace = trace.tb_next
    return source


def is_machinery(name: str) -> bool:
    """Whether a file of this name belongs to torch or Firstloss, or is not a file."""
    skip = _is_machinery[name] = name.startswith(_MACHINERY) or name.startswith("<")
    return skip
