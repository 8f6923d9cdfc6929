"""What a run leaves behind beside checkpoints and logs: versions, and the picture of its time to first loss."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from .. import timeline
from ..files import written_aside
from .callback import Callback

if TYPE_CHECKING:
    from .trainer import Trainer

_PACKAGES = ("firstloss", "torch", "jax", "jaxlib", "numpy", "transformers", "safetensors")


class RunFolder(Callback):
    """Writes `versions.json` when training begins, and at its end `timeline.json` and `timeline.png`.

    Of a process's later runs there is no timeline: it begins with the process, and ends with its first loss.
    """

    def __init__(self) -> None:
        self._first = False

    def on_fit_start(self, trainer: Trainer) -> None:
        self._first = timeline.current().first_loss is None
        with written_aside(os.path.join(trainer.model_dir, "versions.json"), "w") as file:
            json.dump({**versions(), "command": sys.argv, "seed": trainer.seed}, file, indent=1)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._draw(trainer)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        clock = timeline.current()
        if not self._first or clock.first_loss is None:
            return
        self._first = False
        road = timeline.Timeline()  # up to the first loss: what came after would only make the picture small
        for span in clock.spans:
            if span.start <= clock.first_loss:
                road.add(span.name, span.start, span.end, span.track)
        road.mark(timeline.FIRST_LOSS, clock.first_loss)
        road.to_perfetto(os.path.join(trainer.model_dir, "timeline.json"))
        try:
            road.to_png(os.path.join(trainer.model_dir, "timeline.png"))
        except ImportError:  # matplotlib comes with the extra "cli"; ui.perfetto.dev draws the other file
            pass


def versions() -> dict[str, Any]:
    """What ran here: Python, the platform and the packages that matter."""
    found: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
