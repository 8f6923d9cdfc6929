"""Files that describe a run, in the run folder: settings, versions, and the timeline of the first loss."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import platform
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from .. import timeline
from ..files import atomic_write
from .callback import Callback

if TYPE_CHECKING:
    from .trainer import Trainer

_PACKAGES = ("firstloss", "torch", "jax", "jaxlib", "numpy", "transformers", "safetensors")


class RunFolder(Callback):
    """Write `settings.json` and `versions.json` when training begins, `timeline.json` and `timeline.png` at its end.

    Only a process's first run has a timeline: from the start of the process to the first loss.
    """

    def __init__(self) -> None:
        self._first = False

    def on_fit_start(self, trainer: Trainer) -> None:
        self._first = timeline.current().first_loss is None
        with atomic_write(os.path.join(trainer.model_dir, "versions.json"), "w") as file:
            json.dump({**versions(), "command": sys.argv, "seed": trainer.seed}, file, indent=1)
        with atomic_write(os.path.join(trainer.model_dir, "settings.json"), "w") as file:
            json.dump(settings(trainer), file, indent=1, default=repr)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._draw(trainer)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        clock = timeline.current()
        if not self._first or clock.first_loss is None:
            return
        self._first = False
        picture = timeline.Timeline()  # only up to the first loss, so that it is readable
        for span in clock.spans:
            if span.start <= clock.first_loss:
                picture.add(span.name, span.start, span.end, span.track)
        picture.mark(timeline.FIRST_LOSS, clock.first_loss)
        picture.to_perfetto(os.path.join(trainer.model_dir, "timeline.json"))
        try:
            picture.to_png(os.path.join(trainer.model_dir, "timeline.png"))
        except ImportError:  # matplotlib comes with the extra "cli"; the JSON file can be viewed at ui.perfetto.dev
            pass


def settings(trainer: Trainer) -> dict[str, Any]:
    """The Trainer's settings, defaults included; callables by their source, if Python knows it."""
    model, optimizer, schedulers = (_source(given) for given in trainer.given)
    described = {"model": model, "optimizer": optimizer, "schedulers": schedulers, "seed": trainer.seed}
    mesh = getattr(getattr(trainer.backend, "mesh", None), "axes", None)
    described |= {"backend": trainer.backend.name, "mesh": mesh, "processes": trainer.processes.count}
    for name in ("loop", "precision", "checkpoint", "logging"):
        setting = getattr(trainer, name)
        described[name] = {f.name: getattr(setting, f.name) for f in fields(setting) if not f.name.startswith("_")}
    described["loop"]["validation"] = vars(trainer.validation)
    described["callbacks"] = [type(callback).__name__ for callback in trainer.callbacks.all]
    return described


def _source(given: Any) -> Any:
    if given is None or not callable(given) or isinstance(given, torch.nn.Module):
        return repr(given)
    try:
        return " ".join(inspect.getsource(given).split()) if given.__name__ == "<lambda>" else given.__qualname__
    except (OSError, TypeError, AttributeError):
        return repr(given)


def versions() -> dict[str, Any]:
    """The versions of Python, the platform and the relevant packages."""
    result: dict[str, Any] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            result[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result
