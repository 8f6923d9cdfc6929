"""Where checkpoints become files, and files weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

import firstloss as fl

from ..errors import TrainerError
from ..files import written_aside


def save(state: dict[str, Any], path: str) -> None:
    """Write `state`; a reader finds it whole or not at all."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if hasattr(fl, "save"):
        fl.save(state, path)
        return
    on_host = pytree.tree_map(lambda x: x.detach().clone().cpu() if isinstance(x, torch.Tensor) else x, state)
    with written_aside(path) as file:
        torch.save(on_host, file)


def load(path: str) -> Any:
    """What `save` wrote."""
    if hasattr(fl, "load"):
        return fl.load(path)
    return torch.load(path, weights_only=True)


def remove(path: str) -> None:
    """Take a checkpoint away; one that is half gone has no name that anybody would look for."""
    gone = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.gone")
    os.replace(path, gone)
    shutil.rmtree(gone) if os.path.isdir(gone) else os.unlink(gone)


def load_weights(path: str) -> Mapping[str, torch.Tensor]:
    """A model's weights by name from a checkpoint of the Trainer's, a safetensors file, or a Hugging Face folder."""
    if not os.path.exists(path):
        raise TrainerError(
            f"ckpt_path {path!r} is not there. Give a checkpoint, a safetensors file or a model's folder."
        )
    found = load(path)
    if isinstance(found, Mapping) and isinstance(found.get("model"), Mapping):
        found = found["model"]
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise TrainerError(f"ckpt_path {path!r} holds no weights by name.")
    return found
