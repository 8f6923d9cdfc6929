"""The base of `firstloss.optim`'s optimizers, and PyTorch's own on that base."""

from __future__ import annotations

from typing import Any

import torch

from ..capture.recorder import DeferredTensor
from ..capture.step import FirstStepDiffers, find_new_state
from ..init.materialize import materialize_tensor
from .adafactor import without_reads


class Optimizer(torch.optim.Optimizer):
    """As `torch.optim.Optimizer`, and its state can be made before the first step.

    A subclass defines `update`, or `step` as any optimizer does. A traced step finds state that is first made there, so
    nothing need be done for it. It may define `preinitialize` to make its state itself: then that is called before the
    first traced step.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights that have gradients, group by group.

        Args:
            closure: computes the loss and its gradients anew; not in a traced step.

        Returns:
            What `closure` returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if pairs:
                weights, gradients = map(list, zip(*pairs, strict=True))
                self.update(weights, gradients, group)
        return loss

    def update(self, weights: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update `weights`, which are of `group`, in place; called without autograd."""
        raise NotImplementedError(f"{type(self).__name__} has to define update(weights, gradients, group), or step().")

    @torch.no_grad()
    def preinitialize(self) -> None:
        """Make the state that the first step would make, as it would be at its beginning.

        The first step is rehearsed on zero gradients, without computing anything. State that takes its first value from
        a gradient, such as SGD's momentum with dampening, is not made.
        """
        weights = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        gradients = [p.grad for p in weights]

        def rehearse() -> None:
            for p in weights:
                p.grad = torch.zeros_like(p)
            with without_reads():
                self.step()

        plainest = {"capturable": True, "foreach": False, "fused": False}
        restore = [(g, key, g[key]) for g in self.param_groups for key in plainest if key in g]
        for group, key, _ in restore:
            group[key] = plainest[key]
        try:
            found = find_new_state(self, rehearse)
        except FirstStepDiffers:
            found = {}
        finally:
            for group, key, value in restore:
                group[key] = value
            for p, gradient in zip(weights, gradients, strict=True):
                p.grad = gradient
        for (p, _), entry in found.items():
            if type(p) is not DeferredTensor:
                materialize_tensor(entry)


class AdamW(torch.optim.AdamW, Optimizer):
    """`torch.optim.AdamW`, with `preinitialize`."""


class Adam(torch.optim.Adam, Optimizer):
    """`torch.optim.Adam`, with `preinitialize`."""


class SGD(torch.optim.SGD, Optimizer):
    """`torch.optim.SGD`, with `preinitialize`."""


class Adafactor(torch.optim.Adafactor, Optimizer):
    """`torch.optim.Adafactor`, with `preinitialize`."""


class RMSprop(torch.optim.RMSprop, Optimizer):
    """`torch.optim.RMSprop`, with `preinitialize`."""


class Adagrad(torch.optim.Adagrad, Optimizer):
    """`torch.optim.Adagrad`, whose constructor makes its state."""


class Adamax(torch.optim.Adamax, Optimizer):
    """`torch.optim.Adamax`, with `preinitialize`."""


class NAdam(torch.optim.NAdam, Optimizer):
    """`torch.optim.NAdam`, with `preinitialize`."""


class RAdam(torch.optim.RAdam, Optimizer):
    """`torch.optim.RAdam`, with `preinitialize`."""


class Rprop(torch.optim.Rprop, Optimizer):
    """`torch.optim.Rprop`, with `preinitialize`."""


class ASGD(torch.optim.ASGD, Optimizer):
    """`torch.optim.ASGD`, with `preinitialize`."""


class Adadelta(torch.optim.Adadelta, Optimizer):
    """`torch.optim.Adadelta`, with `preinitialize`."""


class Muon(torch.optim.Muon, Optimizer):
    """`torch.optim.Muon`, with `preinitialize`."""
