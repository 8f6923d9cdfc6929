"""Loss scaling whose decisions are made in tensors, without reading values."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..capture import session
from ..capture.new_optimizer_state import is_known
from ..compat.torch_names import pytree
from ..errors import PrecisionError, TraceError
from .precision import get_half_dtype

Tensor = torch.Tensor
T = TypeVar("T")


class GradScaler:
    """Scale the loss, so that small gradients do not underflow in half precision, and skip steps with overflows.

    Like `torch.amp.GradScaler`, with the arguments of Cerebras' `cstorch.amp.GradScaler`. It also works in a traced
    step, where the decision to skip is a tensor: the update is computed and then discarded.

    Examples:
        >>> model = nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = fl.amp.GradScaler("dynamic", init_scale=1024.0)
        >>> scaler.scale(model(torch.ones(1, 8)).sum()).backward()
        >>> scaler.unscale_(optimizer)  # before gradients are read or clipped
        >>> model.bias.grad
        tensor([1.])
        >>> scaler.step(optimizer)
        >>> scaler.update()

    Args:
        loss_scale: "dynamic", or a constant factor, with which no step is skipped. 1 by default.
        init_scale: the initial value of a dynamic scale; by default its maximum.
        steps_per_increase: double the scale after this many steps without a change; 2000 by default.
        min_loss_scale, max_loss_scale: its limits; by default 2^-14 and 2^15, or 2^31 with cbfloat16.
        overflow_tolerance: halve the scale when more than this fraction of the steps since its last change overflowed.
        max_gradient_norm: with a dynamic scale: clip the total norm of all unscaled gradients to this, at the first
            `step` after `unscale_`.

    Raises:
        PrecisionError: for a scale that is not positive, limits that leave it no room, or limits of a constant scale.
    """

    def __init__(
        self,
        loss_scale: str | float | None = None,
        init_scale: float | None = None,
        steps_per_increase: int | None = None,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
        overflow_tolerance: float = 0.0,
        max_gradient_norm: float | None = None,
    ) -> None:
        self.dynamic: bool = isinstance(loss_scale, str) and loss_scale == "dynamic"
        if loss_scale is not None and not self.dynamic and not _is_positive(loss_scale):
            raise PrecisionError(f"loss_scale is 'dynamic' or a positive number, not {loss_scale!r}.")
        given = {
            "init_scale": init_scale,
            "steps_per_increase": steps_per_increase,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
            "overflow_tolerance": overflow_tolerance or None,
            "max_gradient_norm": max_gradient_norm,
        }
        if not self.dynamic:
            dropped = [f"{name}={value!r}" for name, value in given.items() if value is not None]
            if dropped:
                raise PrecisionError(
                    f"{dropped[0]} is for a dynamic scale, but loss_scale={loss_scale!r} is constant. Leave it out, or "
                    "write loss_scale='dynamic'."
                )
        least = 2.0**-14 if min_loss_scale is None else min_loss_scale
        most = 2.0**31 if get_half_dtype() == "cbfloat16" else 2.0**15
        most = most if max_loss_scale is None else max_loss_scale
        patience = 2000 if steps_per_increase is None else steps_per_increase
        tolerance = overflow_tolerance
        if max_gradient_norm is not None and not _is_positive(max_gradient_norm):
            raise PrecisionError(f"max_gradient_norm must be positive, not {max_gradient_norm!r}.")
        self._max_gradient_norm = max_gradient_norm
        first = most if init_scale is None else init_scale
        if not 0 < least <= first <= most < float("inf") or not 0 <= tolerance <= 1 or not patience >= 1:
            raise PrecisionError(
                f"invalid limits of a dynamic scale: min_loss_scale={least}, init_scale={first} and "
                f"max_loss_scale={most} must ascend; overflow_tolerance={tolerance} must be in [0, 1]; "
                f"steps_per_increase={patience} must be positive."
            )
        self._limits = (least, most)
        self._steps_per_increase = patience
        self._overflow_tolerance = tolerance
        begin = float(first if self.dynamic else 1.0 if loss_scale is None else loss_scale)
        self._scale = torch.tensor(begin, dtype=torch.float32, device="cpu")
        self._steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._overflows = torch.zeros((), dtype=torch.int64, device="cpu")
        self._skipped = torch.zeros((), dtype=torch.int64, device="cpu")
        self._scales = self.dynamic or begin != 1.0
        # Within a step: for each unscaled optimizer, whether its gradients are finite; and those that have stepped.
        self._finite: dict[int, Tensor] = {}
        self._stepped: set[int] = set()
        self._gradients: list[Tensor] = []  # unscaled, but not clipped yet

    def is_enabled(self) -> bool:
        """Whether the scaler has any effect.

        Returns:
            False for a fixed scale of 1.
        """
        return self._scales

    def scale(self, losses: T) -> T:
        """Multiply the loss by the scale.

        Args:
            losses: a loss, or a list or tuple of losses, of any floating-point dtype.

        Returns:
            The same structure, in float32.
        """
        self._clear()
        if isinstance(losses, (list, tuple)):
            return type(losses)(self.scale(loss) for loss in losses)
        assert isinstance(losses, Tensor)
        return losses.float() * self._scale.to(losses.device) if self._scales else losses.float()  # type: ignore

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of the optimizer's parameters by the scale, in place.

        Args:
            optimizer: the optimizer; parameters without a gradient are skipped.

        Raises:
            PrecisionError: if they are already unscaled in this step.
        """
        if id(optimizer) in self._finite:
            raise PrecisionError("unscale_ has been called for this optimizer since the last update().")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._scales and gradients:
            torch._foreach_mul_(gradients, 1.0 / self._scale.to(gradients[0].device))
        self._finite[id(optimizer)] = _all_finite(gradients) if self.dynamic and gradients else torch.tensor(True)
        self._gradients += gradients

    def together(self) -> None:
        """Make all unscaled optimizers step, or none of them."""
        if self.dynamic and len(self._finite) > 1:
            finite = torch.stack(list(self._finite.values())).all()
            self._finite = dict.fromkeys(self._finite, finite)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run `optimizer.step()` with unscaled gradients. With a dynamic scale, weights and state stay unchanged if a
        gradient is infinite or NaN.

        Args:
            optimizer: the optimizer; its gradients are unscaled unless `unscale_` has been called.
            *args, **kwargs: passed to `optimizer.step`.

        Returns:
            The result of `optimizer.step`; None if it is skipped.

        Raises:
            PrecisionError: if it was called since the last `update`.
        """
        if id(optimizer) in self._stepped:
            raise PrecisionError("step has been called for this optimizer since the last update().")
        if id(optimizer) not in self._finite:
            if self._stepped and self._max_gradient_norm is not None:
                raise PrecisionError(
                    "with max_gradient_norm, call unscale_ for all optimizers before the first step: their gradients "
                    "are clipped together."
                )
            self.unscale_(optimizer)
        if self._max_gradient_norm is not None and self._gradients:
            norm = torch.nn.utils.get_total_norm(self._gradients)
            torch._foreach_mul_(self._gradients, (self._max_gradient_norm / (norm + 1e-6)).clamp(max=1.0))
        self._gradients = []
        self._stepped.add(id(optimizer))
        if not self.dynamic:
            return optimizer.step(*args, **kwargs)
        finite = self._finite[id(optimizer)]
        if not torch.compiler.is_compiling():
            return optimizer.step(*args, **kwargs) if finite else None
        return _step_if(finite, optimizer, args, kwargs)

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale, after all optimizers have stepped.

        Args:
            new_scale: set a dynamic scale to this, regardless of overflows.

        Raises:
            PrecisionError: for `new_scale` with a constant scale.
        """
        if new_scale is not None:
            if not self.dynamic:
                raise PrecisionError(f"update(new_scale={new_scale!r}) is for loss_scale='dynamic'.")
            self._scale.copy_(torch.as_tensor(new_scale, dtype=torch.float32))
        elif self.dynamic and self._finite:
            overflow = ~torch.stack([finite.cpu() for finite in self._finite.values()]).all()
            self._skipped.add_(overflow)
            self._steps.add_(1)
            self._overflows.add_(overflow)
            down = self._overflows > self._overflow_tolerance * self._steps
            up = ~down & (self._steps >= self._steps_per_increase)
            scale = torch.where(down, self._scale / 2, torch.where(up, self._scale * 2, self._scale))
            self._scale.copy_(scale.clamp(*self._limits))
            unchanged = ~(down | up)
            self._steps.mul_(unchanged)
            self._overflows.mul_(unchanged)
        self._clear()

    def _clear(self) -> None:
        self._finite.clear()
        self._stepped.clear()
        self._gradients = []

    def get_scale(self) -> Any:
        """The current scale; in a traced step, a tensor.

        Returns:
            A float; in a traced step, a float32 scalar tensor.
        """
        return self._scale.clone() if torch.compiler.is_compiling() else float(self._scale)

    def get_num_skipped_steps(self) -> Any:
        """The number of steps skipped so far; in a traced step, a tensor.

        Returns:
            An int; in a traced step, an int64 scalar tensor.
        """
        return self._skipped.clone() if torch.compiler.is_compiling() else int(self._skipped)

    def state_dict(self) -> dict[str, Tensor]:
        """The scale and its counters.

        Returns:
            Four scalar tensors, by name, for `load_state_dict`.
        """
        return dict(zip(_STATE, (self._scale, self._steps, self._overflows, self._skipped), strict=True))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the scale and its counters.

        Args:
            state_dict: returned by `state_dict`; plain numbers are accepted.

        Raises:
            PrecisionError: if an entry is missing.
        """
        missing = [key for key in _STATE if key not in state_dict]
        if missing:
            raise PrecisionError(f"a GradScaler's state has {', '.join(_STATE)}; this one lacks {', '.join(missing)}.")
        for key, tensor in self.state_dict().items():
            tensor.copy_(torch.as_tensor(state_dict[key]))


def _is_positive(scale: Any) -> bool:
    """Whether `scale` is a positive, finite number."""
    return isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale < float("inf")


_STATE = ("loss_scale", "steps_since_rescale", "overflows_since_rescale", "num_skipped_steps")


def _all_finite(gradients: list[Tensor]) -> Tensor:
    largest = torch._foreach_norm(gradients, float("inf"))  # propagates NaN
    return torch.stack([norm.to(largest[0].device).float() for norm in largest]).isfinite().all()


def _step_if(finite: Tensor, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Step, and revert every change unless `finite`."""
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    before: dict[int, Tensor] = {}

    def changing() -> list[Tensor]:
        state = pytree.tree_leaves(list(optimizer.state.values()))
        return [*weights, *(entry for entry in state if isinstance(entry, Tensor))]

    has_state = is_known(optimizer) or any(optimizer.state.get(p) for p in weights)
    if not has_state and session.trace is not None and session.trace.may_read():
        # the first step may do anything to create its state, so it is not to be reverted
        return optimizer.step(*args, **kwargs) if finite else None

    trace = session.trace  # in whose simulated steps nothing is to be reverted

    def remember(*_: Any) -> None:  # after the runtime has created the first step's state
        if session.trace is not trace:
            return
        before.update({id(tensor): tensor.clone() for tensor in changing()})

    def revert(*_: Any) -> None:
        if session.trace is not trace:
            return
        for tensor in changing():
            old = before.get(id(tensor))
            if old is None:
                raise TraceError(
                    f"{type(optimizer).__name__} initializes its state from its first gradients, so its first step "
                    "cannot be skipped. Use a constant loss_scale, or an optimizer whose state starts as zeros."
                )
            tensor.copy_(torch.where(finite, tensor, old))
        before.clear()

    hooks = (optimizer.register_step_pre_hook(remember), optimizer.register_step_post_hook(revert))
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
