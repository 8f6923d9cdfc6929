"""The dtypes that a step computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import firstloss as fl

from ..errors import PrecisionError, TrainerError
from ..settings import Settings

_DTYPES = ("float32", "bfloat16", "float16", "cbfloat16")
_SCALED = ("float16", "cbfloat16")


@dataclass
class Precision(Settings):
    """Weights and updates are float32; matrix products and convolutions are computed in `dtype`.

    Attributes:
        dtype: "float32"; or mixed with "bfloat16", or with "float16" or "cbfloat16" and loss scaling.
        loss_scale: "dynamic", or a number; for "float16" and "cbfloat16" only, where None is "dynamic". With a dynamic
            one, a step whose gradients overflow is left out.

    Raises:
        TrainerError: for another dtype, a scale that is no positive number, or one for a dtype that needs none.
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
                f"Precision: loss_scale={self.loss_scale!r} would do nothing with dtype={self.dtype!r}, whose range is "
                'that of float32. Leave it out; it is for "float16" and "cbfloat16".'
            )
        try:
            fl.amp.GradScaler(loss_scale=self.loss_scale)
        except PrecisionError as error:
            raise TrainerError(f"Precision: {error}") from None

    def setup(self) -> None:
        """Called once, before the steps are made."""
        self.choose()
        if self.dtype in _SCALED:
            self.scaler = fl.amp.GradScaler(loss_scale="dynamic" if self.loss_scale is None else self.loss_scale)

    def choose(self) -> None:
        """Make this the dtype of the process, in which another Trainer may have set another; not within a step."""
        if self.dtype != "float32":
            fl.amp.set_half_dtype(self.dtype)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass.

        Yields:
            None, once; to be used in a `with` statement.
        """
        if self.dtype == "float32":
            yield
        else:
            with fl.amp.autocast():
                yield

    def backward(self, loss: torch.Tensor) -> None:
        """Instead of `loss.backward()`.

        Args:
            loss: without dimensions, not scaled.
        """
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Before gradients are clipped.

        Args:
            optimizer: whose weights' gradients are unscaled.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Instead of `optimizer.step()`.

        Args:
            optimizer: whose weights are updated, unless gradients overflow under a dynamic scale.
        """
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    @property
    def clip_norm(self) -> float | None:
        """What it clips gradients to, all together."""
        return None

    @property
    def clip_value(self) -> float | None:
        """What it clips each gradient's elements to."""
        return None

    def scale(self) -> torch.Tensor | None:
        """The loss scale, if it is to be logged.

        Returns:
            Without dimensions; None if it is not.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and its counts.

        Returns:
            What `amp.GradScaler.state_dict` returns; `{}` without a loss scale.
        """
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the loss scale and the counts of another run.

        Args:
            state: what `state_dict` returned.
        """
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


@dataclass(init=False)
class MixedPrecision(Precision):
    """`Precision` with the arguments of Model Zoo's `MixedPrecision`.

    Attributes:
        enabled: False: float32.
        fp16_type: "bfloat16", "float16" or "cbfloat16".
        precision_opt_level: None: it is of Cerebras' compiler.
        loss_scaling_factor: "dynamic", or a number; 1: nothing is scaled.
        initial_loss_scale, steps_per_increase, min_loss_scale, max_loss_scale: of a dynamic one, as `amp.GradScaler`
            takes them.
        max_gradient_norm: scale all gradients so that their norm together is at most this.
        max_gradient_value: cut each gradient's elements at plus and minus this.
        log_loss_scale: log it; by default where it changes.

    Raises:
        TrainerError: for numbers that make no sense, and for a `precision_opt_level`, which is of Cerebras' compiler.
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
            raise TrainerError(
                f"MixedPrecision: precision_opt_level={precision_opt_level!r} chooses kernels of Cerebras' compiler, "
                "and would do nothing here. Leave it out."
            )
        if max_gradient_norm is not None and max_gradient_value is not None:
            raise TrainerError("MixedPrecision clips by norm or by value, not both. Leave one of them out.")
        for name, limit in (("max_gradient_norm", max_gradient_norm), ("max_gradient_value", max_gradient_value)):
            if limit is not None and not limit > 0:
                raise TrainerError(f"MixedPrecision: {name}={limit!r} is not above 0.")
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
            raise TrainerError(f"MixedPrecision: fp16_type={self.fp16_type!r} is none of {', '.join(_DTYPES[1:])}.")
        if self.enabled and self.loss_scaling_factor != 1.0:
            self._new_scaler()

    def _new_scaler(self) -> Any:
        dynamic = self.loss_scaling_factor == "dynamic"
        limits = {
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
