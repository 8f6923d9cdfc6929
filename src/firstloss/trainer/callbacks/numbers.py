"""Callbacks that log norms, parameter counts and the optimizer's settings."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import TrainerError
from ...files import atomic_write
from ..callback import Callback

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h)\.(\d+)\.")


class ComputeNorm(Callback):
    """Log norms: "model_wise_params_norm" of the trained weights, "model_wise_grad_norm" of their gradients before
    clipping, and "per_layer_grad_norm/layer_0" and so on of each layer's gradients.

    A layer is a number after "layers", "layer", "blocks", "block" or "h" in a parameter's name. The norms are computed
    in the step.
    """

    def on_before_backward(self, trainer: Any, model: Any, outputs: Any) -> None:
        weights = [p.detach() for p in model.parameters() if p.requires_grad]
        trainer.log_metrics(model_wise_params_norm=_norm(weights))

    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        layers: dict[str, list[torch.Tensor]] = {}
        for name, p in model.named_parameters():
            match = _LAYER.search(name)
            if match and p.grad is not None:
                layers.setdefault(match[1], []).append(p.grad)
        everything = [p.grad for p in model.parameters() if p.grad is not None]
        norms = {f"per_layer_grad_norm/layer_{layer}": _norm(gradients) for layer, gradients in layers.items()}
        trainer.log_metrics(model_wise_grad_norm=_norm(everything), **norms)


def _norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm(tensors)


class LogOptimizerParamGroup(Callback):
    """Log settings of the optimizer's parameter groups: "weight_decay", "weight_decay_1" for the second group, etc.

    Args:
        keys: one key or several; of a tuple such as "betas" each element is logged, as "betas[0]".
    """

    def __init__(self, keys: str | Sequence[str]) -> None:
        self.keys: list[str] = [keys] if isinstance(keys, str) else list(keys)

    def on_fit_start(self, trainer: Any) -> None:
        for key in self.keys:
            if not any(key in group for group in trainer.optimizer.param_groups):
                known = sorted({key for group in trainer.optimizer.param_groups for key in group} - {"params"})
                raise TrainerError(f"LogOptimizerParamGroup: no group has {key!r}, only {', '.join(known)}.")

    def on_step_start(self, trainer: Any) -> None:
        if not trainer.is_log_step:
            return
        for index, group in enumerate(trainer.optimizer.param_groups):
            end = f"_{index}" if index else ""
            for key in self.keys:
                value = group.get(key)
                parts = {f"{key}[{i}]": part for i, part in enumerate(value)} if _is_tuple(value) else {key: value}
                trainer.log_metrics(**{name + end: float(v) for name, v in parts.items() if v is not None})


def _is_tuple(value: Any) -> bool:
    return isinstance(value, (tuple, list))


class CountParams(Callback):
    """Count the model's parameters: all, trained, and of each direct child module; tied parameters count once.

    The counts go to the log and to "parameters.json" in the artifact directory.
    """

    def on_fit_start(self, trainer: Any) -> None:
        counts = self.count(trainer.model)
        os.makedirs(trainer.artifact_dir, exist_ok=True)
        with atomic_write(os.path.join(trainer.artifact_dir, "parameters.json"), "w") as file:
            json.dump(counts, file, indent=1)
        logging.getLogger("firstloss").info("%d parameters, of which %d are trained", counts["all"], counts["trained"])

    @staticmethod
    def count(model: torch.nn.Module) -> dict[str, Any]:
        """Count parameters.

        Args:
            model: the Module.

        Returns:
            `{"all": int, "trained": int, "modules": {name: int}}`.
        """
        parts: dict[str, int] = {}
        for name, p in model.named_parameters():
            top = name.partition(".")[0]
            parts[top] = parts.get(top, 0) + p.numel()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return {"all": sum(parts.values()), "trained": trained, "modules": parts}
