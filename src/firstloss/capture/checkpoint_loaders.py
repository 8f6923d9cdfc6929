"""Patches of other libraries' checkpoint loaders, so that they load into deferred weights.

PyTorch's distributed checkpoints write into existing tensors, piece by piece. A deferred weight gets memory for that,
and its recipe is dropped: nothing is drawn or stored twice.

accelerate replaces each loaded parameter by a new one, and then ties parameters again, to the one that is not on the
meta device.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

from ..compat.patches import replaces
from ..program.graph import FileValue
from . import session
from .first_use import sources
from .tensor import Hooks, is_pending


@replaces("torch.distributed.checkpoint.default_planner.DefaultLoadPlanner.resolve_tensor")
def resolve_tensor(original: Any, self: Any, read_item: Any) -> Any:
    """Allocate memory for a tensor that pieces of a file are written to; together they cover all of it."""
    target = original(self, read_item)
    if is_pending(target) and not session.depth:
        Hooks.allocate_real(target._storage)
        target = original(self, read_item)
    return target


@replaces("accelerate.utils.modeling.retie_parameters")
def retie_parameters(original: Any, model: torch.nn.Module, tied_params: Any) -> Any:
    """Tie parameters to the first one that has been loaded, if there is one."""
    return original(model, [sorted(names, key=lambda name: _is_constructed(model, name)) for names in tied_params])


def _is_constructed(model: torch.nn.Module, name: str) -> bool:
    """Whether a parameter has not been loaded."""
    parameter = attrgetter(name)(model)
    return is_pending(parameter) and not any(isinstance(v, FileValue) for v in sources([parameter._storage]))
