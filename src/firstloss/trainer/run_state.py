"""The position of a run: what a checkpoint holds besides weights and random state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class RunState:
    """Where a run is.

    Attributes:
        step: updates of the weights so far.
        epoch: passes over the training loader so far.
        samples, tokens: how many were trained on.
        validated: the step of the last validation.
        best: {"step", "metric", "value"} of the best checkpoint so far, if `Checkpoint(best=...)` asks for one.
        stopped: why the run was stopped early; empty if it was not.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0
    validated: int = 0
    best: dict[str, Any] | None = None
    stopped: str = ""
