"""Data-dependent branches in PyTorch that only validate: `if torch.any(var < 0): raise ValueError`.

A traced step has no value to branch on. It goes the way of a valid argument, and checks the condition whenever it has
run, as it does for `torch._assert_async`.
"""

from __future__ import annotations

from types import FrameType

import torch

from ..compat.python_names import getframe
from ..compat.torch_names import VALIDATION_HELPER, VALIDATIONS
from .tensor import Hooks

_OURS = __name__.partition(".")[0] + "."


def validated(condition: torch.Tensor) -> bool | None:
    """What a validating branch of torch's reads of `condition`, which is then checked later; None for other readers."""
    frame: FrameType | None = getframe(1)
    while frame is not None and (
        frame.f_globals.get("__name__", "").startswith(_OURS) or frame.f_code.co_name == VALIDATION_HELPER
    ):
        frame = frame.f_back
    if frame is None:
        return None
    found = VALIDATIONS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
    if found is None:
        return None
    well, message = found
    Hooks.assert_later(condition if well else condition.logical_not(), message)
    return well
