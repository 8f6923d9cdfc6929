"""`torch.nn` under the names of `cerebras.pytorch.nn`, and the losses that PyTorch does not have."""

from __future__ import annotations

import torch
from torch.nn import Buffer, Parameter

from ..accepted import unsupported_class
from . import functional as functional
from . import modules as modules
from .modules import *  # noqa: F403


class Scope(torch.nn.Module):
    """A named part of a model, for Cerebras' compiler. No effect: both directions return their input."""

    def __init__(self, scope_name: str) -> None:
        super().__init__()
        self.scope_name = scope_name

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input

    def exit(self, input: torch.Tensor) -> torch.Tensor:
        """The end of the part."""
        return input


SelectiveGrad: type = unsupported_class(
    "nn", "SelectiveGrad", "it drops parts of gradients: edit them in the step, between backward and optimizer.step()."
)

__all__ = ["Buffer", "Parameter", "Scope", "SelectiveGrad", "functional", *modules.__all__]
