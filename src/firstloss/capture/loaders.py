"""What other libraries' loaders have to know of deferred weights: that a file's content is to take their place.

PyTorch's distributed checkpoints write into the tensors that are there, one piece of the file after another. A deferred
weight gets memory for that, and its recipe is dropped: nothing is drawn, and nothing is held twice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..compat.patches import put, replaces
from . import session
from .tensor import Hooks, is_pending

_PLANNER = "torch.distributed.checkpoint.default_planner"
_RESOLVE = f"{_PLANNER}.DefaultLoadPlanner.resolve_tensor"
_TRANSFORMERS_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"


def teach() -> None:
    """Teach `torch.distributed.checkpoint`, once it has been imported."""
    if _PLANNER in sys.modules:
        put(_RESOLVE)


@replaces(_RESOLVE)
def resolve_tensor(original: Any, self: Any, read_item: Any) -> Any:
    """Where a piece of a file is to be written: in memory. The pieces of one tensor cover all of it."""
    found = original(self, read_item)
    if is_pending(found) and not session.depth:
        Hooks.give_memory(found._store)
        found = original(self, read_item)
    return found


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
