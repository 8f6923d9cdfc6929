"""Random keys of steps, from the run's seed and the number of steps that have drawn random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ...capture import session
from ...errors import CheckpointError


class Keys:
    """The random key of each step that draws: the run's seed, and the step's number among those that draw.

    The seed is `torch.initial_seed()` at the first such step; a later `torch.manual_seed` restarts the sequence. Steps
    that draw nothing are not counted, so validation in between does not change the numbers of training.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._steps = 0
        self._seen: tuple[int, int] | None = None  # torch's seed when ours was read or loaded

    def next(self) -> np.ndarray:
        """The key of the next step: two uint32, from which `jax.random` derives all others. `advance` consumes it."""
        self._follow_torch()
        assert self._seed is not None
        return np.array([self._seed & 0xFFFFFFFF, self._steps], np.uint32)

    def advance(self, key: np.ndarray) -> None:
        """Count the step with this key as run. May be called twice."""
        self._steps = int(key[1]) + 1

    def rewind(self, key: np.ndarray) -> None:
        """Undo `advance` for this step and all later ones."""
        self._steps = int(key[1])

    def state_dict(self) -> dict[str, int]:
        """The seed and the number of steps."""
        self._follow_torch()
        assert self._seed is not None
        return {"seed": self._seed, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, regardless of PyTorch's current seed.

        Raises:
            CheckpointError: if `state` is not what `state_dict` returns.
        """
        if set(state) != {"seed", "steps"} or not all(type(number) is int for number in state.values()):
            raise CheckpointError(f"a backend's random state has the integers 'seed' and 'steps', not {state!r}.")
        self._seed, self._steps, self._seen = state["seed"], state["steps"], _seeding()

    @contextmanager
    def unaffected_by_reseeding(self) -> Iterator[None]:
        """Context in which PyTorch's generator is restored to an earlier state, which is not a new seed: resuming a
        loader does not restart the steps' random numbers."""
        if self._seen is None:
            yield
            return
        self._follow_torch()
        try:
            yield
        finally:
            self._seen = _seeding()

    def _follow_torch(self) -> None:
        seeding = _seeding()
        if seeding != self._seen:
            self._seed, self._steps, self._seen = seeding[0], 0, seeding


def _seeding() -> tuple[int, int]:
    """PyTorch's seed, and how often it has been set, as setting the same seed again also restarts the sequence."""
    return torch.initial_seed(), session.seedings
