"""The position of a run, for checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class RunState:
    """The position of a run.

    Attributes:
        step: updates of the weights so far.
        epoch: completed passes over the training loader.
        samples, tokens: numbers of them trained on so far.
        validated: the step of the last validation.
        best: {"step", "metric", "value"} of the best checkpoint so far, if `Checkpoint(best=...)` asks for it.
        stopped: why the run was stopped early; empty if it was not.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    tokens: int = 0
    validated: int = 0
    best: dict[str, Any] | None = None
    stopped: str = ""
