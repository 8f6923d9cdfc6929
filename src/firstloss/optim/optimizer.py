"""The base of `firstloss.optim`'s optimizers, and PyTorch's own on that base."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..capture.materialize_tensors import materialize_tensor
from ..capture.new_optimizer_state import FirstStepDiffers, find_new_state
from ..capture.recorder import DeferredTensor
from ..errors import OptimizerError
from .adafactor import without_reads

Tensor = torch.Tensor


def count_dtype() -> torch.dtype:
    """The dtype in which steps are counted: PyTorch's choice."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


class Optimizer(torch.optim.Optimizer):
    """As `torch.optim.Optimizer`, and its state can be made before the first step.

    A subclass defines `update`, or `step` as any optimizer does. A traced step finds state that is first made there, so
    nothing need be done for it. It may define `preinitialize` to make its state itself: then that is called before the
    first traced step.

    Args:
        params: weights, or groups of them as dicts, as `torch.optim.Optimizer` takes them.
        defaults: what a group has that does not say otherwise.
        enable_global_step: each weight's state has a "step", for `increment_global_step`.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], enable_global_step: bool = False) -> None:
        super().__init__(params, defaults)
        self.enable_global_step = enable_global_step
        self._before_zero_grad: OrderedDict[int, Callable] = OrderedDict()
        self._after_zero_grad: OrderedDict[int, Callable] = OrderedDict()
        if enable_global_step:
            for p in self._weights():
                self.state[p]["step"] = torch.zeros((), dtype=count_dtype(), device="cpu")

    def _weights(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def increment_global_step(self, p: Tensor) -> Tensor:
        """Count one step of the weight `p`.

        Args:
            p: one of the optimizer's weights.

        Returns:
            The count, without dimensions: float32 unless float64 is the default dtype. The optimizer's own tensor.

        Raises:
            OptimizerError: if the optimizer was made without `enable_global_step`.
        """
        if "step" not in self.state[p]:
            raise OptimizerError(
                f"this {type(self).__name__} counts no steps. Write super().__init__(params, defaults, "
                "enable_global_step=True) in its constructor."
            )
        step = self.state[p]["step"]
        step.add_(1)
        return step

    def visit_state(self, fn: Callable[[Any], Any]) -> None:
        """Call `fn` on each entry of each weight's state.

        Args:
            fn: takes an entry; what it returns, if not None, takes the entry's place.
        """
        for entries in self.state.values():
            for key, entry in entries.items():
                new = fn(entry)
                if new is not None:
                    entries[key] = new

    def apply(self, f: Any) -> Any:
        """`f(self)`, or `f.apply(self)` for what is no function.

        Args:
            f: a function of an optimizer, or an object with a method `apply`.

        Returns:
            What that returns.

        Raises:
            OptimizerError: if `f` is neither.
        """
        if callable(f):
            return f(self)
        if not callable(getattr(f, "apply", None)):
            raise OptimizerError(f"apply takes a function of an optimizer, not an object of type {type(f).__name__}.")
        return f.apply(self)

    def register_zero_grad_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call `hook(optimizer, args, kwargs)` before each `zero_grad`; it may return other (args, kwargs).

        Args:
            hook: takes the optimizer, and args and kwargs of `zero_grad`.

        Returns:
            A handle, whose `remove()` takes the hook away.
        """
        handle = RemovableHandle(self._before_zero_grad)
        self._before_zero_grad[handle.id] = hook
        return handle

    def register_zero_grad_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(optimizer, args, kwargs)` after each `zero_grad`.

        Args:
            hook: takes the optimizer, and args and kwargs of `zero_grad`.

        Returns:
            A handle, whose `remove()` takes the hook away.
        """
        handle = RemovableHandle(self._after_zero_grad)
        self._after_zero_grad[handle.id] = hook
        return handle

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As `torch.optim.Optimizer.zero_grad`, with the hooks around it.

        Args:
            *args, **kwargs: as PyTorch's: `set_to_none`.

        Raises:
            OptimizerError: if a hook returns something else than None or a pair.
        """
        own = self.__dict__  # an unpickled optimizer has no hooks
        for hook in tuple(own.get("_before_zero_grad", {}).values()):
            changed = hook(self, args, kwargs)
            if changed is not None:
                if not isinstance(changed, tuple) or len(changed) != 2:
                    raise OptimizerError(f"{hook} returns None, or (args, kwargs) of zero_grad, and not {changed!r}.")
                args, kwargs = changed
        super().zero_grad(*args, **kwargs)
        for hook in tuple(own.get("_after_zero_grad", {}).values()):
            hook(self, args, kwargs)

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
        """Update `weights`, which are of `group`, in place; called without autograd.

        Args:
            weights: those of the group that have gradients.
            gradients: one for each.
            group: the parameter group, with its numbers.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define update(weights, gradients, group), or step().")

    @torch.no_grad()
    def preinitialize(self) -> None:
        """Make the state that the first step would make, as it would be at its beginning.

        The first step is rehearsed on zero gradients, without computing anything. State that takes its first value from
        a gradient, such as SGD's momentum with dampening, is not made.
        """
        weights = [p for p in self._weights() if p.requires_grad]
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
