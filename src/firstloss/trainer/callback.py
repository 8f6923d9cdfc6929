"""Callbacks: code of the user's that runs at the stages of a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import Trainer


class Callback:
    """The stages of a run. Override those you need; the others cost nothing.

    A *batch* is what the loader gives; a *step* is an update of the weights, `grad_accum_steps` batches long. Training
    runs ahead of the values: what a batch's `outputs` hold has been started, and reading it waits. `on_metrics` comes
    a little later, with plain numbers, and costs no waiting.

    A callback that has `state_dict` and `load_state_dict` is saved in checkpoints, under the name of its class.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """The model, the optimizer and the schedules are there, and a checkpoint has been loaded if there was one."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """The last step, the last validation and the last checkpoint are done."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """The run ends by an error, Ctrl-C or SIGTERM."""

    def on_compile_start(self, trainer: Trainer, name: str) -> None:
        """Function `name` ("accumulate", "update", "evaluate") is about to be called for the first time."""

    def on_compile_end(self, trainer: Trainer, name: str) -> None:
        """It has been traced, compiled and started."""

    def on_first_loss(self, trainer: Trainer, loss: float, seconds: float) -> None:
        """The first loss has come, so many seconds after the process started."""

    def on_epoch_start(self, trainer: Trainer) -> None:
        """The loader is about to be iterated from its beginning."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """The loader has ended; `trainer.state.epoch` counts the epoch already."""

    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        """The loader gave `batch`."""

    def on_batch_end(self, trainer: Trainer, batch: Any, outputs: dict[str, Any]) -> None:
        """Its forward and backward pass are under way."""

    def on_step_start(self, trainer: Trainer) -> None:
        """The batch about to be run ends in an update of the weights."""

    def on_step_end(self, trainer: Trainer) -> None:
        """The update is under way; `trainer.state.step` counts it already."""

    def on_metrics(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        """Every `Logging.log_steps` steps, and after each validation: numbers, as the loggers get them."""

    def on_validation_start(self, trainer: Trainer) -> None:
        """Validation begins; the model is in eval mode."""

    def on_validation_batch_start(self, trainer: Trainer, batch: Any) -> None:
        """The validation loader gave `batch`."""

    def on_validation_batch_end(self, trainer: Trainer, batch: Any, outputs: dict[str, Any]) -> None:
        """A validation batch is under way."""

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Validation is done."""

    def on_save_start(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """A checkpoint is about to be written; what is added to `state` is written too."""

    def on_save_end(self, trainer: Trainer, path: str) -> None:
        """It is whole on the disk."""

    def on_load_end(self, trainer: Trainer, path: str, state: dict[str, Any]) -> None:
        """A checkpoint has been loaded."""


class Callbacks:
    """Calls the callbacks that override a hook, in the order given."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.all = list(callbacks)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for callback in self.all:
            _check(callback, hooks)
        self._overriding = {
            name: [getattr(c, name) for c in self.all if getattr(type(c), name, None) is not getattr(Callback, name)]
            for name in hooks
        }

    def __call__(self, hook: str, *args: Any) -> None:
        for method in self._overriding[hook]:
            method(*args)

    def state_dict(self) -> dict[str, Any]:
        """The state of the callbacks that have some."""
        return {name: c.state_dict() for name, c in self._named() if hasattr(c, "state_dict")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give it back to those that are still there."""
        for name, callback in self._named():
            if name in state and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state[name])

    def _named(self) -> Iterable[tuple[str, Any]]:
        counts: dict[str, int] = {}
        for callback in self.all:
            name = type(callback).__name__
            counts[name] = counts.get(name, 0) + 1
            yield (name if counts[name] == 1 else f"{name}_{counts[name]}"), callback


def _check(callback: Any, hooks: list[str]) -> None:
    """A misspelt hook would never be called, and nobody would know."""
    import difflib

    from ..errors import TrainerError

    if isinstance(callback, type) and issubclass(callback, Callback):
        raise TrainerError(f"callbacks and loggers take objects, not classes. Write {callback.__name__}().")
    if not isinstance(callback, Callback):
        raise TrainerError(
            f"callbacks and loggers take objects of class firstloss.trainer.Callback, not {type(callback).__name__}. "
            "Derive your class from it."
        )
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in hooks:
            near = difflib.get_close_matches(name, hooks, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Give it another name, without on_ in front."
            raise TrainerError(f"{type(callback).__name__}.{name} is no hook, and would never be called. {hint}")
