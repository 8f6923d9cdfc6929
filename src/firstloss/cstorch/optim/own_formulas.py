"""Optimizers with the names of PyTorch's or `firstloss.optim`'s, but slightly different formulas."""

from __future__ import annotations

from typing import Any

import torch

from ...optim.adam_base import check_numbers, is_zero
from ...optim.optimizer import Optimizer, count_dtype

Tensor = torch.Tensor


class SGD(Optimizer):
    """`torch.optim.SGD`, except that momentum starts at zero: the first gradient, too, is multiplied by 1 - dampening.
    Without dampening it is the same. `lr` has no default."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        check_numbers("SGD", {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        if not is_zero(group["weight_decay"]):
            gradients = list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
        if not is_zero(group["momentum"]):
            for p in weights:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            momenta = [self.state[p]["momentum_buffer"] for p in weights]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, gradients, alpha=1 - group["dampening"])
            if group["nesterov"]:
                gradients = list(torch._foreach_add(gradients, momenta, alpha=group["momentum"]))
            else:
                gradients = momenta
        torch._foreach_add_(weights, gradients, alpha=-group["lr"])


class NAdam(Optimizer):
    """NAdam (Dozat, 2016) as `cerebras.pytorch` computes it: the momentum's correction has the newest mu twice in the
    product of all mu, `torch.optim.NAdam` once."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum_decay: float = 4e-3,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "momentum_decay": momentum_decay}
        check_numbers("NAdam", numbers, betas)
        super().__init__(params, {**numbers, "betas": betas}, enable_global_step=True)

    def update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for p, gradient in zip(weights, gradients, strict=True):
            state = self.state[p]
            if "exp_avg" not in state:
                state["mu_product"] = torch.ones((), dtype=count_dtype())
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            step, product = self.increment_global_step(p), state["mu_product"]
            if not is_zero(group["weight_decay"]):
                gradient = gradient.add(p, alpha=group["weight_decay"])
            mu = beta1 * (1 - 0.5 * 0.96 ** (step * group["momentum_decay"]))
            mu_next = beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * group["momentum_decay"]))
            product.mul_(mu)
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.lerp_(gradient, 1 - beta1)
            square.lerp_(gradient * gradient, 1 - beta2)
            root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            change = mean * (mu_next / (1 - product * mu * mu_next)) + gradient * ((1 - mu) / (1 - product))
            p.sub_(change.div_(root).mul_(group["lr"]))


class Lamb(Optimizer):
    """LAMB (You et al., 2020) without bias correction, as in the paper's third version, and with the weight's norm
    clamped to 10. `firstloss.optim.Lamb` corrects the bias and does not clamp.

    Args:
        adam: whether to leave out the ratio of the norms.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        check_numbers("Lamb", numbers, betas)
        super().__init__(params, {**numbers, "betas": betas, "adam": adam})

    def update(self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for p in weights:
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in self.state[p]:
                    self.state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        means, squares = ([self.state[p][name] for p in weights] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_lerp_(squares, torch._foreach_mul(gradients, gradients), 1 - beta2)
        for p, mean, square in zip(weights, means, squares, strict=True):
            update = mean / (square.sqrt() + group["eps"])
            if not is_zero(group["weight_decay"]):
                update.add_(p, alpha=group["weight_decay"])
            if not group["adam"]:
                length, change = p.norm().clamp(max=10), update.norm()
                update.mul_(torch.where((length > 0) & (change > 0), length / change, 1.0))
            p.sub_(update.mul_(group["lr"]))
