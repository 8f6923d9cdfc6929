"""Rates of samples, as in `cerebras.pytorch.utils.tracker` and `.profiler`."""

from __future__ import annotations

import abc
import time
from typing import Any


class RateTracker:
    """Counts samples, and their rate.

    Args:
        smooth_factor: the weight of the latest interval in `rate`, from 0 to 1; by default 0.4.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._weight = 0.4 if smooth_factor is None else smooth_factor
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        self.reset_time()
        self._counted = 0.0  # at the last call of `rate`
        self._count = 0.0  # since then
        self._rate: float | None = None

    def reset_time(self, offset: float = 0) -> None:
        """Count the time from now, or from `offset` seconds ago."""
        self._start = self._last = time.perf_counter() - offset

    def add(self, count: float) -> None:
        """Count samples."""
        self._count += count

    @property
    def total_count(self) -> float:
        """The samples counted."""
        return self._counted + self._count

    def rate(self) -> float:
        """Samples a second since the last call, smoothed exponentially."""
        now = time.perf_counter()
        seconds = now - self._last
        if seconds <= 0:
            return 0.0
        latest = self._count / seconds
        self._rate = latest if self._rate is None else self._weight * latest + (1 - self._weight) * self._rate
        self._counted, self._count, self._last = self.total_count, 0.0, now
        return self._rate

    def global_rate(self) -> float:
        """Samples a second from the beginning on."""
        seconds = self.elapsed_seconds()
        return self.total_count / seconds if seconds > 0 else 0.0

    def elapsed_seconds(self) -> float:
        """Seconds from the beginning on."""
        return time.perf_counter() - self._start


class Activity(abc.ABC):
    """What a `Profiler` measures: a subclass defines `name`, `update` and `compute`."""

    @classmethod
    @abc.abstractmethod
    def name(cls) -> str:
        """The attribute of the profiler that it is."""

    @abc.abstractmethod
    def update(self, batch_size: int | None) -> None:
        """Note a batch."""

    @abc.abstractmethod
    def compute(self) -> Any:
        """The current result."""

    def __call__(self) -> Any:
        return self.compute()

    def __str__(self) -> str:
        return str(self.compute())


class RateTrackerActivity(Activity):
    """Samples and their rates: `total_samples`, `total_time`, `rate`, `global_rate`, `samples_per_sec`."""

    def __init__(self) -> None:
        self._tracker = RateTracker()

    @classmethod
    def name(cls) -> str:
        return "rate_tracker"

    def reset_time(self) -> None:
        """Count the time from now on."""
        self._tracker.reset_time()

    def update(self, batch_size: int | None) -> None:
        self._tracker.add(batch_size or 0)

    def compute(self) -> dict[str, float | None]:
        overall = self._tracker.global_rate()
        return {
            "total_samples": self._tracker.total_count,
            "total_time": self._tracker.elapsed_seconds(),
            "rate": self._tracker.rate(),
            "global_rate": overall,
            "samples_per_sec": overall,
            "flops_utilization": None,
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        result = self.compute()
        if name not in result:
            raise AttributeError(name)
        return result[name]


class Profiler:
    """The activities of a loop, each an attribute under its name: `executor.profiler.rate_tracker.global_rate`.

    Args:
        outdir: kept, and not written to.
        activities: classes; by default `RateTrackerActivity`.
    """

    def __init__(self, outdir: Any = None, activities: list[type[Activity]] | None = None) -> None:
        self.outdir = outdir
        self._activities = {kind.name(): kind() for kind in (activities or [RateTrackerActivity])}

    def step(self, batch_size: int | None) -> None:
        """Note a batch."""
        for activity in self._activities.values():
            activity.update(batch_size)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_activities"][name]
        except KeyError:
            raise AttributeError(f"the profiler has no activity {name!r}") from None
