"""Adam and AdamW on `AdamBase`."""

from __future__ import annotations

from typing import Any

import torch

from ...optim.adam_base import AdamBase


class AdamW(AdamBase):
    """AdamW as computed by `AdamBase`. Without weight decay by default; PyTorch's default is 0.01."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, 0.0, correct_bias, amsgrad)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an AdamW: this one, PyTorch's, or `cerebras.pytorch`'s."""
        super().load_state_dict(with_our_names(state_dict, {"l2_regularization_rate": 0.0, "correct_bias": True}))


class Adam(AdamBase):
    """Adam as computed by `AdamBase`. `weight_decay` is added to the gradient; in the groups it is called
    "l2_regularization_rate"."""

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, 0.0, weight_decay, True, amsgrad)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; a "weight_decay" in it is the one that is added to the gradient."""
        super().add_param_group(_coupled(param_group))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an Adam: this one, PyTorch's, or `cerebras.pytorch`'s."""
        renamed = with_our_names(state_dict, {"correct_bias": True})
        groups = [_coupled(group) for group in renamed["param_groups"]]
        super().load_state_dict({**renamed, "param_groups": groups})


def _coupled(group: dict[str, Any]) -> dict[str, Any]:
    if "l2_regularization_rate" in group or "weight_decay" not in group:
        return group
    return {**group, "l2_regularization_rate": group["weight_decay"], "weight_decay": 0.0}


def with_our_names(state_dict: dict[str, Any], missing: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with defaults `missing` in the groups, and with steps in place of powers of beta1:
    `cerebras.pytorch` stores beta1^(t + 1) after t steps."""
    groups = [{**missing, **group} for group in state_dict["param_groups"]]
    beta1 = {index: float(group["betas"][0]) for group in groups for index in group["params"]}
    state = {}
    for index, entries in state_dict["state"].items():
        entries = dict(entries)
        power = entries.pop("beta1_power", None)
        entries.pop("beta2_power", None)
        if power is not None and "step" not in entries:
            base = torch.tensor(beta1[index], dtype=torch.float64)
            step = torch.as_tensor(power, dtype=torch.float64).log() / base.log() - 1
            entries["step"] = step.round().float().cpu()
        state[index] = entries
    return {**state_dict, "state": state, "param_groups": groups}
