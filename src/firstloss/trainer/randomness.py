"""Seeding, saving and restoring the random state of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed torch's, numpy's and Python's generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def random_state() -> dict[str, Any]:
    """The state of torch's, numpy's and Python's generators, as tensors and plain numbers."""
    version, words, cached = random.getstate()
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [state.cpu() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else [],
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "cached": cached},
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(list(state["cuda"]))
    numpy, python = state["numpy"], state["python"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    random.setstate((python["version"], tuple(python["words"].tolist()), python["cached"]))


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the generators' states at the end of the block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
