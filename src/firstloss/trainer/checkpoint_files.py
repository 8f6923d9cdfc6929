"""Writing and reading checkpoint files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

import firstloss as fl

from ..errors import TrainerError
from ..files import remove_folder


def save(state: dict[str, Any], path: str) -> None:
    """Write `state` atomically."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fl.save(state, path)


def remove(path: str) -> None:
    """Delete a checkpoint; renamed first, so that a partly deleted one is never found."""
    hidden = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.gone")
    os.replace(path, hidden)
    remove_folder(hidden)


def load_weights(path: str, preprocess: Callable[[Any], None]) -> tuple[Mapping[str, torch.Tensor], Any]:
    """Load weights by name from a Trainer checkpoint, a safetensors file or a Hugging Face folder.

    `preprocess` is called first, with everything in the file. Returns the weights, and everything in the file.
    """
    contents = fl.load(path)
    preprocess(contents)
    weights = contents
    if isinstance(contents, Mapping) and isinstance(contents.get("model"), Mapping):
        weights = contents["model"]
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise TrainerError(f"ckpt_path {path!r} does not hold a mapping of names to tensors.")
    return weights, contents
