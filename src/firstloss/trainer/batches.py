"""The batches of a loader, epoch after epoch, from a position that can be saved and found again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..errors import TrainerError
from .randomness import random_state, set_random_state


class Batches:
    """Where training is in its loader.

    A loader with `state_dict` and `load_state_dict` is asked to go to its position itself. Any other is brought there:
    the random state in which the epoch began is restored, the loader is iterated anew, and the batches that were
    trained on already are drawn and dropped, so that its shuffling, its workers and its data's own randomness come out
    the same; then the random state goes on from where the checkpoint had it.

    Attributes:
        epoch: passes completed.
        index: batches given in this pass.
    """

    def __init__(self, loader: Iterable[Any], epoch: int = 0) -> None:
        if isinstance(loader, Iterator):
            raise TrainerError(
                f"the training data is an iterator ({type(loader).__name__}), which can be gone through once only. "
                "Pass a loader that can be iterated again: a DataLoader, a list, or an object with __iter__."
            )
        self.loader = loader
        self.epoch = epoch
        self.index = 0
        self._began: dict[str, Any] | None = None  # the random state at the beginning of the pass
        self._saved: dict[str, Any] | None = None  # the loader's own state, to be loaded at the next pass

    def rest_of_epoch(self) -> Iterator[Any]:
        """The batches from the position on to the end of the pass; counts them, and the epoch at the end."""
        skip, self.index = self.index, 0
        if skip and self._saved is not None:
            self.loader.load_state_dict(self._saved)  # type: ignore[attr-defined]
            self._saved, self.index, skip = None, skip, 0
            iterator = iter(self.loader)
        elif skip:
            iterator = self._replayed(skip)
        else:
            self._began = {"random": random_state(), "generators": [g.get_state() for g in self._generators()]}
            iterator = self._begin()
        for batch in iterator:
            self.index += 1
            yield batch
        if self.index == 0:
            raise TrainerError(
                f"the training loader ({type(self.loader).__name__}) gave no batch. With drop_last=True, it needs at "
                "least batch_size samples."
            )
        self.epoch += 1
        self.index = 0

    def _begin(self) -> Iterator[Any]:
        sampler = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)
        return iter(self.loader)

    def _replayed(self, skip: int) -> Iterator[Any]:
        assert self._began is not None
        now = random_state()
        set_random_state(self._began["random"])
        for generator, state in zip(self._generators(), self._began["generators"], strict=True):
            generator.set_state(state)
        iterator = self._begin()
        for self.index in range(1, skip + 1):
            try:
                next(iterator)
            except StopIteration:
                raise TrainerError(
                    f"the checkpoint is at batch {skip} of epoch {self.epoch}, but the training loader ended after "
                    f"{self.index - 1}. Resume with the data that the run began with, or start a new run folder."
                ) from None
        set_random_state(now)
        return iterator

    def _generators(self) -> list[torch.Generator]:
        """The generators that the user gave the loader: their state is part of the position."""
        holders = (self.loader, getattr(self.loader, "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        return [g for i, g in enumerate(found) if isinstance(g, torch.Generator) and g not in found[:i]]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what is needed to get there again."""
        own = self.loader.state_dict() if self._keeps_position() else None  # type: ignore[attr-defined]
        return {"epoch": self.epoch, "index": self.index, "began": self._began if self.index else None, "loader": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position at the next `rest_of_epoch`."""
        self.epoch, self.index = state["epoch"], state["index"]
        self._began = state["began"]
        self._saved = state["loader"] if self._keeps_position() else None

    def _keeps_position(self) -> bool:
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")
