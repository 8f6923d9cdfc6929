"""The names of `cerebras.pytorch.profiler`, which profiles Cerebras' hardware: accepted, without effect.

To profile a run here: `firstloss.trainer.callbacks.Profiler`, or `jax.profiler`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .accepted import say


class ProfilerRegistry:
    """The profiler in force: none."""

    @classmethod
    def get_profiler(cls) -> None:
        """None."""


class profile:
    """A block that is profiled. No effect."""

    def __init__(self, *, schedule: Any, host_activities: Any = None, on_trace_ready: Any = None) -> None:
        say("profiler.profile")

    def __enter__(self) -> profile:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def schedule(*, start_step: int, end_step: int) -> Callable[[int], bool]:
    """Whether to profile a step: those from `start_step` to `end_step`."""
    return lambda step: start_step <= step <= end_step


def tensorboard_trace_handler(
    dir_name: str, worker_name: str | None = None, use_gzip: bool = False
) -> Callable[[Any], None]:
    """What to do with a profile. No effect."""
    return lambda profile: None


__all__ = ["ProfilerRegistry", "profile", "schedule", "tensorboard_trace_handler"]
