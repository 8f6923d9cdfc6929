"""Adam as Cerebras computes it: with decoupled or coupled weight decay, with or without bias correction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import OptimizerError
from .optimizer import Optimizer, count_dtype

Tensor = torch.Tensor


def is_zero(number: Any) -> bool:
    """Whether a number of a parameter group is 0; False for a tensor, which has no value in a traced step."""
    return not isinstance(number, Tensor) and number == 0


def check_numbers(name: str, at_least_zero: dict[str, Any], from_0_to_1: Iterable[Any] = ()) -> None:
    """Check an optimizer's numbers; tensors are accepted as they are.

    Raises:
        OptimizerError: naming the first invalid number.
    """
    for word, number in at_least_zero.items():
        if not isinstance(number, Tensor) and not number >= 0:
            raise OptimizerError(f"{name}: {word}={number!r} is not a number of at least 0.")
    for number in from_0_to_1:
        if not isinstance(number, Tensor) and not 0 <= number < 1:
            raise OptimizerError(f"{name}: {number!r} is not in [0, 1), as betas and momenta must be.")


class AdamBase(Optimizer):
    """Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019), as Cerebras' `AdamBase` computes them.

    With g the gradient plus `l2_regularization_rate` w, m and v its moving averages, and t the step:

        c = sqrt(1 - beta2^t) / (1 - beta1^t), or 1 without `correct_bias`:
        w <- w - lr (c m / (sqrt(v) + eps) + weight_decay w).

    Unlike in PyTorch, `eps` is added before the bias is corrected, and is 1e-6 by default.

    Args:
        params: parameters or parameter groups, as for `torch.optim.Optimizer`.
        lr: the learning rate, a number or a tensor.
        betas: coefficients of the moving averages of the gradient and of its square.
        eps: added to the root of the averaged squares.
        weight_decay: decoupled weight decay, as in AdamW.
        l2_regularization_rate: coupled weight decay, as `weight_decay` of PyTorch's Adam.
        correct_bias: whether to correct the averages' bias towards zero; BERT was trained without.
        amsgrad: whether to divide by the largest v so far.

    Raises:
        OptimizerError: for invalid numbers.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        l2_regularization_rate: float = 0.0,
        correct_bias: bool = True,
        amsgrad: bool = False,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "l2_regularization_rate": l2_regularization_rate}
        check_numbers(type(self).__name__, numbers, betas)
        defaults = {**numbers, "betas": betas, "correct_bias": correct_bias, "amsgrad": amsgrad}
        super().__init__(params, defaults)

    def update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        amsgrad, correct_bias = group["amsgrad"], group["correct_bias"]
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
        for p in weights:
            state = self.state[p]
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
            if correct_bias and "step" not in state:
                state["step"] = torch.zeros((), dtype=count_dtype())
        if not is_zero(group["l2_regularization_rate"]):
            gradients = list(torch._foreach_add(gradients, weights, alpha=group["l2_regularization_rate"]))
        means, squares, *largest = ([self.state[p][name] for p in weights] for name in names)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - beta2)
        if amsgrad:
            torch._foreach_maximum_(largest[0], squares)
        roots = torch._foreach_sqrt(largest[0] if amsgrad else squares)
        torch._foreach_add_(roots, group["eps"])
        updates = list(torch._foreach_div(means, roots))
        if correct_bias:
            steps = [self.state[p]["step"] for p in weights]
            torch._foreach_add_(steps, 1)
            for update, step in zip(updates, steps, strict=True):
                update.mul_((1 - beta2**step).sqrt() / (1 - beta1**step))
        if not is_zero(group["weight_decay"]):
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"])
