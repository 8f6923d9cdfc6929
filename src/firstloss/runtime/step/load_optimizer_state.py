"""An optimizer's state on the backend, also when it is loaded while its steps are compiled."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...capture.step import StepTrace, storage_key
from ...compat.torch_names import DisableTorchDispatch
from ..backend import current_backend

_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def load_in_place(optimizer: torch.optim.Optimizer, trace: StepTrace) -> None:
    """Bring the state that `optimizer` has to the backend, and keep it there. `trace` is of the step that steps it.

    From here on, on a mesh, `optimizer.load_state_dict` keeps its state's tensors, which are there, and copies into
    them. Elsewhere the loaded tensors are the state from then on, as `torch.optim` has it (whoever holds them sees them
    change). Either way its groups are new ones, and the step is traced again.
    """
    held = [v for entries in optimizer.state.values() for v in entries.values() if type(v) is torch.Tensor]
    met = {storage_key(owner) for owner in trace.inputs.values() if isinstance(owner, torch.Tensor)}
    state = [v for v in held if storage_key(v) not in met]  # else the step has read or written it where it is
    backend = current_backend()
    with DisableTorchDispatch(), torch.no_grad():  # a step is being traced: this is no part of it
        if backend.mesh is not None:
            backend.mesh.follow(optimizer.state, [optimizer])
        backend.move_to_device(state)
    if optimizer in _watched:
        return
    _watched.add(optimizer)
    before: dict[Any, dict[str, Any]] = {}

    def remember(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        before.update({parameter: dict(entries) for parameter, entries in optimizer.state.items()})

    def copy_back(optimizer: torch.optim.Optimizer) -> None:
        for parameter, entries in optimizer.state.items() if backend.mesh is not None else ():
            for key, new in entries.items():
                old = before.get(parameter, {}).get(key)
                if not isinstance(old, torch.Tensor):
                    continue
                if isinstance(new, torch.Tensor) and new.shape == old.shape:
                    with torch.no_grad():
                        entries[key] = old.copy_(new)
        before.clear()

    optimizer.register_load_state_dict_pre_hook(remember)
    optimizer.register_load_state_dict_post_hook(copy_back)
