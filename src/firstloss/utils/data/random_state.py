"""Saving and restoring the random generators that a loader may use: PyTorch's, Python's, NumPy's."""

from __future__ import annotations

import contextlib
import random
from typing import Any, NamedTuple

import numpy as np
import torch

from ...runtime.backend import current_backend


class RandomState(NamedTuple):
    """The states of the generators; `own` are those of the loader and its sampler."""

    pytorch: torch.Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    own: tuple[torch.Tensor, ...]

    @classmethod
    def now(cls, loader: Any) -> RandomState:
        """The current states."""
        own = tuple(g.get_state() for g in _own(loader))
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state(), own)

    def restore(self, loader: Any) -> None:
        """Restore the generators to these states."""
        backend = current_backend(raise_exception=False)
        with contextlib.nullcontext() if backend is None else backend.keys.unaffected_by_reseeding():
            torch.set_rng_state(self.pytorch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        for generator, state in zip(_own(loader), self.own, strict=False):
            generator.set_state(state)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The states as tensors for a checkpoint: bytes, integers, and float64 for cached normals."""
        version, words, cached = self.python
        name, key, pos, has_gauss, gauss = self.numpy
        out = {
            "torch": self.pytorch,
            "python": torch.tensor([version, *words]),
            "python_cached": torch.tensor([] if cached is None else [cached], dtype=torch.float64),
            "numpy": torch.tensor([*key.tolist(), pos, has_gauss]),
            "numpy_cached": torch.tensor([gauss], dtype=torch.float64),
        }
        out.update({f"own{i}": state for i, state in enumerate(self.own)})
        return out

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> RandomState:
        """The inverse of `tensors`."""
        version, *words = tensors["python"].tolist()
        cached = tensors["python_cached"].tolist()
        *key, pos, has_gauss = tensors["numpy"].tolist()
        own: list[torch.Tensor] = []
        while f"own{len(own)}" in tensors:
            own.append(tensors[f"own{len(own)}"])
        return cls(
            tensors["torch"],
            (version, tuple(words), cached[0] if cached else None),
            ("MT19937", np.array(key, np.uint32), pos, has_gauss, float(tensors["numpy_cached"])),
            tuple(own),
        )


def _own(loader: Any) -> list[torch.Generator]:
    """The generators of the loader and its sampler."""
    generators: list[torch.Generator] = []
    for owner in (loader, getattr(loader, "sampler", None)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(g is generator for g in generators):
            generators.append(generator)
    return generators
