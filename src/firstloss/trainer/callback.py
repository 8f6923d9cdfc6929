"""Callbacks: user code that runs at the stages of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import Trainer


def _hook(method: Callable[..., None]) -> Any:
    """An override may take fewer arguments."""
    return method


class Callback:
    """The stages of a run. Override those you need; the others cost nothing.

    A *batch* is what the loader gives; a *step* is an update of the weights, `grad_accum_steps` batches long. Training
    runs ahead of the values: what a batch's `outputs` hold has been started, and reading it waits. `on_metrics` comes
    a little later, with plain numbers, and costs no waiting.

    A callback that has `state_dict` and `load_state_dict` is saved in checkpoints, under the name of its class.

    A hook is called with as many of the arguments below as it takes: `on_fit_start(self, trainer)` is one, and so is
    `on_fit_start(self, trainer, train_dataloader, val_dataloader, loop)`.

    Those from `on_before_forward` to `on_after_optimizer_zero_grad` run in the traced step: once, when it is traced,
    and what they compute with tensors is computed at every step. What they give to `trainer.log_metrics` is logged
    with the step.

    Examples:
        >>> from firstloss.trainer import Callback, Trainer, TrainingLoop
        >>> class Largest(Callback):
        ...     loss = 0.0
        ...     def on_metrics(self, trainer, metrics):
        ...         self.loss = max(self.loss, metrics.get("loss", 0.0))
        >>> class Model(nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x).square().mean()
        >>> trainer = Trainer(
        ...     device="CPU",
        ...     model=lambda: Model(8, 1),
        ...     optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        ...     loop=TrainingLoop(max_steps=2),
        ...     callbacks=[largest := Largest()],
        ...     loggers=[],
        ... )
        >>> trainer.fit([torch.ones(4, 8)] * 2)
        >>> largest.loss > 0
        True

    Args:
        trainer: the Trainer: its `state`, `model`, `optimizer` and settings.
        model: the Module.
        optimizer: the optimizer.
        scheduler: the schedule that steps, ours or PyTorch's.
        loop: the TrainingLoop.
        train_dataloader: what `fit` was given.
        val_dataloader: what `fit` was given, or None.
        batch: what the loader gave.
        batch_idx: which batch of the epoch it is, from 0.
        outputs: what the model returned: `{"loss": ...}` and whatever else it has.
        args, kwargs: what the model is called with.
        metrics: numbers by name; those of validation begin with "val_".
        values: numbers of one batch by name.
        step: how many updates there have been.
        loss: the first loss.
        seconds: since the process started.
        name: of a function of the Trainer's: "accumulate", "update" or "evaluate".
        path: of a checkpoint.
        state: what the checkpoint holds.
        error: why the run ends.
    """

    @_hook
    def setup(self, trainer: Trainer) -> None:
        """The Trainer has been made."""

    @_hook
    def on_fit_start(self, trainer: Trainer, train_dataloader: Any, val_dataloader: Any, loop: Any) -> None:
        """The model, the optimizer and the schedules are there, and a checkpoint has been loaded if there was one."""

    @_hook
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        """The last step, the last validation and the last checkpoint are done."""

    @_hook
    def on_train_start(self, trainer: Trainer, model: Any, train_dataloader: Any, loop: Any) -> None:
        """Training begins, or goes on after a validation; the model is in train mode."""

    @_hook
    def on_train_end(self, trainer: Trainer, model: Any, loop: Any) -> None:
        """Training ends, or stops for a validation."""

    @_hook
    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        """As `on_batch_start`; `batch_idx` counts batches of the epoch from 0."""

    @_hook
    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """As `on_batch_end`."""

    @_hook
    def on_before_forward(self, trainer: Trainer, model: Any, batch: Any, args: tuple, kwargs: dict) -> None:
        """In the step: the model is about to be called with `*args, **kwargs`; what is added to `kwargs` is given."""

    @_hook
    def on_after_forward(self, trainer: Trainer, model: Any, outputs: Any, batch: Any) -> None:
        """In the step: it has returned `outputs`."""

    @_hook
    def on_before_backward(self, trainer: Trainer, model: Any, outputs: Any) -> None:
        """In the step: the backward pass is next."""

    @_hook
    def on_after_backward(self, trainer: Trainer, model: Any, outputs: Any) -> None:
        """In the step: gradients are there; with a loss scale, scaled."""

    @_hook
    def on_before_optimizer_step(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        """In the step: gradients of all batches are there, and no longer scaled; the Trainer's own clipping is next."""

    @_hook
    def on_after_optimizer_step(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        """In the step: the weights are updated."""

    @_hook
    def on_before_scheduler_step(self, trainer: Trainer, model: Any, optimizer: Any, scheduler: Any) -> None:
        """A schedule is about to step: in the step if it is a function of a step tensor; PyTorch's, after it."""

    @_hook
    def on_after_scheduler_step(self, trainer: Trainer, model: Any, optimizer: Any, scheduler: Any) -> None:
        """It has stepped."""

    @_hook
    def on_before_optimizer_zero_grad(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        """In the step: gradients are about to be cleared."""

    @_hook
    def on_after_optimizer_zero_grad(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        """In the step: they are."""

    @_hook
    def on_values(self, trainer: Trainer, values: dict[str, float], step: int) -> None:
        """The numbers of a batch of step `step` have come, each of them, a little after it was started; those whose
        names begin with "_" are not logged."""

    @_hook
    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """The run ends by an error, Ctrl-C or SIGTERM."""

    @_hook
    def on_compile_start(self, trainer: Trainer, name: str) -> None:
        """Function `name` ("accumulate", "update", "evaluate") is about to be called for the first time."""

    @_hook
    def on_compile_end(self, trainer: Trainer, name: str) -> None:
        """It has been traced, compiled and started."""

    @_hook
    def on_first_loss(self, trainer: Trainer, loss: float, seconds: float) -> None:
        """The first loss has come, so many seconds after the process started."""

    @_hook
    def on_epoch_start(self, trainer: Trainer) -> None:
        """The loader is about to be iterated from its beginning."""

    @_hook
    def on_epoch_end(self, trainer: Trainer) -> None:
        """The loader has ended; `trainer.state.epoch` counts the epoch already."""

    @_hook
    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        """The loader gave `batch`."""

    @_hook
    def on_batch_end(self, trainer: Trainer, batch: Any, outputs: dict[str, Any]) -> None:
        """Its forward and backward pass are under way."""

    @_hook
    def on_step_start(self, trainer: Trainer) -> None:
        """The batch about to be run ends in an update of the weights."""

    @_hook
    def on_step_end(self, trainer: Trainer) -> None:
        """The update is under way; `trainer.state.step` counts it already."""

    @_hook
    def on_metrics(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        """Every `Logging.log_steps` steps, and after each validation: numbers, as the loggers get them."""

    @_hook
    def on_validation_start(self, trainer: Trainer) -> None:
        """Validation begins; the model is in eval mode."""

    @_hook
    def on_validation_batch_start(self, trainer: Trainer, batch: Any) -> None:
        """The validation loader gave `batch`."""

    @_hook
    def on_validation_batch_end(self, trainer: Trainer, batch: Any, outputs: dict[str, Any]) -> None:
        """A validation batch is under way."""

    @_hook
    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Validation is done."""

    @_hook
    def on_save_start(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """A checkpoint is about to be written; what is added to `state` is written too."""

    @_hook
    def on_save_end(self, trainer: Trainer, path: str) -> None:
        """It is whole on the disk."""

    @_hook
    def on_load_end(self, trainer: Trainer, path: str, state: dict[str, Any]) -> None:
        """A checkpoint has been loaded."""


class Callbacks:
    """Calls the callbacks that override a hook, in the order given, each with as many arguments as it takes."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.all = list(callbacks)
        hooks = [name for name in vars(Callback) if name.startswith("on_") or name == "setup"]
        for callback in self.all:
            _check(callback, hooks)
        self._overriding = {
            name: [
                (getattr(c, name), _count(getattr(c, name)))
                for c in self.all
                if getattr(type(c), name, None) is not getattr(Callback, name)
            ]
            for name in hooks
        }

    def __call__(self, hook: str, *args: Any) -> None:
        for method, count in self._overriding[hook]:
            method(*args[:count])

    def overridden(self, hook: str) -> bool:
        """Whether a callback has this hook."""
        return bool(self._overriding[hook])

    def state_dict(self) -> dict[str, Any]:
        """The state of the callbacks that have some."""
        return {name: c.state_dict() for name, c in self._named() if hasattr(c, "state_dict")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give it back to those that are still there."""
        for name, callback in self._named():
            if name in state and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state[name])

    def load_with_weights(self, found: Any) -> None:
        """Weights have been loaded from `found`: callbacks with weights of their own (`weights_of_its_own`) get theirs,
        if they are there."""
        state = found.get("callbacks") if isinstance(found, Mapping) else None
        for name, callback in self._named():
            if getattr(callback, "weights_of_its_own", False):
                callback.load_state_dict(state[name] if isinstance(state, Mapping) and name in state else {})

    def _named(self) -> Iterable[tuple[str, Any]]:
        counts: dict[str, int] = {}
        for callback in self.all:
            name = type(callback).__name__
            counts[name] = counts.get(name, 0) + 1
            yield (name if counts[name] == 1 else f"{name}_{counts[name]}"), callback


def _count(method: Any) -> int | None:
    """How many arguments a hook takes; None: any number."""
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return sum(
        p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters
    )


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
