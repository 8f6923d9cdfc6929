"""The base class of `firstloss.optim`'s optimizers, and PyTorch's optimizers with it."""

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
from . import adafactor as _adafactor  # noqa: F401 - for its patches

Tensor = torch.Tensor


def count_dtype() -> torch.dtype:
    """The dtype of step counters, as PyTorch chooses it."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


class Optimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` whose state can be created before the first step.

    A subclass defines `update`, or `step` like any optimizer. A traced step discovers state that is created in it, so
    nothing need be done for that. A subclass may define `preinitialize` to create its state itself; it is then called
    before the first traced step.

    Args:
        params: parameters or parameter groups, as for `torch.optim.Optimizer`.
        defaults: default values of the groups' options.
        enable_global_step: whether each parameter's state has a "step", for `increment_global_step`.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], enable_global_step: bool = False) -> None:
        super().__init__(params, defaults)
        self.enable_global_step = enable_global_step
        self._before_zero_grad: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._after_zero_grad: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        if enable_global_step:
            for p in self._weights():
                self.state[p]["step"] = torch.zeros((), dtype=count_dtype(), device="cpu")

    def _weights(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def increment_global_step(self, p: Tensor) -> Tensor:
        """Increment the step count of the parameter `p`.

        Args:
            p: one of the optimizer's parameters.

        Returns:
            The count, a scalar tensor owned by the optimizer: float32 unless float64 is the default dtype.

        Raises:
            OptimizerError: if the optimizer was created without `enable_global_step`.
        """
        if "step" not in self.state[p]:
            raise OptimizerError(
                f"this {type(self).__name__} does not count steps. Write super().__init__(params, defaults, "
                "enable_global_step=True) in its constructor."
            )
        step = self.state[p]["step"]
        step.add_(1)
        return step

    def visit_state(self, fn: Callable[[Any], Any]) -> None:
        """Call `fn` on each entry of each parameter's state.

        Args:
            fn: takes an entry; if it returns anything but None, that replaces the entry.
        """
        for entries in self.state.values():
            for key, entry in entries.items():
                new = fn(entry)
                if new is not None:
                    entries[key] = new

    def apply(self, f: Any) -> Any:
        """Return `f(self)`, or `f.apply(self)` if `f` is not callable.

        Args:
            f: a function of an optimizer, or an object with a method `apply`.

        Returns:
            The result.

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
            hook: takes the optimizer, and the args and kwargs of `zero_grad`.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        handle = RemovableHandle(self._before_zero_grad)
        self._before_zero_grad[handle.id] = hook
        return handle

    def register_zero_grad_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(optimizer, args, kwargs)` after each `zero_grad`.

        Args:
            hook: takes the optimizer, and the args and kwargs of `zero_grad`.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        handle = RemovableHandle(self._after_zero_grad)
        self._after_zero_grad[handle.id] = hook
        return handle

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, like `torch.optim.Optimizer.zero_grad`, and call the hooks.

        Args:
            *args, **kwargs: those of PyTorch: `set_to_none`.

        Raises:
            OptimizerError: if a hook returns anything but None or a pair.
        """
        own = self.__dict__  # an unpickled optimizer has no hooks
        for hook in tuple(own.get("_before_zero_grad", {}).values()):
            changed = hook(self, args, kwargs)
            if changed is not None:
                if not isinstance(changed, tuple) or len(changed) != 2:
                    raise OptimizerError(f"{hook} must return None or (args, kwargs) of zero_grad, not {changed!r}.")
                args, kwargs = changed
        super().zero_grad(*args, **kwargs)
        for hook in tuple(own.get("_after_zero_grad", {}).values()):
            hook(self, args, kwargs)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights that have gradients, group by group.

        Args:
            closure: recomputes the loss and its gradients; not in a traced step.

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
        """Update `weights` of `group` in place; called without autograd.

        Args:
            weights: the group's parameters that have gradients.
            gradients: their gradients.
            group: the parameter group, with its options.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(weights, gradients, group), or step().")

    @torch.no_grad()
    def preinitialize(self) -> None:
        """Create the state that the first step would create, with its initial values.

        The first step is simulated on zero gradients, without computing anything. State that is initialized from a
        gradient, such as SGD's momentum with dampening, is not created.
        """
        weights = [p for p in self._weights() if p.requires_grad]
        gradients = [p.grad for p in weights]

        def simulate() -> None:
            for p in weights:
                p.grad = torch.zeros_like(p)
            self.step()

        plainest = {"capturable": True, "foreach": False, "fused": False}
        restore = [(g, key, g[key]) for g in self.param_groups for key in plainest if key in g]
        for group, key, _ in restore:
            group[key] = plainest[key]
        try:
            new_state = find_new_state(self, simulate)
        except FirstStepDiffers:
            new_state = {}
        finally:
            for group, key, value in restore:
                group[key] = value
            for p, gradient in zip(weights, gradients, strict=True):
                p.grad = gradient
        for (p, _), entry in new_state.items():
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
    """`torch.optim.Adagrad`, whose constructor creates its state."""


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
