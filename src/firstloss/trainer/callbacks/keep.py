"""How many checkpoints are kept."""

from __future__ import annotations

from typing import Any

from ...errors import TrainerError
from ..callback import Callback


class KeepNCheckpoints(Callback):
    """Keeps the newest `n` checkpoints: `Checkpoint(keep_last=n)`, said here.

    Args:
        n: None: all of them.
    """

    def __init__(self, n: int | None = None) -> None:
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise TrainerError(f"KeepNCheckpoints: n={n!r} is not a whole number of at least 1.")
        self.n = n

    def setup(self, trainer: Any) -> None:
        trainer.checkpoint.keep_last = self.n
