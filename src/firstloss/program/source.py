"""The line of the user's code that an operation comes from."""

from __future__ import annotations

import os
import sysconfig
import warnings
from types import FrameType
from typing import NamedTuple

import torch

from ..compat.python_names import getframe

# Frames in these folders are machinery between the user's line and us. The user's line may well be in a library
# (transformers, timm): whoever wrote the model is the user here.
_MACHINERY = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_is_machinery: dict[str, bool] = {}

# Where installed packages are: nobody edits these.
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})


class Source(NamedTuple):
    """A place in a source file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


UNKNOWN = Source("<unknown>", 0)

_told: dict[str, dict] = {}  # by file, what Python notes of warnings so as not to repeat them


def here() -> Source:
    """The line of the innermost frame that belongs neither to torch nor to Firstloss.

    When there is none (a backward pass started from torch's own code), the answer is `UNKNOWN`.
    """
    frame = user_frame()
    return UNKNOWN if frame is None else Source(frame.f_code.co_filename, frame.f_lineno)


def script_line() -> Source:
    """The line of the innermost frame that is in no installed package either: one that the user can edit.

    When there is none, as `here`.
    """
    frame = user_frame()
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_machinery(name) and not name.startswith(_INSTALLED):
            return Source(name, frame.f_lineno)
        frame = frame.f_back
    return here()


def user_frame() -> FrameType | None:
    """The innermost frame that belongs neither to torch nor to Firstloss."""
    frame: FrameType | None = getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        skip = _is_machinery.get(name)
        if not (is_machinery(name) if skip is None else skip):
            return frame
        frame = frame.f_back
    return None


def warn(warning: Warning) -> None:
    """As `warnings.warn`, at the user's line: what `here` gives, however deep we are."""
    frame = user_frame()
    if frame is None:
        warnings.warn(warning, stacklevel=2)
        return
    file = frame.f_code.co_filename
    told = _told.setdefault(file, {})  # not in the module's globals, where Python would keep it: a step may read those
    module = frame.f_globals.get("__name__") or "__main__"  # Python keeps quiet of a module without a name
    warnings.warn_explicit(warning, type(warning), file, frame.f_lineno, module, told)


def raised_at(error: BaseException) -> Source:
    """As `here`, of the frames that `error` has passed through."""
    found, trace = UNKNOWN, error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not is_machinery(name):
            found = Source(name, trace.tb_lineno)
        trace = trace.tb_next
    return found


def is_machinery(name: str) -> bool:
    """Whether a file of this name is torch's, Firstloss's, or none."""
    skip = _is_machinery[name] = name.startswith(_MACHINERY) or name.startswith("<")
    return skip
