"""Lion: updates by the sign of a momentum."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OptimizerError
from .optimizer import Optimizer


class Lion(Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), Algorithm 2.

    With g the gradient and m the momentum: w <- w - lr (sign(beta1 m + (1 - beta1) g) + weight_decay w), then
    m <- beta2 m + (1 - beta2) g.

    Args:
        params: parameters or parameter groups, as for `torch.optim.Optimizer`.
        lr: the learning rate, a number or a tensor.
        betas: coefficients of the update's direction and of the momentum.
        weight_decay: decoupled weight decay, as in AdamW.
        maximize: whether to maximize the objective.

    Raises:
        OptimizerError: for invalid numbers.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        if not 0 <= lr or not 0 <= weight_decay or not all(0 <= beta < 1 for beta in betas):
            raise OptimizerError(
                f"Lion takes lr and weight_decay of at least 0 and betas in [0, 1), not lr={lr}, "
                f"weight_decay={weight_decay}, betas={betas}."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def update(self, weights: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        for p in weights:
            if "exp_avg" not in self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        momenta = [self.state[p]["exp_avg"] for p in weights]
        beta1, beta2 = group["betas"]
        updates = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        torch._foreach_sign_(updates)
        if group["weight_decay"] != 0:
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)
