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
    _scaler: Any = field(default=None, init=False, repr=False)

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
            self._scaler = fl.amp.GradScaler(loss_scale="dynamic" if self.loss_scale is None else self.loss_scale)

    def choose(self) -> None:
        """Make this the dtype of the process, in which another Trainer may have set another; not within a step."""
        if self.dtype != "float32":
            fl.amp.set_half_dtype(self.dtype)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass."""
        if self.dtype == "float32":
            yield
        else:
            with fl.amp.autocast():
                yield

    def backward(self, loss: torch.Tensor) -> None:
        """Instead of `loss.backward()`."""
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Before gradients are clipped."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Instead of `optimizer.step()`."""
        if self._scaler is None:
            optimizer.step()
        else:
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)
