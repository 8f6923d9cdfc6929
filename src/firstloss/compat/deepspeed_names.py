"""What is used of DeepSpeed that it does not document."""

from __future__ import annotations

from typing import Any

import torch


def begin_partitions(init: Any, parameter: torch.Tensor) -> None:
    """Give a parameter the attributes and methods of ZeRO, of a `zero.Init`."""
    init._convert_to_deepspeed_param(parameter)
