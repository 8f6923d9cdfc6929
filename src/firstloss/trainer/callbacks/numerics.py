"""Callbacks that stop a run at NaN or infinity and name where it arose."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import Any

import torch

from ...errors import NaNLossError, TrainerError
from ..callback import Callback

# Of the step being traced: each module's name and whether its output is finite, in order of execution.
_outputs: ContextVar[list[tuple[str, torch.Tensor]] | None] = ContextVar("outputs of modules", default=None)


class CheckLoss(Callback):
    """Stop a run whose validation loss is not finite, with an error that names the step.

    For the training loss the Trainer does so anyway.
    """

    def on_validation_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        wrong = [name for name, value in metrics.items() if name.startswith("val_loss") and not math.isfinite(value)]
        if wrong:
            raise NaNLossError(
                f"{wrong[0]} is {metrics[wrong[0]]} in the validation after step {trainer.state.step}. "
                f"{trainer.folder.last_good()}"
            )


class NaNChecker(Callback):
    """Stop a run at the first module output or gradient that is not finite; the error names the step and the layer.

    The checks are computed in the step and read each output once more. With a dynamic loss scale, under which
    gradients overflow now and then, only outputs are checked.

    Args:
        num_steps: end the run after this many steps; None: do not end it.
    """

    def __init__(self, num_steps: int | None = None) -> None:
        if num_steps is not None and (isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1):
            raise TrainerError(f"NaNChecker: num_steps={num_steps!r} is not a positive integer.")
        self.num_steps = num_steps
        self._began = 0
        self._handles: list[Any] = []
        self._names: list[str] = []  # of the checked outputs, in order of execution

    def on_fit_start(self, trainer: Any) -> None:
        self._began = trainer.state.step
        self._release()
        for name, module in trainer.model.named_modules():
            if name and not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(_check_output(name)))

    def on_exception(self, trainer: Any) -> None:
        self._release()

    def _release(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def on_before_forward(self, trainer: Any, model: Any) -> None:
        if model.training:
            _outputs.set([])

    def on_before_backward(self, trainer: Any) -> None:
        checks = _outputs.get() or []
        _outputs.set(None)
        if checks:
            finite = torch.stack([flag for _, flag in checks])
            trainer.log_metrics(_outputs_not_finite=_first_false(finite))
        self._names[:] = [name for name, _ in checks]

    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        scaler = trainer.precision.scaler
        if scaler is not None and scaler.dynamic:
            return
        # In the order of the backward pass, so that the first one found is where it began.
        gradients = [p.grad for p in reversed(list(model.parameters())) if p.grad is not None]
        trainer.log_metrics(_gradients_not_finite=_first_false(torch.stack([g.isfinite().all() for g in gradients])))

    def on_values(self, trainer: Any, values: dict[str, float], step: int) -> None:
        output, gradient = (int(values.get(f"_{kind}_not_finite", -1)) for kind in ("outputs", "gradients"))
        if output >= 0:
            where = f"the output of {self._names[output]!r}"
        elif gradient >= 0:
            names = [name for name, p in reversed(list(trainer.model.named_parameters())) if p.requires_grad]
            where = f"the gradient of {names[gradient]!r}"
        else:
            if self.num_steps is not None and step - self._began >= self.num_steps:
                trainer.stop(f"NaNChecker(num_steps={self.num_steps}) is reached")
            return
        error = NaNLossError(
            f"{where} is not finite at step {step}; everything computed before it is. {trainer.folder.last_good()}"
        )
        error.step = step
        raise error


def _check_output(name: str) -> Any:
    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        checks = _outputs.get()
        if checks is not None and isinstance(output, torch.Tensor) and output.is_floating_point():
            checks.append((name, output.detach().isfinite().all()))

    return hook


def _first_false(flags: torch.Tensor) -> torch.Tensor:
    """The index of the first False; -1 if there is none."""
    return torch.where(flags.all(), -1, flags.int().argmin())
