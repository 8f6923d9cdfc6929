"""Profiling of some steps, as a trace for ui.perfetto.dev."""

from __future__ import annotations

import os
from typing import Any

import torch

from ... import timeline
from ...errors import TrainerError
from ..callback import Callback


class Profiler(Callback):
    """Write a Perfetto trace of the steps from `start_step` to `end_step`, on three tracks.

    The tracks are *data*: reading a batch and moving it to the device; *host*: Python; and *device*: from the start of
    a batch until its results are available. The file is "profile_START_END.json" in the artifact directory; open it at
    ui.perfetto.dev.

    The profiled steps do not overlap: the Trainer waits for each of them. Other steps run as usual.

    Args:
        start_step, end_step: counted from 1, inclusive.
    """

    def __init__(self, start_step: int = 1, end_step: int = 10) -> None:
        for name, step in (("start_step", start_step), ("end_step", end_step)):
            if isinstance(step, bool) or not isinstance(step, int) or step < 1:
                raise TrainerError(f"Profiler: {name}={step!r} is not a positive integer.")
        if end_step < start_step:
            raise TrainerError(f"Profiler: end_step={end_step} comes before start_step={start_step}.")
        self.start_step: int = start_step
        self.end_step: int = end_step
        self._trace = timeline.Timeline()
        self._ended: float | None = None  # when the previous batch ended
        self._begun = 0.0

    @property
    def name(self) -> str:
        """The trace's file name."""
        return f"profile_{self.start_step}_{self.end_step}.json"

    def on_fit_start(self, trainer: Any) -> None:
        self._trace, self._ended = timeline.Timeline(), None

    def _watched(self, trainer: Any, step: int) -> bool:
        return self.start_step <= step <= self.end_step

    def on_batch_start(self, trainer: Any, batch: Any) -> None:
        self._begun = self._trace.now()
        if self._watched(trainer, trainer.state.step + 1) and self._ended is not None:
            self._trace.add(f"read batch for step {trainer.state.step + 1}", self._ended, self._begun, "data")

    def on_batch_end(self, trainer: Any, batch: Any, outputs: dict[str, Any]) -> None:
        step = trainer.state.step + 1
        if self._watched(trainer, step):
            started = self._trace.now()
            self._trace.add(f"start step {step}", self._begun, started, "host")
            for value in outputs.values():
                if isinstance(value, torch.Tensor):
                    value.detach().cpu().clone()
            self._trace.add(f"step {step}", self._begun, self._trace.now(), "device")
        self._ended = self._trace.now()

    def on_step_end(self, trainer: Any) -> None:
        if trainer.state.step == self.end_step:
            self._write(trainer)

    def on_fit_end(self, trainer: Any) -> None:
        if self._trace.spans:  # the run ended in the middle of the steps
            self._write(trainer)

    def _write(self, trainer: Any) -> None:
        os.makedirs(trainer.artifact_dir, exist_ok=True)
        self._trace.to_perfetto(os.path.join(trainer.artifact_dir, self.name))
        self._trace = timeline.Timeline()
