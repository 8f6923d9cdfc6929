"""Checkpointing: when to save, which checkpoints to keep, what they hold, and which one to resume from."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import torch

import firstloss as fl

from ..errors import NaNLossError, TrainerError
from ..files import atomic_write, exists, is_folder
from ..settings import Settings
from . import checkpoint_files
from .randomness import random_state, set_random_state

if TYPE_CHECKING:
    from .run_state import RunState
    from .trainer import Trainer

_NAME = re.compile(r"step_(\d+)")


@dataclass
class Checkpoint(Settings):
    """When to save, which checkpoints to keep, and whether to resume from the last one. The end of a run is always
    saved.

    Attributes:
        steps: save every `steps` steps.
        epochs: save every `epochs` epochs.
        keep_last: how many of the newest checkpoints to keep; None: all.
        best: a validation metric, such as "val_loss", by which the best checkpoint is kept as well.
        mode: "min" if smaller values of `best` are better, "max" if larger ones are.
        autoload_last: whether `fit` resumes from the last checkpoint in the run folder, if there is one.
        strict: whether weights loaded from elsewhere must match the model's names exactly.
        save_initial_checkpoint: whether to save before the first step as well.
        autoload_last_checkpoint: another name of `autoload_last`.
        disable_strict_checkpoint_loading: another name of `strict=False`.
    """

    steps: int | None = None
    epochs: int | None = None
    keep_last: int | None = 3
    best: str | None = None
    mode: str = "min"
    autoload_last: bool = True
    strict: bool = True
    save_initial_checkpoint: bool = False
    autoload_last_checkpoint: bool | None = None
    disable_strict_checkpoint_loading: bool | None = None

    def __post_init__(self) -> None:
        for name in ("autoload_last_checkpoint", "disable_strict_checkpoint_loading", "save_initial_checkpoint"):
            if getattr(self, name) not in (None, True, False):
                raise TrainerError(f"Checkpoint: {name}={getattr(self, name)!r}: write True or False.")
        if self.autoload_last_checkpoint is not None:
            object.__setattr__(self, "autoload_last", self.autoload_last_checkpoint)
        if self.disable_strict_checkpoint_loading is not None:
            object.__setattr__(self, "strict", not self.disable_strict_checkpoint_loading)
        if self.mode not in ("min", "max"):
            raise TrainerError(f'Checkpoint: mode={self.mode!r}: write "min" or "max".')
        if self.best is not None and not isinstance(self.best, str):
            raise TrainerError(f'Checkpoint: best={self.best!r} is not the name of a metric, such as "val_loss".')
        if self.mode == "max" and self.best is None:
            raise TrainerError('Checkpoint: mode="max" has no effect without best=..., the metric that it applies to.')
        for name in ("autoload_last", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise TrainerError(f"Checkpoint: {name}={getattr(self, name)!r}: write True or False.")
        for name in ("steps", "epochs", "keep_last"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TrainerError(f"Checkpoint: {name}={value!r} is not an integer.")
            if value is not None and value < 1:
                raise TrainerError(f"Checkpoint: {name}={value!r} is not positive. Write None to disable it.")

    def due_after_step(self, step: int) -> bool:
        """Whether to save after update `step`.

        Args:
            step: updates so far.

        Returns:
            Whether a save is due.
        """
        return self.steps is not None and step % self.steps == 0

    def due_after_epoch(self, epoch: int) -> bool:
        """Whether to save after epoch `epoch`.

        Args:
            epoch: completed epochs.

        Returns:
            Whether a save is due.
        """
        return self.epochs is not None and epoch % self.epochs == 0

    def better(self, value: float, than: float | None) -> bool:
        """Whether a metric has improved.

        Args:
            value: the metric now.
            than: the best so far; None if there is none.

        Returns:
            Whether `value` is better by `mode`; True if there is no best so far.
        """
        return than is None or (value < than if self.mode == "min" else value > than)

    def is_best(self, metrics: dict[str, float], state: RunState) -> bool:
        """Whether this step's weights are the best so far by validation; if so, `state.best` is updated.

        Args:
            metrics: the validation's metrics by name.
            state: the run's state, which holds the best so far.

        Returns:
            Whether it is; False without `best`.

        Raises:
            TrainerError: if validation did not report the metric `best`.
        """
        if self.best is None:
            return False
        if self.best not in metrics:
            raise TrainerError(
                f"Checkpoint(best={self.best!r}): validation reported no such metric, only {', '.join(metrics)}."
            )
        value, former = metrics[self.best], state.best
        if not self.better(value, former["value"] if former else None):
            return False
        state.best = {"step": state.step, "metric": self.best, "value": value}
        return True


class CheckpointFolder:
    """The checkpoints of one run: `step_N` each, and `best.json`, which names one of them."""

    def __init__(self, path: str) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, ascending."""
        if not is_folder(self.path):
            return []
        names = os.listdir(self.path)
        return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))

    def at(self, step: int) -> str:
        """The path of a step's checkpoint."""
        return os.path.join(self.path, f"step_{step}")

    def last(self) -> str | None:
        """The newest checkpoint's path, or None."""
        steps = self.steps()
        return self.at(steps[-1]) if steps else None

    def last_good(self) -> str:
        """A sentence that names the newest checkpoint, for error messages."""
        last = self.last()
        return f"The last good checkpoint is {last}." if last else "There is no checkpoint yet."

    def named(self, ckpt_path: str | os.PathLike[str] | EllipsisType | None) -> str | EllipsisType | None:
        """Resolve `ckpt_path` to a path; `...` means the folder's last checkpoint, if there is one."""
        if ckpt_path is None or isinstance(ckpt_path, EllipsisType) or ckpt_path == "last":
            return None if ckpt_path is None else ...
        path = os.fspath(ckpt_path)
        if path == "best":
            best = self.best()
            if best is None:
                raise TrainerError(
                    f'{self.path} has no best checkpoint: that takes Checkpoint(best="val_loss") during training. '
                    f"{self.last_good()}"
                )
            path = self.at(best["step"])
        if not exists(path):
            raise TrainerError(f"ckpt_path {path!r} does not exist. {self.last_good()}")
        return path

    def resume_state(
        self, named: str | EllipsisType | None, or_last: bool, from_elsewhere: bool
    ) -> dict[str, Any] | None:
        """Load the checkpoint to resume from: the named one if it is in this folder; if none is named, the last; or
        None.

        Args:
            or_last: whether the last checkpoint is resumed from.
            from_elsewhere: whether another run's checkpoint is.

        Raises:
            TrainerError: for a checkpoint from elsewhere, if this folder has one to resume from.
        """
        if named is None:
            return None
        last = self.last() if or_last else None
        if isinstance(named, EllipsisType):
            path = last
        elif self.holds(named):
            path = named
        elif last is not None:
            raise TrainerError(
                f"ckpt_path is {named!r}, but {self.path} has checkpoints of its own, the last of them {last}. "
                'To go on from that, write ckpt_path="last"; to start from the other, use another model_dir.'
            )
        else:
            path = named if from_elsewhere else None
        return None if path is None else fl.load(path)

    def holds(self, path: str) -> bool:
        """Whether `path` is one of this run's own checkpoints."""
        return os.path.realpath(os.path.dirname(path)) == os.path.realpath(self.path) and exists(path)

    def best(self) -> dict[str, Any] | None:
        """{"step", "metric", "value"} of the best, or None."""
        try:
            with open(os.path.join(self.path, "best.json"), encoding="utf-8") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def mark_best(self, best: dict[str, Any] | None) -> None:
        """Record which checkpoint is the best, as `best` returns it."""
        if best is None or best == self.best():
            return
        with atomic_write(os.path.join(self.path, "best.json"), "w") as file:
            json.dump(best, file)

    def archive_newer(self, step: int) -> None:
        """Move checkpoints after `step` to `aside_1`, `aside_2`, ...: a run from `step` must be the newest."""
        later = [os.path.basename(self.at(n)) for n in self.steps() if n > step]
        if not later:
            return
        best = self.best()
        if best is not None and best["step"] > step:
            later.append("best.json")
        number = 1
        while exists(os.path.join(self.path, f"aside_{number}")):
            number += 1
        aside = os.path.join(self.path, f"aside_{number}")
        os.makedirs(aside)
        for name in later:
            os.replace(os.path.join(self.path, name), os.path.join(aside, name))

    def clear(self, keep_last: int | None) -> None:
        """Delete all checkpoints but the newest `keep_last` and the best."""
        if keep_last is None:
            return
        best = self.best()
        for step in self.steps()[:-keep_last]:
            if best is None or step != best["step"]:
                checkpoint_files.remove(self.at(step))


