"""The Trainer, which runs training and validation from top to bottom."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from types import EllipsisType
from typing import Any

import torch

import firstloss as fl

from ..errors import TrainerError
from ..runtime.mesh.processes import Processes, processes
from . import checkpoint as checkpoints
from . import construct
from .batches import Batches, check_loader, several
from .callback import Callback, Callbacks
from .callbacks.states import LoadCheckpointStates
from .checkpoint import Checkpoint, CheckpointFolder
from .interrupts import Interrupted, Interrupts
from .loggers import default_loggers
from .logging import Logging
from .loops import TrainingLoop, ValidationLoop
from .pending_losses import Started
from .precision import Precision
from .randomness import seed_everything
from .reporting import Reporter
from .run_folder import RunFolder
from .run_state import RunState
from .step import Steps
from .validation import run_validation

Path = str | os.PathLike[str]


class Trainer:
    """Trains a model, with initialization, tracing and compilation overlapped.

    Pass callables for model, optimizer and schedulers: the weights, bit-identical to eager PyTorch's from the same
    seed, are then materialized while the step is traced and compiled. Objects are used as they are.

    A batch is passed to the model's `forward` as its signature allows: a dict by names, a tuple or list as separate
    arguments, anything else as one argument. The output must be or hold the loss: `.loss`, ["loss"], the first element
    or the only scalar. Other named scalar outputs are logged, and averaged by validation.

    Examples:
        >>> from firstloss.trainer import Trainer, TrainingLoop
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(8, 1)
        ...     def forward(self, x):
        ...         return self.layer(x).square().mean()
        >>> trainer = Trainer(
        ...     model=Model,  # not Model(), so that the constructor is captured
        ...     optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        ...     loop=TrainingLoop(max_steps=3),
        ...     loggers=[],
        ...     seed=0,
        ... )
        >>> trainer.fit([torch.ones(4, 8)] * 3)
        >>> trainer.state.step
        3

    Args:
        device: "XLA" (the default), "CPU" or "GPU".
        backend: a backend or its name, instead of `device`.
        model_dir: the run folder, for checkpoints, logs, versions and the timeline. Its folder "artifacts" holds files
            that callbacks write, and those of a backend that the Trainer creates. A run resumes from the checkpoints in
            its folder.
        model: an `nn.Module`, or a callable `() -> Module`.
        optimizer: an optimizer, or `Module -> Optimizer`. Optional for `validate`.
        schedulers: a list of schedulers, or `Optimizer -> Scheduler`. They step once per update.
        precision: default float32.
        loop: how long to train; or a `ValidationLoop`, for `validate` only.
        checkpoint: when to save and what to keep.
        logging: how often to log.
        callbacks: your code that runs at the stages of the run.
        loggers: by default a progress display and JSON lines.
        seed: seed of torch, numpy and Python, set before the model is made.

    Raises:
        TrainerError: for arguments that do not fit together, such as an optimizer object with a model callable.
    """

    def __init__(
        self,
        device: str | None = None,
        backend: Any = None,
        model_dir: Path = "./model_dir",
        model: construct.Model | None = None,
        optimizer: construct.Optimizer | None = None,
        schedulers: construct.Schedulers | None = None,
        precision: Precision | None = None,
        loop: TrainingLoop | ValidationLoop | None = None,
        checkpoint: Checkpoint | None = None,
        logging: Logging | None = None,
        callbacks: Sequence[Callback] | None = None,
        loggers: Sequence[Callback] | None = None,
        seed: int | None = None,
    ) -> None:
        construct.check_mix(model, optimizer, schedulers)
        construct.check_settings(loop, checkpoint, logging, callbacks, loggers)
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise TrainerError(f"seed={seed!r} is not an integer.")
        self.given: tuple[Any, Any, Any] = (model, optimizer, schedulers)
        self.model_dir: str = os.fspath(model_dir)
        self.loop: TrainingLoop | None = loop if isinstance(loop, TrainingLoop) else None
        self.validation: ValidationLoop = (
            loop.validation_loop() if isinstance(loop, TrainingLoop) else loop or ValidationLoop()
        )
        self.precision: Precision = construct.make_precision(precision)
        self.checkpoint: Checkpoint = checkpoint or Checkpoint()
        self.logging: Logging = logging or Logging()
        self.seed = seed
        self.artifact_dir: str = os.path.join(self.model_dir, "artifacts")
        self.backend: Any = construct.make_backend(backend, device, self.artifact_dir)
        self.processes: Processes = processes(self.backend)
        writers = [*(default_loggers() if loggers is None else loggers), RunFolder()]
        self.callbacks: Callbacks = Callbacks([*(callbacks or []), *(writers if self.processes.index == 0 else [])])
        self.folder: CheckpointFolder = CheckpointFolder(os.path.join(self.model_dir, "checkpoints"))
        self.state: RunState = RunState()
        self.model: torch.nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedulers: list[Any] = []
        self.batches: Batches | None = None
        self.val_dataloader: Iterable[Any] | None = None
        self.steps: Steps | None = None
        self._interrupts = Interrupts("", self.processes, lambda: self.state.step)
        self._reporter = Reporter(self)
        self._validations = 0  # in this call of `fit`
        self._saved = -1  # the step of the last checkpoint written
        for hook in ("pre_setup", "setup", "post_setup"):
            self.callbacks(hook, self)
        if self.callbacks.overridden("finalize"):
            weakref.finalize(self, self.callbacks, "finalize")

    @property
    def global_step(self) -> int:
        """Updates of the weights so far: `state.step`."""
        return self.state.step

    @property
    def is_log_step(self) -> bool:
        """Whether the numbers of the step being started, or else of the last one, go to the loggers."""
        return self._reporter.logs_now

    def get_callbacks(self, callback_type: type) -> Iterator[Any]:
        """The callbacks and loggers that are instances of a class.

        Args:
            callback_type: the class.

        Returns:
            An iterator, in the order in which they were passed.
        """
        return (callback for callback in self.callbacks.all if isinstance(callback, callback_type))

    def get_callback(self, callback_type: type) -> Any:
        """The first callback or logger that is an instance of a class.

        Args:
            callback_type: the class.

        Returns:
            The callback; None if there is none.
        """
        return next(self.get_callbacks(callback_type), None)

    # -- public methods --

    def fit(
        self,
        train_dataloader: Iterable[Any],
        val_dataloader: Iterable[Any] | None = None,
        ckpt_path: Path | EllipsisType | None = ...,
    ) -> None:
        """Train until the end of the loop, an early stop, a NaN loss or Ctrl-C; save at the end.

        Args:
            train_dataloader: an iterable that can be iterated repeatedly, once per epoch.
            val_dataloader: the data to validate on, at the times set by the loop and at the end; with a list of
                DataLoaders the metrics' names end in "_0", "_1" and so on.
            ckpt_path: what to load. By default, or "last": resume from the run folder's last checkpoint, if there is
                one. "best" or a checkpoint in the run folder: resume from it. Weights from elsewhere (another run's
                checkpoint, a safetensors file, a Hugging Face folder): start from them, in a run folder without
                checkpoints. None: load nothing. Checkpoints after the step at which the run starts are moved aside.

        Raises:
            NaNLossError: naming the step, the batch and the last good checkpoint.
            TrainerError: without an optimizer or a loop, for an invalid loader or setting, or for weights from
                elsewhere in a run folder with checkpoints.
        """
        if self.loop is None or self.given[1] is None:
            missing = "an optimizer" if self.given[1] is None else "loop=TrainingLoop(max_steps=...)"
            raise TrainerError(f"fit needs {missing}, which the Trainer was not given.")
        check_loader("train_dataloader", train_dataloader)
        for loader in several(val_dataloader):
            check_loader("val_dataloader", loader)
        own = self.callbacks.overridden("run_validation")
        construct.check_validated(self.loop, self.checkpoint, val_dataloader, own)
        again = self.batches is not None
        self.batches = Batches(train_dataloader, epoch=self.state.epoch)
        self.val_dataloader = val_dataloader
        self._validations = 0
        with self._running("saving after this step"):
            weights = self.folder.named(ckpt_path)
            last = self.checkpoint.autoload_last and not again
            everything = self.get_callback(LoadCheckpointStates) is not None
            self._start(self.folder.resume_state(weights, last, everything), weights)
            if self.processes.index == 0:
                self.folder.archive_newer(self.state.step)
            self.processes.wait("begin")
            self.loop.begin(self.state.step, train_dataloader)
            self.callbacks("on_fit_start", self, train_dataloader, val_dataloader, self.loop)
            began = self.state.step
            if self.checkpoint.save_initial_checkpoint and not began and self.backend.is_e2e_execution:
                self.save()
            try:
                self._train(self.loop)
                if self.state.step > began and self.backend.is_e2e_execution:
                    self._after(validate=self.loop.validates_at_end, save=True)
            except Interrupted:
                self.save()
                raise
            self.callbacks("on_fit_end", self, self.loop)

    def validate(
        self,
        val_dataloader: Iterable[Any],
        ckpt_path: Path | EllipsisType | None = ...,
        loop: ValidationLoop | None = None,
    ) -> dict[str, float]:
        """Validate once.

        Args:
            val_dataloader: the data to validate on; with a list of DataLoaders the metrics' names end in "_0" and so
                on.
            ckpt_path: the weights to validate: a path, or the run folder's "last" or "best" checkpoint. By default
                those in memory, if this Trainer has made or loaded any; else the run folder's last checkpoint. None:
                those in memory, trained or not.
            loop: how to validate; by default as set by the Trainer's loop.

        Returns:
            The metrics by name; the names begin with "val_".

        Raises:
            TrainerError: if there are no weights yet: the model is a callable and the folder has no checkpoint.
        """
        for loader in several(val_dataloader):
            check_loader("val_dataloader", loader, once=True)
        if loop is not None and not isinstance(loop, ValidationLoop):
            raise TrainerError(f"validate takes a ValidationLoop, not an object of type {type(loop).__name__}.")
        with self._running("ending after this batch"):
            last = ckpt_path == "last" or (isinstance(ckpt_path, EllipsisType) and self.model is None)
            path = self.folder.named(ckpt_path)
            if last:
                path = self.folder.last()
                if path is None and (ckpt_path == "last" or not isinstance(self.given[0], torch.nn.Module)):
                    raise TrainerError(
                        f"there are no weights to validate: {self.folder.path} has no checkpoint. Train first, pass "
                        "weights as ckpt_path, or write ckpt_path=None for the model's initial weights."
                    )
            self._start(None, path)
            return self._validate(val_dataloader, loop or self.validation)
        return {}

    def validate_all(
        self,
        val_dataloaders: Any,
        ckpt_paths: Any = ...,
        loop: ValidationLoop | None = None,
    ) -> dict[str | None, dict[str, float]]:
        """Validate several checkpoints, each on all loaders.

        Args:
            val_dataloaders: one loader or a list of them.
            ckpt_paths: one or a list of what `validate` takes; patterns with `*`, `?` and `[` stand for all matching
                checkpoints, in the order of their steps. Default as for `validate`.
            loop: how to validate; by default as set by the Trainer's loop.

        Returns:
            What `validate` returns, by checkpoint path; None is the key of the weights in memory.

        Raises:
            TrainerError: if a pattern matches no checkpoint.
        """
        given = ckpt_paths if isinstance(ckpt_paths, (list, tuple)) else [ckpt_paths]
        paths = [path for one in given for path in checkpoints.matching(one)]
        return {
            None if path is None or isinstance(path, EllipsisType) else os.fspath(path): self.validate(
                val_dataloaders, path, loop
            )
            for path in paths
        }

    def save_checkpoint(self) -> str:
        """Save a checkpoint: another name of `save`.

        Returns:
            The checkpoint's path.
        """
        return self.save()

    def load_checkpoint(self, ckpt_path: Path) -> None:
        """Load the weights of a checkpoint, or of another file or folder of weights, into the model.

        Args:
            ckpt_path: a path, or "last" or "best" of the run folder.
        """
        with self._running("ending after the weights are loaded"):
            self._start(None, self.folder.named(ckpt_path))

    def save(self) -> str:
        """Save a checkpoint of the current step.

        Returns:
            The checkpoint's path.
        """
        path = self.folder.at(self.state.step)
        self._reporter.wait()
        checkpoints.check_finite(self)
        state = checkpoints.collect(self)
        self.callbacks("on_save_start", self, state)
        self.callbacks("postprocess_checkpoint", self, state)
        checkpoints.checkpoint_files.save(state, path)
        self._saved = self.state.step
        self.callbacks("on_save_end", self, path)
        if self.processes.index == 0:
            self.folder.mark_best(self.state.best)
            self.folder.clear(self.checkpoint.keep_last)
        return path

    def stop(self, reason: str = "stop was called") -> None:
        """End training after this step: validate, save, and return from `fit`.

        Args:
            reason: for the log.
        """
        self.state.stopped = reason

    def log(self, **metrics: float) -> None:
        """Pass numbers to the loggers, for the last step.

        Args:
            **metrics: numbers by name.
        """
        self.callbacks("on_metrics", self, metrics, self.state.step)

    def log_metrics(self, **metrics: Any) -> None:
        """Log numbers with the current step.

        In hooks that run inside the step, where they may be tensors, and in `on_step_start` they are logged together
        with the step's own numbers, if the step is logged. Elsewhere they are logged at once.

        Args:
            **metrics: numbers, or tensors with one element, by name.

        Raises:
            TrainerError: for a tensor with more elements.
        """
        self._reporter.log(metrics)

    # -- before training --

    def _start(self, saved: dict[str, Any] | None, weights: Path | EllipsisType | None) -> None:
        """Make what was passed as callables, load weights, and compile the model with the backend; later only load."""
        model, optimizer, schedulers = self.given
        fresh = self.model is None
        if self.model is None:
            if self.seed is not None:
                seed_everything(self.seed)
            assert model is not None
            self.model = construct.make_model(model, self.backend)
            if optimizer is not None:
                self.optimizer = construct.make_optimizer(optimizer, self.model)
                self.schedulers = construct.make_schedulers(schedulers, self.optimizer)
            self.precision.setup()
        if saved is not None:  # before compile: loaded weights need not be initialized
            self.callbacks("preprocess_checkpoint", self, saved)
            checkpoints.load_model(self, saved)
        elif weights is not None and not isinstance(weights, EllipsisType):
            contents = checkpoints.load_weights(self, os.fspath(weights))
            self.callbacks.load_with_weights(contents)
        if fresh:
            compiled = fl.compile(self.model, self.backend)
            schedules = [s for s in self.schedulers if construct.is_traced(s)]
            hooks = self.callbacks, self.callbacks.overridden
            self.steps = Steps(compiled, self.optimizer, schedules, self.loop, self.precision, *hooks, self)
        if saved is not None:
            checkpoints.restore(self, saved)
            self.callbacks("on_load_end", self, self.folder.at(self.state.step), saved)

    @contextmanager
    def _running(self, promise: str) -> Iterator[None]:
        """Context of a run: sets the current backend, reports errors to callbacks, and defers signals.

        `promise` says what is done before a signal takes effect.
        """
        os.makedirs(self.model_dir, exist_ok=True)
        fl.backend(self.backend)
        self.precision.choose()
        self._reporter.begin()
        self._interrupts = Interrupts(promise, self.processes, lambda: self.state.step)
        logging.getLogger("firstloss").setLevel(self.logging.log_level.upper())
        with suppress(Interrupted), self._interrupts:
            try:
                yield
            except BaseException as error:
                self.callbacks("on_exception", self, error)
                raise
        self._interrupts.obey()

    # -- training --

    def _train(self, loop: TrainingLoop) -> None:
        """Train until the loop ends."""
        assert self.model is not None and self.batches is not None
        self.model.train()
        self.callbacks("on_train_start", self, self.model, self.batches.loader, loop)
        try:
            self._train_steps(loop)
        finally:
            self.callbacks("on_train_end", self, self.model, loop)

    def _train_steps(self, loop: TrainingLoop) -> None:
        assert self.batches is not None
        self.state.stopped = ""
        if self.state.step and self._validation_due(loop):
            self._after(validate=True, save=False)  # the run was ended before its validation
        while not self._done(loop):
            if self.batches.index == 0:
                self.callbacks("on_epoch_start", self)
            with closing(self._interrupts.unless_received(self.batches.rest_of_epoch(loop.grad_accum_steps))) as groups:
                for group in groups:
                    self._step(group)
                    due = self.checkpoint.due_after_step(self.state.step)
                    self._after(loop.validates_after_step(self.state.step), save=due)
                    if self._done(loop):
                        return
            self.state.epoch = self.batches.epoch
            self.callbacks("on_epoch_end", self)
            due = self.checkpoint.due_after_epoch(self.state.epoch)
            self._after(loop.validates_after_epoch(self.state.epoch), save=due)

    def _step(self, group: list[Any]) -> None:
        """Run one update of the weights, from one batch or several."""
        assert self.batches is not None and self.optimizer is not None and self.steps is not None
        for number, batch in enumerate(group, start=1):
            last = number == len(group)
            index = self.batches.index - len(group) + number
            self.callbacks("on_batch_start", self, batch)
            self.callbacks("on_train_batch_start", self, self.model, batch, index - 1)
            numbers: dict[str, float] = {}
            if last:
                with self._reporter.starting(numbers):
                    self.callbacks("on_step_start", self)
            name = "update" if last else "accumulate"
            timed = name in self.steps.compiled
            outputs = self.steps.run(name, batch)
            self.callbacks("on_batch_end", self, batch, outputs)
            self.callbacks("on_train_batch_end", self, self.model, outputs, batch, index - 1)
            started = Started(self.state.step + 1, self.batches.epoch, index, batch, outputs, last, numbers, timed)
            if last:
                self.state.step += 1
                for scheduler in self.schedulers:
                    if not construct.is_traced(scheduler):
                        around = (self, self.model, self.optimizer, scheduler)
                        self.callbacks("on_before_scheduler_step", *around)
                        scheduler.step()
                        self.callbacks("on_after_scheduler_step", *around)
                self.callbacks("on_step_end", self)
            if self.backend.is_e2e_execution:
                self._reporter.add(started)

    def _after(self, validate: bool, save: bool) -> None:
        """Validate, check for signals and save, as due between two steps."""
        own = self.callbacks.overridden("run_validation")
        if validate and (self.val_dataloader is not None or own) and self.state.validated != self.state.step:
            if self.val_dataloader is not None:
                metrics = self._validate(self.val_dataloader, self.validation)
                save |= self.checkpoint.is_best(metrics, self.state)
            self.state.validated = self.state.step
            if own and self.loop is not None:
                self.callbacks("run_validation", self, self._validations, self._done(self.loop))
            self._validations += 1
        # With several processes the check is a collective operation, so it is not done at every step.
        if self.processes.count == 1 or self._reporter.logs(self.state.step):
            self._interrupts.check()
        if save and self._saved != self.state.step and self.backend.is_e2e_execution:
            self.save()

    # -- validation --

    def _validate(self, val_dataloader: Iterable[Any], loop: ValidationLoop) -> dict[str, float]:
        assert self.model is not None
        self._reporter.wait()
        metrics = run_validation(self, self.model, several(val_dataloader), loop, self._interrupts)
        if metrics:
            self.callbacks("on_metrics", self, metrics, self.state.step)
        self._reporter.restart_rates()
        return metrics

    def _validation_due(self, loop: TrainingLoop) -> bool:
        """Whether a resumed run was ended between its last step and the validation due after it."""
        assert self.batches is not None
        at_epoch = self.batches.index == 0 and loop.validates_after_epoch(self.state.epoch)
        return loop.validates_after_step(self.state.step) or at_epoch

    def _done(self, loop: TrainingLoop) -> bool:
        if not self.backend.is_e2e_execution and self.state.step:
            return True  # compile only
        return bool(self.state.stopped) or loop.ends_at(self.state.step, self.state.epoch)
