"""A limit on how many checkpoints are kept."""

from __future__ import annotations

from typing import Any

from ...errors import TrainerError
from ..callback import Callback


class KeepNCheckpoints(Callback):
    """Keep the newest `n` checkpoints, as `Checkpoint(keep_last=n)` does.

    Args:
        n: how many; None keeps all of them.
    """

    def __init__(self, n: int | None = None) -> None:
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise TrainerError(f"KeepNCheckpoints: n={n!r} is not a positive integer.")
        self.n = n

    def setup(self, trainer: Any) -> None:
        trainer.checkpoint.keep_last = self.n
