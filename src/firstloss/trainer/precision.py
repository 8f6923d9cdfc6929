"""The dtypes that a step computes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import firstloss as fl

from ..errors import TrainerError

_DTYPES = ("float32", "bfloat16", "float16", "cbfloat16")


@dataclass
class Precision:
    """Weights and updates are float32; matrix products and convolutions are computed in `dtype`.

    Attributes:
        dtype: "float32"; or mixed with "bfloat16", or with "float16" or "cbfloat16" and loss scaling.
        loss_scale: "dynamic", or a number. With a dynamic one, a step whose gradients overflow is left out.
    """

    dtype: str = "float32"
    loss_scale: float | str = "dynamic"
    _scaler: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise TrainerError(f"Precision: dtype={self.dtype!r} is not one of {', '.join(_DTYPES)}.")

    def setup(self) -> None:
        """Called once, before the steps are made."""
        self.choose()
        if self.dtype in ("float16", "cbfloat16"):
            self._scaler = fl.amp.GradScaler(loss_scale=self.loss_scale)

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