# -- the contents of a checkpoint --


def collect(trainer: Trainer) -> dict[str, Any]:
    """Everything that a run needs to resume as if it had never stopped."""
    assert trainer.model is not None
    return {
        "model": trainer.model.state_dict(),
        "optimizer": trainer.optimizer.state_dict() if trainer.optimizer is not None else {},
        "schedulers": [scheduler.state_dict() for scheduler in trainer.schedulers],
        "precision": trainer.precision.state_dict(),
        "callbacks": trainer.callbacks.state_dict(),
        "batches": trainer.batches.state_dict() if trainer.batches is not None else {},
        "trainer": asdict(trainer.state),
        "random": random_state(),
        "backend": trainer.backend.state_dict(),
        "versions": {"firstloss": fl.__version__, "torch": str(torch.__version__)},
    }


def load_model(trainer: Trainer, state: dict[str, Any]) -> None:
    """Load the saved weights before the model goes to the backend, so that they need not be initialized first."""
    assert trainer.model is not None
    wrong = _differences(trainer.model, state["model"])
    if wrong:
        raise TrainerError(
            f"the checkpoints in {trainer.folder.path} are of another model than this "
            f"{type(trainer.model).__name__}: {wrong}. Use another model_dir, or fit(ckpt_path=None) to start afresh."
        )
    trainer.model.load_state_dict(state["model"])


