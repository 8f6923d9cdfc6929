"""Branches in torch's own Python that only validate: `if torch.any(var < 0): raise ValueError`.

A traced step has no value to branch on. It goes the way of a valid argument, and checks the condition whenever it has
run, as it does for `torch._assert_async`.
"""

from __future__ import annotations

from types import FrameType

import torch

from ..compat.python_names import getframe
from .tensor import Hooks

_OURS = __name__.partition(".")[0] + "."

# By module and function: the condition's value if all is well, and what is wrong if it has not that value.
_BRANCHES = {
    ("torch.nn.functional", "gaussian_nll_loss"): (False, "gaussian_nll_loss: var has negative entry/entries"),
    ("torch.distributions.distribution", "__init__"): (True, "a parameter of a distribution is outside its support"),
    ("torch.distributions.distribution", "_validate_sample"): (
        True,
        "a value whose log_prob, cdf or the like is asked for is outside the support of the distribution",
    ),
}


def validated(condition: torch.Tensor) -> bool | None:
    """What a validating branch of torch's reads of `condition`, which is then checked later; None for other readers."""
    frame: FrameType | None = getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return None
    found = _BRANCHES.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
    if found is None:
        return None
    well, message = found
    Hooks.assert_later(condition if well else condition.logical_not(), message)
    return well
