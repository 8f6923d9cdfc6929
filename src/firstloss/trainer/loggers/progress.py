"""Progress display: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..callback import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer

_UNITS = {"steps_per_second": "steps/s", "samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}


class ProgressLogger(Callback):
    """Show the step, the loss, the rates and the time to first loss.

    On a terminal it is a progress bar (if rich is installed); elsewhere, a line each time that metrics are logged.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._began = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        if sys.stderr.isatty():
            self._bar = _bar()
        if self._bar is not None:
            self._bar.start()
            total = _total_steps(trainer)
            self._task = self._bar.add_task("training", total=total, completed=trainer.state.step, numbers="")
        self._began = trainer.state.step
        if trainer.state.step:
            self._say(f"resumed at step {trainer.state.step}, from {trainer.folder.at(trainer.state.step)}")

    def on_compile_start(self, trainer: Trainer, name: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, numbers=f"compiling {name}")

    def on_first_loss(self, trainer: Trainer, loss: float, seconds: float) -> None:
        self._say(f"first loss {loss:.4f} after {seconds:.1f} s")

    def on_step_end(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.state.step)

    def on_metrics(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        words = "  ".join(_formatted(name, value) for name, value in metrics.items())
        if self._bar is None or "loss" not in metrics:
            self._say(f"step {step}  {words}")
        if self._bar is not None:
            self._bar.update(self._task, numbers=words)

    def on_save_end(self, trainer: Trainer, path: str) -> None:
        logging.getLogger("firstloss").info("saved %s", path)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._close()
        step, last = trainer.state.step, trainer.folder.last()
        if step == self._began:
            self._say(
                "nothing left to do: the run is at the end of its loop. To train on, raise max_steps or max_epochs; "
                f"to start afresh, use another model_dir than {trainer.model_dir}, or fit(ckpt_path=None)"
            )
        elif trainer.state.stopped:
            self._say(f"stopped at step {step}: {trainer.state.stopped}; saved {last}")
        else:
            self._say(f"done at step {step}; saved {last}")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            with suppress(BrokenPipeError):  # Ctrl-C ended the `tee` behind us; still save the run
                print(line, file=sys.stderr, flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
    return Progress(*columns, console=Console(stderr=True))


def _total_steps(trainer: Trainer) -> int | None:
    loop, batches = trainer.loop, trainer.batches
    if loop is None or batches is None:
        return None
    epoch = batches.steps_in_epoch(loop.grad_accum_steps) if loop.max_epochs is not None else None
    ends = [loop.last_step(), epoch * loop.max_epochs if epoch and loop.max_epochs else None]
    return min((end for end in ends if end is not None), default=None)


def _formatted(name: str, value: float) -> str:
    if name in _UNITS:
        return f"{value:,.0f} {_UNITS[name]}" if value >= 100 else f"{value:.3g} {_UNITS[name]}"
    return f"{name} {value:.3e}" if name.startswith("lr") else f"{name} {value:.4g}"