def restore(trainer: Trainer, state: dict[str, Any]) -> None:
    """Load everything else that is in `state`, once the backend has the model. The random state comes last: nothing
    after it may draw."""
    assert trainer.optimizer is not None and trainer.batches is not None
    if "optimizer" in state:
        trainer.optimizer.load_state_dict(state["optimizer"])
    if fl.use_cs():  # loaded state belongs on the device, like the state that a step creates
        entries = trainer.optimizer.state.values()
        trainer.backend.move_to_device([x for entry in entries for x in entry.values() if isinstance(x, torch.Tensor)])
    schedulers = state.get("schedulers", [scheduler.state_dict() for scheduler in trainer.schedulers])
    if len(schedulers) != len(trainer.schedulers):
        raise TrainerError(
            f"the checkpoint has {len(schedulers)} schedulers, and the run {len(trainer.schedulers)}. Use "
            "the same schedulers, or pass the checkpoint as ckpt_path to a new run folder to load only its weights."
        )
    for scheduler, saved in zip(trainer.schedulers, schedulers, strict=True):
        scheduler.load_state_dict(saved)
    for key, part in (("precision", trainer.precision), ("callbacks", trainer.callbacks), ("batches", trainer.batches)):
        if key in state:
            part.load_state_dict(state[key])
    trainer.state = type(trainer.state)(**state.get("trainer", {}))
    best = trainer.state.best
    # The run may resume from an older checkpoint, and the best one be deleted since.
    if best is not None and not exists(trainer.folder.at(best["step"])):
        trainer.state.best = None
    if "backend" in state:
        trainer.backend.load_state_dict(state["backend"])
    if "random" in state:
        set_random_state(state["random"])


def matching(pattern: Any) -> list[Any]:
    """Expand a glob pattern in `ckpt_path` to the matching paths, in the order of their steps.

    Raises:
        TrainerError: if nothing matches.
    """
    if not isinstance(pattern, (str, os.PathLike)) or not any(sign in os.fspath(pattern) for sign in "*?["):
        return [pattern]
    paths = glob.glob(os.fspath(pattern))
    if not paths:
        raise TrainerError(f"no checkpoint matches {os.fspath(pattern)!r}.")
    return sorted(paths, key=lambda path: [int(n) for n in re.findall(r"\d+", os.path.basename(path))])


def load_weights(trainer: Trainer, path: str) -> Any:
    """Load only the weights at `path` into the model; return everything in the file."""
    model = trainer.model
    assert model is not None

    def preprocess(state: Any) -> None:
        trainer.callbacks("preprocess_checkpoint", trainer, state)

    weights, contents = checkpoint_files.load_weights(path, preprocess)
    wrong = _differences(model, weights)
    if wrong and (trainer.checkpoint.strict or "shape" in wrong):
        raise TrainerError(
            f"ckpt_path {path!r} does not fit this {type(model).__name__}: {wrong}. Pass weights of the same model"
            + (", or Checkpoint(strict=False) to load those whose names match." if "shape" not in wrong else ".")
        )
    model.load_state_dict(weights, strict=False)
    return contents


def _differences(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> str:
    """Describe how named weights differ from the model's; empty if they match."""
    wanted = model.state_dict()
    missing = [name for name in wanted if name not in weights and not _tied(wanted, name, weights)]
    unexpected = [name for name in weights if name not in wanted]
    shapes = [name for name in wanted if name in weights and wanted[name].shape != weights[name].shape]
    parts = (
        [f"{_some(shapes)} has shape {list(weights[shapes[0]].shape)}, not {list(wanted[shapes[0]].shape)}"]
        if shapes
        else []
    )
    parts += [f"{_some(missing)} is missing"] if missing else []
    parts += [f"{_some(unexpected)} is unexpected"] if unexpected else []
    return "; ".join(parts)


def _tied(wanted: Mapping[str, torch.Tensor], name: str, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether a missing weight is loaded under the name of one that it is tied to: files hold tied weights once."""
    return any(other in weights and _same(wanted[name], tensor) for other, tensor in wanted.items() if other != name)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    storages = getattr(a, "_storage", None), getattr(b, "_storage", None)  # deferred tensors have no memory to compare
    if storages[0] is not None or storages[1] is not None:
        return storages[0] is storages[1]
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_finite(trainer: Trainer) -> None:
    """Refuse to save weights that hold NaN.

    With several processes none can read all weights, so a traced function checks them where they are.
    """
    assert trainer.model is not None
    weights = {name: p for name, p in trainer.model.named_parameters() if p.is_floating_point()}
    if trainer.processes.count > 1:
        assert trainer.steps is not None
        bad = trainer.steps.nan_weights().tolist()
    else:
        bad = [bool(torch.isnan(p.detach()).any()) for p in weights.values()]
    for name, is_bad in zip(weights, bad, strict=True):
        if is_bad:
            raise NaNLossError(
                f"{name} holds NaN after step {trainer.state.step}, though the loss was finite: the update made it. "
                f"{trainer.folder.last_good()} Lower the learning rate, or clip gradients with "
                "TrainingLoop(clip_grad_norm=1.0)."
            )
