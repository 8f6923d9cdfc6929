"""Muon: updates by an orthogonalized momentum."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import OptimizerError
from ...optim.adam_base import check_numbers, is_zero
from ...optim.optimizer import Optimizer

Tensor = torch.Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with Cerebras' arguments.

    The momentum is m <- momentum m + (1 - momentum) g; with `nesterov`, g + momentum m is orthogonalized. The learning
    rate is lr * 0.2 sqrt(max(rows, columns)), chosen by Liu et al. (2025) to match AdamW, and multiplies the weight
    decay. `torch.optim.Muon` mixes (1 - momentum) g + momentum m, and decays by `lr`.

    Args:
        params: weights of two dimensions, or of four, which are flattened to two.
        ns_steps: steps of the Newton-Schulz iteration, in bfloat16.

    Raises:
        OptimizerError: for invalid numbers, and for weights that are not matrices.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
    ) -> None:
        check_numbers("Muon", {"lr": lr, "weight_decay": weight_decay, "ns_steps": ns_steps}, (momentum,))
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, whose weights must be matrices."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dim() not in (2, 3, 4):
                raise OptimizerError(
                    f"Muon is for matrices, but a weight has the shape {list(p.shape)}. Pass biases, norms and the "
                    "like to another optimizer, such as AdamW."
                )

    def update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        for p, gradient in zip(weights, gradients, strict=True):
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
            change = gradient.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
            matrix = change.reshape(len(change), -1) if change.dim() == 4 else change
            change = _orthogonal(matrix, group["ns_steps"]).reshape(p.shape).to(p.dtype)
            rate = group["lr"] * (0.2 * max(p.shape[:2]) ** 0.5)
            if not is_zero(group["weight_decay"]):
                p.mul_(1 - rate * group["weight_decay"])
            p.sub_(change * rate)


def _orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Approximately U V^T of the singular value decomposition, by an odd polynomial that moves singular values to 1."""
    a, b, c = _COEFFICIENTS
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.bfloat16()
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
