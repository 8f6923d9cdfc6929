"""The Callback base class, and the list of callbacks that the Trainer calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import Trainer


def _hook(method: Callable[..., None]) -> Any:
    """Let type checkers accept overrides with fewer parameters."""
    return method


class Callback:
    """Base class of callbacks. Override the hooks that you need; the others cost nothing.

    A *batch* is what the loader yields; a *step* is one update of the weights, made from `grad_accum_steps` batches.
    Training runs asynchronously: the values in a batch's `outputs` may still be being computed, and reading one waits
    for it. `on_metrics` is called a little later with plain numbers, without waiting.

    A callback that has `state_dict` and `load_state_dict` is saved in checkpoints, under its class name.

    A hook is called with as many of its arguments as the override takes: both `on_fit_start(self, trainer)` and
    `on_fit_start(self, trainer, train_dataloader, val_dataloader, loop)` are valid.

    The hooks from `on_before_forward` to `on_after_optimizer_zero_grad` run inside the traced step: their Python runs
    once, when the step is traced, and the tensor operations in them run at every step. Tensors passed to
    `trainer.log_metrics` there are logged with the step.

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
        trainer: the Trainer, with its `state`, `model`, `optimizer` and settings.
        model: the Module.
        optimizer: the optimizer.
        scheduler: the learning rate scheduler about to step, Firstloss's or PyTorch's.
        loop: the TrainingLoop.
        train_dataloader: the training loader passed to `fit`.
        val_dataloader: the validation loader passed to `fit`, or None.
        batch: the batch from the loader.
        batch_idx: the batch's index in the epoch, from 0.
        outputs: what the model returned: `{"loss": ...}` and any other entries.
        args, kwargs: the arguments that the model is called with.
        metrics: numbers by name; names of validation metrics begin with "val_".
        values: numbers of one batch by name.
        step: the number of updates so far.
        loss: the first loss.
        seconds: since the process started.
        name: of one of the Trainer's traced functions: "accumulate", "update" or "evaluate".
        path: the checkpoint's path.
        state: the checkpoint's contents.
        loop_idx: how many validations this call of `fit` has had before.
        is_last: whether training has ended.
        error: the exception that ends the run.
    """

    @_hook
    def pre_setup(self, trainer: Trainer) -> None:
        """The Trainer has been constructed; before any `setup`."""

    @_hook
    def setup(self, trainer: Trainer) -> None:
        """The Trainer has been constructed."""

    @_hook
    def post_setup(self, trainer: Trainer) -> None:
        """Every callback's `setup` has been called."""

    @_hook
    def finalize(self) -> None:
        """The Trainer has been freed, or the process ends."""

    @_hook
    def on_fit_start(self, trainer: Trainer, train_dataloader: Any, val_dataloader: Any, loop: Any) -> None:
        """The model, optimizer and schedulers exist, and the checkpoint to resume from, if any, has been loaded."""

    @_hook
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        """The last step, validation and checkpoint are done."""

    @_hook
    def on_train_start(self, trainer: Trainer, model: Any, train_dataloader: Any, loop: Any) -> None:
        """Training begins, or continues after a validation; the model is in train mode."""

    @_hook
    def on_train_end(self, trainer: Trainer, model: Any, loop: Any) -> None:
        """Training ends, or pauses for a validation."""

    @_hook
    def on_train_batch_start(self, trainer: Trainer, model: Any, batch: Any, batch_idx: int) -> None:
        """Like `on_batch_start`, with the model and the batch's index."""

    @_hook
    def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Like `on_batch_end`, with the model and the batch's index."""

    @_hook
    def on_before_forward(
        self, trainer: Trainer, model: Any, batch: Any, args: tuple[Any, ...], kwargs: dict[Any, Any]
    ) -> None:
        """In the step: before the model is called with `*args, **kwargs`; entries added to `kwargs` are passed on."""

    @_hook
    def on_after_forward(self, trainer: Trainer, model: Any, outputs: Any, batch: Any) -> None:
        """In the step: the model has returned `outputs`."""

    @_hook
    def on_before_backward(self, trainer: Trainer, model: Any, outputs: Any) -> None:
        """In the step: before the backward pass."""

    @_hook
    def on_after_backward(self, trainer: Trainer, model: Any, outputs: Any) -> None:
        """In the step: gradients have been computed; with loss scaling they are still scaled."""

    @_hook
    def on_before_optimizer_step(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        """In the step: gradients have been accumulated and unscaled; the Trainer's own clipping comes next."""

    @_hook
    def on_after_optimizer_step(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        """In the step: the weights have been updated."""

    @_hook
    def on_before_scheduler_step(self, trainer: Trainer, model: Any, optimizer: Any, scheduler: Any) -> None:
        """Before a scheduler steps: inside the step for Firstloss's schedulers, after the step for PyTorch's."""

    @_hook
    def on_after_scheduler_step(self, trainer: Trainer, model: Any, optimizer: Any, scheduler: Any) -> None:
        """The scheduler has stepped."""

    @_hook
    def on_before_optimizer_zero_grad(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        """In the step: before gradients are cleared."""

    @_hook
    def on_after_optimizer_zero_grad(self, trainer: Trainer, model: Any, optimizer: Any) -> None:
        """In the step: gradients have been cleared."""

    @_hook
    def on_values(self, trainer: Trainer, values: dict[str, float], step: int) -> None:
        """All values of a batch of step `step` are available. Values whose names begin with "_" are not logged."""

    @_hook
    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """The run is ending by an exception, Ctrl-C or SIGTERM."""

    @_hook
    def on_compile_start(self, trainer: Trainer, name: str) -> None:
        """Before the traced function `name` ("accumulate", "update" or "evaluate") is called for the first time."""

    @_hook
    def on_compile_end(self, trainer: Trainer, name: str) -> None:
        """The function has been traced and compiled, and its first call has started."""

    @_hook
    def on_first_loss(self, trainer: Trainer, loss: float, seconds: float) -> None:
        """The first loss is available, `seconds` after the process started."""

    @_hook
    def on_epoch_start(self, trainer: Trainer) -> None:
        """Before the loader is iterated from its beginning."""

    @_hook
    def on_epoch_end(self, trainer: Trainer) -> None:
        """The loader is exhausted; `trainer.state.epoch` already counts this epoch."""

    @_hook
    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        """The loader has yielded `batch`."""

    @_hook
    def on_batch_end(self, trainer: Trainer, batch: Any, outputs: dict[str, Any]) -> None:
        """The batch's forward and backward pass have been started."""

    @_hook
    def on_step_start(self, trainer: Trainer) -> None:
        """Before the batch that ends in an update of the weights."""

    @_hook
    def on_step_end(self, trainer: Trainer) -> None:
        """The update has been started; `trainer.state.step` already counts it."""

    @_hook
    def on_metrics(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        """Numbers for the loggers: every `Logging.log_steps` steps, and after each validation."""

    @_hook
    def on_validation_start(self, trainer: Trainer) -> None:
        """Validation begins; the model is in eval mode."""

    @_hook
    def on_validation_batch_start(self, trainer: Trainer, batch: Any) -> None:
        """The validation loader has yielded `batch`."""

    @_hook
    def on_validation_batch_end(self, trainer: Trainer, batch: Any, outputs: dict[str, Any]) -> None:
        """The validation batch has been started."""

    @_hook
    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Validation is done."""

    @_hook
    def run_validation(self, trainer: Trainer, loop_idx: int, is_last: bool) -> None:
        """Validation of one's own: in `fit`, whenever validation is due, after that on `val_dataloader`, if any."""

    @_hook
    def on_save_start(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Before a checkpoint is written; entries added to `state` are saved with it."""

    @_hook
    def postprocess_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """After all `on_save_start`: `state` is what will be written."""

    @_hook
    def on_save_end(self, trainer: Trainer, path: str) -> None:
        """The checkpoint has been written completely."""

    @_hook
    def preprocess_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Before a checkpoint, or a file of weights by name, is loaded: changes of `state` are loaded."""

    @_hook
    def on_load_end(self, trainer: Trainer, path: str, state: dict[str, Any]) -> None:
        """A checkpoint has been loaded."""


class Callbacks:
    """Calls each hook of the callbacks that override it, in order, with as many arguments as the override takes."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self.all: list[Callback] = list(callbacks)
        hooks = [name for name in vars(Callback) if not name.startswith("_")]
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
        """Whether any callback overrides this hook."""
        return bool(self._overriding[hook])

    def state_dict(self) -> dict[str, Any]:
        """The states of the callbacks that have one, by name."""
        return {name: c.state_dict() for name, c in self._named() if hasattr(c, "state_dict")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of the callbacks that are still present."""
        for name, callback in self._named():
            if name in state and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state[name])

    def load_with_weights(self, checkpoint: Any) -> None:
        """Restore callbacks that hold weights (`weights_of_its_own`) after weights were loaded from the file `found`.

        Those that the file has no state for are reset.
        """
        state = checkpoint.get("callbacks") if isinstance(checkpoint, Mapping) else None
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
    """How many positional arguments a hook takes; None: any number."""
    parameters = inspect.signature(method).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return sum(
        p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters
    )


def _check(callback: Any, hooks: list[str]) -> None:
    """Reject what is not a Callback, and misspelt hooks, which would never be called."""
    import difflib

    from ..errors import TrainerError

    if isinstance(callback, type) and issubclass(callback, Callback):
        raise TrainerError(f"callbacks and loggers take instances, not classes. Write {callback.__name__}().")
    if not isinstance(callback, Callback):
        raise TrainerError(
            f"callbacks and loggers must be instances of firstloss.trainer.Callback, not {type(callback).__name__}. "
            "Derive your class from it."
        )
    for name in dir(type(callback)):
        if name.startswith("on_") and name not in hooks:
            near = difflib.get_close_matches(name, hooks, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "Rename it so that it does not begin with on_."
            raise TrainerError(f"{type(callback).__name__}.{name} is not a hook and would never be called. {hint}")
