"""Write and read the files of checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch

import firstloss as fl

from ..errors import TrainerError


def save(state: dict[str, Any], path: str) -> None:
    """Write `state`; a reader finds it whole or not at all."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fl.save(state, path)


def remove(path: str) -> None:
    """Take a checkpoint away; one that is half gone has no name that anybody would look for."""
    gone = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.gone")
    os.replace(path, gone)
    shutil.rmtree(gone)


def load_weights(path: str) -> tuple[Mapping[str, torch.Tensor], Any]:
    """A model's weights by name from a checkpoint of the Trainer's, a safetensors file, or a Hugging Face folder; and
    all that is there."""
    found = weights = fl.load(path)
    if isinstance(found, Mapping) and isinstance(found.get("model"), Mapping):
        weights = found["model"]
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise TrainerError(f"ckpt_path {path!r} holds no weights by name.")
    return weights, found
