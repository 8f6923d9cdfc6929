"""Patches of other libraries' checkpoint loaders, so that a file's content replaces deferred weights.

PyTorch's distributed checkpoints write into the tensors that are there, one piece of the file after another. A deferred
weight gets memory for that, and its recipe is dropped: nothing is drawn, and nothing is held twice.

accelerate puts another parameter in place of each that a file has, and ties again what was tied: by the one that is
not on the meta device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from ..compat.patches import install_patch, replaces
from . import session
from .file_value import FileValue
from .first_use import sources
from .tensor import Hooks, is_pending

_PLANNER = "torch.distributed.checkpoint.default_planner"
_RESOLVE = f"{_PLANNER}.DefaultLoadPlanner.resolve_tensor"
_ACCELERATE = "accelerate.utils.modeling"
_RETIE = f"{_ACCELERATE}.retie_parameters"
_TRANSFORMERS_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"


def teach() -> None:
    """Teach `torch.distributed.checkpoint` and accelerate, once they have been imported."""
    if _PLANNER in sys.modules:
        install_patch(_RESOLVE)
    if _ACCELERATE in sys.modules:
        install_patch(_RETIE)


@replaces(_RESOLVE)
def resolve_tensor(original: Any, self: Any, read_item: Any) -> Any:
    """Where a piece of a file is to be written: in memory. The pieces of one tensor cover all of it."""
    found = original(self, read_item)
    if is_pending(found) and not session.depth:
        Hooks.allocate_real(found._storage)
        found = original(self, read_item)
    return found


@replaces(_RETIE)
def retie_parameters(original: Any, model: torch.nn.Module, tied_params: Any) -> Any:
    """Of tied parameters, the first that has been loaded takes the place of all, if there is one."""
    return original(model, [sorted(names, key=lambda name: _is_constructed(model, name)) for names in tied_params])


def _is_constructed(model: torch.nn.Module, name: str) -> bool:
    """Whether a parameter is still what the constructor has made."""
    parameter = attrgetter(name)(model)
    return is_pending(parameter) and not any(isinstance(v, FileValue) for v in sources([parameter._storage]))


@contextmanager
def in_this_thread() -> Iterator[None]:
    """Have transformers load in the thread that captures: what its others convert would not be recorded."""
    if _TRANSFORMERS_IN_TURN in os.environ:
        yield
        return
    os.environ[_TRANSFORMERS_IN_TURN] = "1"
    try:
        yield
    finally:
        os.environ.pop(_TRANSFORMERS_IN_TURN, None)
