"""Validation: passes over the loaders, scalars averaged over samples, and metric objects."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

import firstloss as fl

from ..errors import GraphChangeWarning, TrainerError
from ..runtime.pytrees import flattened_attributes, tree_map
from .interrupts import Interrupts
from .loops import ValidationLoop
from .pending_losses import AHEAD
from .randomness import preserved_random_state
from .step import counts, describe

if TYPE_CHECKING:
    from .trainer import Trainer

_TARGETS = ("labels", "label", "targets", "target")


def run_validation(
    trainer: Trainer,
    model: torch.nn.Module,
    loaders: Sequence[Iterable[Any]],
    loop: ValidationLoop,
    interrupts: Interrupts,
) -> dict[str, float]:
    """Run a pass over each loader in eval mode and return the metrics; the training state is unchanged."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    metrics: dict[str, float] = {}
    try:
        with preserved_random_state():
            for number, loader in enumerate(loaders):
                trainer.callbacks("on_validation_start", trainer)
                results = _evaluate(trainer, loader, loop, interrupts)
                trainer.callbacks("on_validation_end", trainer, results)
                metrics |= results if len(loaders) == 1 else {f"{k}_{number}": v for k, v in results.items()}
    finally:
        for module, training in modes:
            module.training = training
    return metrics


def _evaluate(
    trainer: Trainer, loader: Iterable[Any], loop: ValidationLoop, interrupts: Interrupts
) -> dict[str, float]:
    """Run a pass over one loader and return the metrics; empty if the backend only compiles."""
    assert trainer.steps is not None
    averages = Averages(loop)
    executor = iter(fl.utils.data.DataExecutor(loader))
    with quiet_recompiles(), closing(interrupts.unless_received(executor)) as batches:
        for batch in islice(batches, loop.most):
            trainer.callbacks("on_validation_batch_start", trainer, batch)
            outputs = trainer.steps.run("evaluate_all" if loop.metrics else "evaluate", batch)
            if trainer.backend.is_e2e_execution:
                averages.add(batch, outputs)
            trainer.callbacks("on_validation_batch_end", trainer, batch, outputs)
            if trainer.processes.count == 1:
                interrupts.check()
    return averages.result() if trainer.backend.is_e2e_execution else {}


class Averages:
    """Averages the outputs of validation batches, read with a delay so that the device never waits."""

    def __init__(self, loop: ValidationLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[Any, dict[str, Any]]] = deque()
        self._sums: dict[str, float] = {}
        self._weights: dict[str, int] = {}
        for metric in loop.metrics.values():
            metric.reset()

    def add(self, batch: Any, outputs: dict[str, Any]) -> None:
        """Add the outputs of a started batch."""
        self._queue.append((batch, outputs))
        if len(self._queue) > AHEAD:
            self._read()

    def _read(self) -> None:
        batch, outputs = self._queue.popleft()
        samples, _ = counts(batch)
        for name, value in outputs["scalars"].items():
            if name.startswith("_"):  # private to a callback
                continue
            self._sums[name] = self._sums.get(name, 0.0) + float(value) * samples
            self._weights[name] = self._weights.get(name, 0) + samples
        if self._loop.metrics:
            inputs = (self._loop.metric_inputs or default_inputs)(batch, outputs["outputs"])
            on_host = tree_map(_on_host, inputs)
            for metric in self._loop.metrics.values():
                metric.update(*on_host)

    def result(self) -> dict[str, float]:
        """The metrics by name: averages per sample, prefixed with "val_", and results of the metric objects."""
        while self._queue:
            self._read()
        if not self._weights:
            raise TrainerError("the validation loader yielded no batches.")
        averages = {f"val_{name}": self._sums[name] / self._weights[name] for name in self._sums}
        for name, metric in self._loop.metrics.items():
            value = float(metric.compute())
            averages[name if name.startswith("val_") else f"val_{name}"] = value
        return averages


def default_inputs(batch: Any, outputs: Any) -> tuple[Any, Any]:
    """(predictions, targets): the outputs' logits, and the batch's labels or its last element."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    target = None
    if isinstance(batch, Mapping):
        target = next((batch[name] for name in _TARGETS if name in batch), None)
    elif flattened_attributes(batch):
        target = next((getattr(batch, name) for name in _TARGETS if hasattr(batch, name)), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        target = batch[-1]
    if logits is None or target is None:
        raise TrainerError(
            f"metrics need predictions and targets, which outputs {describe(outputs)} and batch {describe(batch)} "
            'do not have. Return {"loss": ..., "logits": ...} from forward, or pass '
            "ValidationLoop(metric_inputs=lambda batch, outputs: (predictions, targets))."
        )
    return logits, target


def _on_host(x: Any) -> Any:
    return x.detach().clone().cpu() if isinstance(x, torch.Tensor) else x


@contextmanager
def quiet_recompiles() -> Iterator[None]:
    """Suppress the recompile warning for a validation loader's last batch, which is often a smaller one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*evaluate(_all)? is recompiled", GraphChangeWarning)
        yield
