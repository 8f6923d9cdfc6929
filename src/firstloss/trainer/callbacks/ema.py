"""Exponential moving averages of weights."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import TrainerError
from ..callback import Callback


class ModelEMA(Callback):
    """Keep an exponential moving average of the weights on the device, and validate with it.

    After each update the average becomes decay * average + (1 - decay) * weight; it starts from the weights at the
    beginning of training. Validation uses the averages, also when it validates a checkpoint; training continues with
    the weights themselves. Checkpoints hold both. Buffers, such as batch norm's running statistics, are not averaged.

    Args:
        decay: from 0 to 1.
        validate: whether validation uses the averages.
    """

    weights_of_its_own = True

    def __init__(self, decay: float = 0.9999, validate: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
            raise TrainerError(f"ModelEMA: decay={decay!r} is not a number from 0 to 1.")
        self.decay = decay
        self.validate = validate
        self.averages: dict[str, torch.Tensor] = {}
        self._trained: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer: Any) -> None:
        weights = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
        if self.averages.keys() != weights.keys():
            self.averages = {name: p.detach().clone() for name, p in weights.items()}
        if trainer.backend.is_xla:
            trainer.backend.move_to_device(self.averages.values())
        else:
            self.averages = {name: t.to(trainer.backend.torch_device) for name, t in self.averages.items()}

    @torch.no_grad()
    def on_after_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        weights = dict(model.named_parameters())
        averages = list(self.averages.values())
        torch._foreach_lerp_(averages, [weights[name].detach() for name in self.averages], 1 - self.decay)

    @torch.no_grad()
    def on_validation_start(self, trainer: Any) -> None:
        if not self.validate or not self.averages:
            return
        weights = dict(trainer.model.named_parameters())
        self._trained = {name: weights[name].detach().clone() for name in self.averages}
        for name, average in self.averages.items():
            weights[name].copy_(average)

    def on_validation_end(self, trainer: Any) -> None:
        self._back(trainer)

    def on_exception(self, trainer: Any) -> None:
        self._back(trainer)

    @torch.no_grad()
    def _back(self, trainer: Any) -> None:
        weights = {} if trainer.model is None else dict(trainer.model.named_parameters())
        for name, trained in self._trained.items():
            weights[name].copy_(trained)
        self._trained = {}

    def state_dict(self) -> dict[str, Any]:
        """The averages, by the weights' names.

        Returns:
            A dict for a checkpoint.
        """
        return {"averages": dict(self.averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the averages from a checkpoint; a state without averages clears them.

        Args:
            state: what `state_dict` returned.
        """
        self.averages = dict(state.get("averages", {}))
