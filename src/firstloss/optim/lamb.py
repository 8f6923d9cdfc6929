"""LAMB: Adam with a learning rate for each weight tensor, by the norms of weight and update."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import OptimizerError
from .optimizer import Optimizer


class Lamb(Optimizer):
    """You et al., "Large Batch Optimization for Deep Learning" (2020), Algorithm 2, with phi(z) = z.

    With r Adam's update of the weight w, bias-corrected, and u = r + weight_decay w:
    w <- w - lr (|w| / |u|) u, where the ratio is 1 if one of the norms is 0.

    Args:
        params: parameters or parameter groups, as for `torch.optim.Optimizer`.
        lr: the learning rate, a number or a tensor.
        betas: coefficients of the moving averages of the gradient and of its square.
        eps: added to the root of the averaged squares.
        weight_decay: coefficient of the weight that is added to the update.
        adam: whether to leave out the ratio.

    Raises:
        OptimizerError: for invalid numbers.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adam: bool = False,
    ) -> None:
        if not 0 <= lr or not 0 <= weight_decay or not 0 <= eps or not all(0 <= beta < 1 for beta in betas):
            raise OptimizerError(
                f"Lamb takes lr, weight_decay and eps of at least 0 and betas in [0, 1), not lr={lr}, "
                f"weight_decay={weight_decay}, eps={eps}, betas={betas}."
            )
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam": adam})

    def update(self, weights: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        count = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        for p in weights:
            if "step" not in self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=count)
                self.state[p]["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        steps, means, squares = ([self.state[p][k] for p in weights] for k in ("step", "exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - beta2)
        for p, step, mean, square in zip(weights, steps, means, squares, strict=True):
            root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            update = (mean / (1 - beta1**step)).div_(root)
            if group["weight_decay"] != 0:
                update.add_(p, alpha=group["weight_decay"])
            if not group["adam"]:
                length, change = p.norm(), update.norm()
                update.mul_(torch.where((length > 0) & (change > 0), length / change, 1.0))
            p.add_(update, alpha=-group["lr"])
