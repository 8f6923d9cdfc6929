"""Which parts of a checkpoint a run starts from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import TrainerError
from ..callback import Callback

# Model Zoo's names of the parts, and a checkpoint's keys.
PARTS: dict[str, Any] = {
    "model": ("model",),
    "optimizer": ("optimizer",),
    "schedulers": ("schedulers",),
    "lr_scheduler": ("schedulers",),
    "grad_scaler": ("precision",),
    "precision": ("precision",),
    "dataloader": ("batches",),
    "callbacks": ("callbacks",),
    "global_step": ("trainer", "backend"),
    "rng": ("random",),
}


class LoadCheckpointStates(Callback):
    """Load these parts of the checkpoint given as `ckpt_path`, which may be another run's; the rest starts anew.

    Without it, a checkpoint of another run only gives its weights.

    Args:
        load_checkpoint_states: "all"; or names, in a list or separated by commas: "model", "optimizer", "schedulers",
            "precision" ("grad_scaler"), "dataloader", "callbacks", "global_step", "rng".

    Raises:
        TrainerError: for other names, and without "model".
    """

    def __init__(self, load_checkpoint_states: str | Sequence[str] = "all") -> None:
        given = load_checkpoint_states
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else list(given)
        if "all" in names:
            names = list(PARTS)
        for name in names:
            if name not in PARTS:
                raise TrainerError(f"LoadCheckpointStates: there is no {name!r}. There are: all, {', '.join(PARTS)}.")
        if "model" not in names:
            raise TrainerError('LoadCheckpointStates: a run starts from weights; add "model".')
        self._keys = {key for name in names for key in PARTS[name]}

    def preprocess_checkpoint(self, trainer: Any, state: Any) -> None:
        """Drop the parts that are not wanted."""
        for key in {key for keys in PARTS.values() for key in keys} - self._keys:
            state.pop(key, None)
