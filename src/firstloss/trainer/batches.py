"""The training loader's batches, epoch after epoch, with a position that can be saved and restored."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

import firstloss as fl

from ..errors import TrainerError


def check_loader(name: str, loader: Any, once: bool = False) -> None:
    """Raise a TrainerError unless `loader` is an iterable of batches that can be iterated repeatedly (or `once`)."""
    if isinstance(loader, torch.nn.Module):
        raise TrainerError(
            f"{name} is a model ({type(loader).__name__}). It goes to the Trainer: Trainer(model=...).fit(loader)."
        )
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise TrainerError(
            f"{name} is a dataset ({type(loader).__name__}), which yields single samples. Write "
            f"DataLoader({name}, batch_size=32, shuffle=True)."
        )
    if isinstance(loader, Iterator) and not once:
        raise TrainerError(
            f"{name} is an iterator ({type(loader).__name__}), which can be iterated only once. Pass something "
            "that can be iterated again: a DataLoader, a list, or an object with __iter__."
        )
    if not isinstance(loader, fl.utils.data.DataLoader) and not hasattr(loader, "__iter__"):
        raise TrainerError(f"{name} is of type {type(loader).__name__}. Pass a DataLoader or a list of batches.")


def several(loaders: Any) -> list[Any]:
    """Normalize the `loaders` argument to a list: a list of DataLoaders is several, any other list is batches."""
    kinds = (fl.utils.data.DataLoader, torch.utils.data.DataLoader)
    if isinstance(loaders, (list, tuple)) and loaders and all(isinstance(loader, kinds) for loader in loaders):
        return list(loaders)
    return [] if loaders is None else [loaders]


class Batches:
    """Iterates over the training loader and tracks the position in it.

    Attributes:
        epoch: completed passes over the loader.
        index: batches yielded in the current pass.
    """

    def __init__(self, loader: Iterable[Any], epoch: int = 0) -> None:
        own = isinstance(loader, fl.utils.data.DataLoader)
        self.loader = loader
        self._loader: Any = loader if own else fl.utils.data.DataLoader(lambda: loader)
        self.epoch: int = epoch
        self.index: int = 0
        self._at_end = False
        if epoch:
            self.load_state_dict({"epoch": epoch, "index": 0, "loader": None})

    def steps_in_epoch(self, size: int) -> int | None:
        """The number of groups of `size` batches in an epoch; None if the loader has no length."""
        try:
            return len(self._loader) // size
        except (TypeError, NotImplementedError, fl.errors.LoaderError):
            return None

    def rest_of_epoch(self, size: int) -> Generator[list[Any], None, None]:
        """Yield groups of `size` batches from the current position to the end of the epoch, and advance the position.

        An incomplete last group is dropped, as `drop_last=True` does with samples.
        """
        begins, given = self.index == 0, 0
        source: Iterable[Any] = [] if self._at_end else fl.utils.data.DataExecutor(self._loader)
        with closing(_iterate(source)) as batches:
            while len(group := list(islice(batches, size))) == size:
                self.index += size
                given += 1
                yield group
        if begins and not given:
            few = f"fewer than grad_accum_steps={size} batches" if group else "no batches"
            raise TrainerError(
                f"the training loader yielded {few} in an epoch, so the weights would never be updated. Make "
                "grad_accum_steps or batch_size smaller: with drop_last=True an epoch takes batch_size samples or more."
            )
        self.epoch += 1
        self.index, self._at_end = 0, False

    def state_dict(self) -> dict[str, Any]:
        """The position and the loader's own state."""
        return {"epoch": self.epoch, "index": self.index, "loader": self._loader.state_dict() if self.index else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved position; the next `rest_of_epoch` continues from it."""
        self.epoch, self.index = state["epoch"], state["index"]
        position = state["loader"] or {"epoch": self.epoch, "batch": 0}
        self._at_end = position["epoch"] > self.epoch  # a prefetching loader ends its epoch at the last batch
        self._loader.load_state_dict(position)


def _iterate(batches: Iterable[Any]) -> Generator[Any, None, None]:
    yield from batches
