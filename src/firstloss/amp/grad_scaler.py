"""Loss scaling whose decisions are tensors."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..capture import session
from ..errors import PrecisionError, TraceError
from .precision import get_half_dtype

Tensor = torch.Tensor
T = TypeVar("T")


class GradScaler:
    """Scale the loss, so that small gradients survive half precision; and leave out steps whose gradients overflow.

    As `torch.amp.GradScaler`, with the arguments of Cerebras' `cstorch.amp.GradScaler`; and it works in a traced step,
    since whether a step is left out is a tensor there: the update is computed and thrown away.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # if gradients are looked at, or clipped
        scaler.step(optimizer)
        scaler.update()

    Args:
        loss_scale: "dynamic", or a number, by which every loss is multiplied; then no step is left out. 1 by default.
        init_scale: where a dynamic scale begins; by default as large as it may become.
        steps_per_increase: after so many steps without a change it is doubled.
        min_loss_scale, max_loss_scale: its limits; at most 2^15 by default, with cbfloat16 2^31.
        overflow_tolerance: it is halved when more than this part of the steps since its last change have overflown.

    Raises:
        PrecisionError: for limits that leave it no room.
    """

    def __init__(
        self,
        loss_scale: str | float | None = None,
        init_scale: float | None = None,
        steps_per_increase: int = 2000,
        min_loss_scale: float = 2.0**-14,
        max_loss_scale: float | None = None,
        overflow_tolerance: float = 0.0,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        if isinstance(loss_scale, str) and not self.dynamic or isinstance(loss_scale, float) and not loss_scale > 0:
            raise PrecisionError(f"loss_scale is 'dynamic' or a positive number, and not {loss_scale!r}.")
        if max_loss_scale is None:
            max_loss_scale = 2.0**31 if get_half_dtype() == "cbfloat16" else 2.0**15
        if not 0 < min_loss_scale <= max_loss_scale or overflow_tolerance < 0 or steps_per_increase < 1:
            raise PrecisionError(
                f"a dynamic scale needs room: min_loss_scale={min_loss_scale}, max_loss_scale={max_loss_scale}, "
                f"overflow_tolerance={overflow_tolerance}, steps_per_increase={steps_per_increase}."
            )
        self._limits = (min_loss_scale, max_loss_scale)
        self._steps_per_increase = steps_per_increase
        self._overflow_tolerance = overflow_tolerance
        begin = min(init_scale or max_loss_scale, max_loss_scale) if self.dynamic else float(loss_scale or 1.0)
        self._scale = torch.tensor(begin, dtype=torch.float32, device="cpu")
        self._steps = torch.zeros((), dtype=torch.int64, device="cpu")
        self._overflows = torch.zeros((), dtype=torch.int64, device="cpu")
        self._skipped = torch.zeros((), dtype=torch.int64, device="cpu")
        self._scales = self.dynamic or begin != 1.0
        # Of the step under way: for each optimizer that is unscaled, whether its gradients are finite; and those done.
        self._finite: dict[int, Tensor] = {}
        self._stepped: set[int] = set()

    def is_enabled(self) -> bool:
        """Whether it does anything."""
        return self._scales

    def scale(self, losses: T) -> T:
        """The loss, or losses in a list or tuple, in float32 times the scale."""
        self._finite.clear()
        self._stepped.clear()
        if isinstance(losses, (list, tuple)):
            return type(losses)(self.scale(loss) for loss in losses)
        assert isinstance(losses, Tensor)
        return losses.float() * self._scale.to(losses.device) if self._scales else losses.float()  # type: ignore

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of the optimizer's weights by the scale, in place.

        Raises:
            PrecisionError: if it has been done in this step already.
        """
        if id(optimizer) in self._finite:
            raise PrecisionError("unscale_ has been called for this optimizer since the last update().")
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self._scales and gradients:
            torch._foreach_mul_(gradients, 1.0 / self._scale.to(gradients[0].device))
        self._finite[id(optimizer)] = _all_finite(gradients) if self.dynamic and gradients else torch.tensor(True)

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """`optimizer.step()` with unscaled gradients; with a dynamic scale, weights and state stay as they are if a
        gradient is infinite or no number.

        Raises:
            PrecisionError: if it has been done since the last `update`.
        """
        if id(optimizer) in self._stepped:
            raise PrecisionError("step has been called for this optimizer since the last update().")
        if id(optimizer) not in self._finite:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        if not self.dynamic:
            return optimizer.step(*args, **kwargs)
        finite = self._finite[id(optimizer)]
        if not torch.compiler.is_compiling():
            return optimizer.step(*args, **kwargs) if finite else None
        return _step_if(finite, optimizer, args, kwargs)

    @torch.no_grad()
    def update(self) -> None:
        """Choose the next step's scale, after all optimizers have stepped."""
        if self.dynamic and self._finite:
            overflow = ~torch.stack([finite.cpu() for finite in self._finite.values()]).all()
            self._skipped.add_(overflow)
            self._steps.add_(1)
            self._overflows.add_(overflow)
            down = self._overflows > self._overflow_tolerance * self._steps
            up = ~down & (self._steps >= self._steps_per_increase)
            scale = torch.where(down, self._scale / 2, torch.where(up, self._scale * 2, self._scale))
            self._scale.copy_(scale.clamp(*self._limits))
            kept = ~(down | up)
            self._steps.mul_(kept)
            self._overflows.mul_(kept)
        self._finite.clear()
        self._stepped.clear()

    def get_scale(self) -> Any:
        """The scale of now; in a traced step, a tensor."""
        return self._scale.clone() if torch.compiler.is_compiling() else float(self._scale)

    def get_num_skipped_steps(self) -> Any:
        """How many steps have been left out so far; in a traced step, a tensor."""
        return self._skipped.clone() if torch.compiler.is_compiling() else int(self._skipped)

    def state_dict(self) -> dict[str, Tensor]:
        """The scale and its counts."""
        return dict(zip(_STATE, (self._scale, self._steps, self._overflows, self._skipped), strict=True))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the scale and the counts of another.

        Raises:
            PrecisionError: if one is missing.
        """
        missing = [key for key in _STATE if key not in state_dict]
        if missing:
            raise PrecisionError(f"a GradScaler's state has {', '.join(_STATE)}, and this has no {', '.join(missing)}.")
        for key, tensor in self.state_dict().items():
            tensor.copy_(torch.as_tensor(state_dict[key]))


_STATE = ("loss_scale", "steps_since_rescale", "overflows_since_rescale", "num_skipped_steps")


def _all_finite(gradients: list[Tensor]) -> Tensor:
    largest = torch._foreach_norm(gradients, float("inf"))  # of which NaN is the largest, too
    return torch.stack([norm.to(largest[0].device).float() for norm in largest]).isfinite().all()


def _step_if(finite: Tensor, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A step whose every change is taken back unless `finite`."""
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    before: dict[int, Tensor] = {}

    def changing() -> list[Tensor]:
        state = (entry for p in weights for entry in optimizer.state.get(p, {}).values())
        return [*weights, *(entry for entry in state if isinstance(entry, Tensor))]

    trace = session.trace  # in whose rehearsals nothing is to be taken back

    def remember(*_: Any) -> None:  # after the runtime has made the state that the first step would make
        if session.trace is not trace:
            return
        before.update({id(tensor): tensor.clone() for tensor in changing()})

    def take_back(*_: Any) -> None:
        if session.trace is not trace:
            return
        for tensor in changing():
            old = before.get(id(tensor))
            if old is None:
                raise TraceError(
                    f"{type(optimizer).__name__} makes its state from its first gradients, so that its first step "
                    "cannot be left out. Use a fixed loss_scale, or an optimizer whose state begins as zeros."
                )
            tensor.copy_(torch.where(finite, tensor, old))
        before.clear()

    hooks = (optimizer.register_step_pre_hook(remember), optimizer.register_step_post_hook(take_back))
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
