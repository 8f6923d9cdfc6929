"""Mixed precision settings of the Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import firstloss as fl

from ..errors import PrecisionError, TrainerError
from ..no_effect import say_no_effect
from ..settings import Settings

_DTYPES = ("float32", "bfloat16", "float16", "cbfloat16")
_SCALED = ("float16", "cbfloat16")


@dataclass
class Precision(Settings):
    """Mixed precision: weights and updates are float32; matrix products and convolutions are computed in `dtype`.

    Attributes:
        dtype: "float32", "bfloat16", or "float16" or "cbfloat16", which use loss scaling.
        loss_scale: "dynamic" (the default) or a number, for "float16" and "cbfloat16" only. With a dynamic scale,
            steps whose gradients overflow are skipped.

    Raises:
        TrainerError: for an unknown dtype, a scale that is not positive, or a scale for a dtype that needs none.
    """

    dtype: str = "float32"
    loss_scale: float | str | None = None
    scaler: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise TrainerError(f"Precision: dtype={self.dtype!r} is not one of {', '.join(_DTYPES)}.")
        if self.loss_scale is None:
            return
        if self.dtype not in _SCALED:
            raise TrainerError(
                f"Precision: loss_scale={self.loss_scale!r} has no effect with dtype={self.dtype!r}, whose range is "
                'that of float32. Leave it out; it is for "float16" and "cbfloat16".'
            )
        try:
            fl.amp.GradScaler(loss_scale=self.loss_scale)
        except PrecisionError as error:
            raise TrainerError(f"Precision: {error}") from None

    def setup(self) -> None:
        """Create the loss scaler. Called once, before the steps are created."""
        self.choose()
        if self.dtype in _SCALED:
            self.scaler = fl.amp.GradScaler(loss_scale="dynamic" if self.loss_scale is None else self.loss_scale)

    def choose(self) -> None:
        """Set the process's half dtype, which another Trainer may have changed. Not to be called within a step."""
        if self.dtype != "float32":
            fl.amp.set_half_dtype(self.dtype)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context of the forward pass.

        Yields:
            None.
        """
        if self.dtype == "float32":
            yield
        else:
            with fl.amp.autocast():
                yield

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass, with loss scaling if it is used.

        Args:
            loss: the unscaled loss, a scalar tensor.
        """
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients, before they are clipped.

        Args:
            optimizer: the optimizer whose parameters' gradients are unscaled.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Run `optimizer.step()`, with loss scaling if it is used.

        Args:
            optimizer: skipped if gradients overflow under a dynamic scale.
        """
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    @property
    def clip_norm(self) -> float | None:
        """The total norm that gradients are clipped to, if any."""
        return None

    @property
    def clip_value(self) -> float | None:
        """The value that gradient elements are clipped to, if any."""
        return None

    def scale(self) -> torch.Tensor | None:
        """The loss scale, if it is to be logged.

        Returns:
            A scalar tensor, or None.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its counts.

        Returns:
            What `amp.GradScaler.state_dict` returns; `{}` without a loss scale.
        """
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the loss scale and its counts.

        Args:
            state: what `state_dict` returned.
        """
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


@dataclass(init=False)
class MixedPrecision(Precision):
    """`Precision` with the arguments of Model Zoo's `MixedPrecision`.

    Attributes:
        enabled: whether to use mixed precision; False is float32.
        fp16_type: "bfloat16", "float16" or "cbfloat16".
        precision_opt_level: no effect: an option of Cerebras' compiler.
        loss_scaling_factor: "dynamic" or a number; 1 disables loss scaling.
        initial_loss_scale, steps_per_increase, min_loss_scale, max_loss_scale: of a dynamic scale, as in
            `amp.GradScaler`.
        max_gradient_norm: clip the gradients' total norm to this.
        max_gradient_value: clip each element of the gradients to plus or minus this.
        log_loss_scale: whether to log the loss scale; by default if it is dynamic.

    Raises:
        TrainerError: for invalid numbers.
    """

    enabled: bool = True
    fp16_type: str = "bfloat16"
    loss_scaling_factor: float | str = 1.0
    initial_loss_scale: float | None = None
    steps_per_increase: int = 2000
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None
    max_gradient_norm: float | None = None
    max_gradient_value: float | None = None
    log_loss_scale: bool | None = None

    def __init__(
        self,
        enabled: bool = True,
        fp16_type: str = "bfloat16",
        precision_opt_level: int | None = None,
        loss_scaling_factor: float | str = 1.0,
        initial_loss_scale: float | None = None,
        steps_per_increase: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
        max_gradient_norm: float | None = None,
        max_gradient_value: float | None = None,
        log_loss_scale: bool | None = None,
    ) -> None:
        if precision_opt_level is not None:
            say_no_effect("MixedPrecision's precision_opt_level")
        if max_gradient_norm is not None and max_gradient_value is not None:
            raise TrainerError("MixedPrecision clips by norm or by value, not both. Leave one of them out.")
        for name, limit in (("max_gradient_norm", max_gradient_norm), ("max_gradient_value", max_gradient_value)):
            if limit is not None and not limit > 0:
                raise TrainerError(f"MixedPrecision: {name}={limit!r} is not positive.")
        own = {
            "enabled": enabled,
            "fp16_type": fp16_type,
            "loss_scaling_factor": loss_scaling_factor,
            "initial_loss_scale": initial_loss_scale,
            "steps_per_increase": steps_per_increase,
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
            "max_gradient_norm": max_gradient_norm,
            "max_gradient_value": max_gradient_value,
            "log_loss_scale": log_loss_scale,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "dtype", fp16_type if enabled else "float32")
        object.__setattr__(self, "loss_scale", None)
        object.__setattr__(self, "scaler", None)
        self.__post_init__()

    def __post_init__(self) -> None:
        if self.fp16_type not in _DTYPES[1:]:
            raise TrainerError(f"MixedPrecision: fp16_type={self.fp16_type!r} is not one of {', '.join(_DTYPES[1:])}.")
        if self.enabled and self.loss_scaling_factor != 1.0:
            self._new_scaler()

    def _new_scaler(self) -> Any:
        dynamic = self.loss_scaling_factor == "dynamic"
        limits: dict[str, Any] = {
            "init_scale": self.initial_loss_scale,
            "steps_per_increase": self.steps_per_increase if dynamic else None,
            "min_loss_scale": self.min_loss_scale,
            "max_loss_scale": self.max_loss_scale,
        }
        try:
            return fl.amp.GradScaler(loss_scale=self.loss_scaling_factor, **limits)
        except PrecisionError as error:
            raise TrainerError(f"MixedPrecision: {error}") from None

    def setup(self) -> None:
        self.choose()
        if self.enabled and self.loss_scaling_factor != 1.0:
            object.__setattr__(self, "scaler", self._new_scaler())

    @property
    def clip_norm(self) -> float | None:
        return self.max_gradient_norm

    @property
    def clip_value(self) -> float | None:
        return self.max_gradient_value

    def scale(self) -> torch.Tensor | None:
        wanted = self.loss_scaling_factor == "dynamic" if self.log_loss_scale is None else self.log_loss_scale
        return None if not wanted or self.scaler is None else torch.as_tensor(self.scaler.get_scale())
