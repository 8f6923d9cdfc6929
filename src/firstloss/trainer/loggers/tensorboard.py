"""A logger for TensorBoard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ...errors import MissingDependencyError
from ..callback import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class TensorBoardLogger(Callback):
    """Write event files into the run folder, for `tensorboard --logdir RUN`.

    Args:
        folder: the name of the event files' folder in the run folder.
    """

    def __init__(self, folder: str = "tensorboard") -> None:
        self.folder = folder
        self._writer: Any = None

    def on_fit_start(self, trainer: Trainer) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError(
                "TensorBoardLogger needs tensorboard, which is not installed: pip install tensorboard"
            ) from error
        # Hide what an earlier process logged of steps that are run again.
        folder = os.path.join(trainer.model_dir, self.folder)
        self._writer = SummaryWriter(folder, purge_step=trainer.state.step + 1 if trainer.state.step else None)

    def on_metrics(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
