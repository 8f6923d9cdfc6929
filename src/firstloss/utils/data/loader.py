"""`DataLoader`: a lazily created wrapper of a user's loader that can resume where an earlier run stopped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ...capture import session
from ...errors import LoaderError
from ...program.source import here
from ...runtime.backend import current_backend
from ...runtime.device import batch_transfer
from ...runtime.mesh.processes import processes
from .random_state import RandomState


@runtime_checkable
class RestartableDataLoader(Protocol):
    """A loader that tracks its own position, which `DataLoader` then saves and restores through these methods.

    `cerebras.pytorch` also aggregates the states of several streaming workers. Here they have one loader:
    `aggregate_state_dict` and `deaggregate_state_dict` are not called.
    """

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch yielded.

        Returns:
            A dict of integers, strings and tensors, for a checkpoint.
        """
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position at the next `iter`.

        Args:
            state_dict: what `state_dict` returned.
        """
        ...


class DataLoader:
    """The batches of `input_fn(*args, **kwargs)`, epoch after epoch.

    Examples:
        >>> loader = fl.utils.data.DataLoader(lambda: [torch.ones(2), torch.zeros(2)])
        >>> [batch.sum().item() for batch in loader]
        [2.0, 0.0]

    Args:
        input_fn: returns an iterable of batches: a `torch.utils.data.DataLoader` (with any number of workers), a list,
            a generator, anything. It is called when the first batch is needed, and again for each further epoch if it
            returns an iterator, which can be iterated only once.
        args, kwargs: passed to `input_fn`.

    Iterating over it yields one epoch. `set_epoch(epoch)` is called on the loader or its sampler, if they have it.

    `state_dict()` is the position after the last batch yielded; after `load_state_dict` the next loop resumes from
    there. If the user's loader has both methods itself, they are used. Otherwise it is iterated from the beginning of
    the epoch, with the random generators (PyTorch's, Python's, NumPy's, the loader's own) in their state of that time,
    so that it shuffles in the same way, and the batches already yielded are read and dropped. Workers are seeded by
    these generators too; only workers kept between epochs (`persistent_workers=True`) cannot be restored, which raises
    a warning.

    Raises:
        LoaderError: if `input_fn` is not callable or does not return an iterable, if it or the loader raises, or if the
            loader has no batch.
    """

    def __init__(self, input_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        global _latest
        if not callable(input_fn):
            raise LoaderError(
                f"DataLoader takes a function that returns a loader, not an object of type {type(input_fn).__name__}. "
                "Write DataLoader(lambda: loader), or pass the loader itself to DataExecutor."
            )
        self._make = lambda: input_fn(*args, **kwargs)
        self.name: str = f"the loader that {getattr(input_fn, '__name__', type(input_fn).__name__)} made"
        self._loader: Any = None
        self._used = False
        self._epoch = 0
        self._resume: dict[str, Any] | None = None
        self._progress: _Progress | None = None
        _latest = self

    @classmethod
    def of(cls, loader: Any) -> DataLoader:
        """Wrap any iterable in a DataLoader.

        Args:
            loader: the iterable.

        Returns:
            The DataLoader; `loader` itself if it is one.
        """
        if isinstance(loader, DataLoader):
            return loader
        result = cls(lambda: loader)
        result.name = f"the loader ({type(loader).__name__})"
        return result

    def __len__(self) -> int:
        """The number of batches in an epoch, if the user's loader has a length."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return BatchReader(self, epochs=1)

    @property
    def dataloader(self) -> Any:
        """Another name of `loader`."""
        return self.loader

    @property
    def is_restartable(self) -> bool:
        """Whether the user's loader saves and restores its own position. Others are read up to the position."""
        return isinstance(self.loader, RestartableDataLoader)

    @property
    def loader(self) -> Any:
        """What `input_fn` returned."""
        if self._loader is None:
            self._loader = self._new_loader()
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """The position.

        Returns:
            A dict of integers, strings, tensors and the user's loader's state, for a checkpoint.
        """
        if self._progress is not None:
            return self._progress.position(self)
        return self._resume if self._resume is not None else {"epoch": self._epoch, "batch": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state` in the next loop.

        Args:
            state: what `state_dict` returned.

        Raises:
            LoaderError: if `state` is not such a dict.
        """
        if "epoch" not in state or "batch" not in state:
            raise LoaderError(f"this is not the state of a DataLoader: its keys are {sorted(state)}.")
        self._resume, self._progress = dict(state), None
        self._epoch = int(state["epoch"])

    def _new_loader(self) -> Any:
        try:
            loader = self._make()
        except Exception as error:
            raise LoaderError(f"{self.name} could not be created: {_summary(error)}") from error
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise LoaderError(
                f"{self.name} is an object of type {type(loader).__name__}, which is not iterable. Make it a "
                "torch.utils.data.DataLoader, a list of batches, or a generator."
            )
        return with_workers(loader, self.name)

    def _begin(self, epoch: int) -> tuple[Iterator[Any], int, RandomState]:
        """The iterator of an epoch, the number of batches to skip, and the generators' state at its beginning."""
        if self._used and is_iterator(self._loader):
            self._loader = self._new_loader()
        loader, resume = self.loader, self._resume
        self._resume, self._used = None, True
        for part in (loader, getattr(loader, "sampler", None)):
            if part is not None and hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        if resume is None:
            at_start = RandomState.now(loader)
            return _iterator(loader), 0, at_start
        batch = int(resume["batch"])
        at_start = RandomState.from_tensors(resume["begun"]) if "begun" in resume else RandomState.now(loader)
        at_start.restore(loader)
        if epoch and getattr(loader, "persistent_workers", False):
            warnings.warn(
                f"{self.name} is resumed in epoch {epoch} (counted from 0) with persistent_workers=True. The random "
                "numbers that its workers draw there continue from earlier epochs and cannot be restored: if the "
                "dataset draws any (augmentation), they differ from those of an uninterrupted run. With "
                "persistent_workers=False workers are "
                "reseeded for each epoch, and resuming is exact.",
                stacklevel=2,
            )
        if "loader" in resume and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(resume["loader"])
            iterator = _iterator(loader)
        else:
            iterator = _iterator(loader)
            for _ in range(batch):
                next(iterator, None)
        if "now" in resume:
            RandomState.from_tensors(resume["now"]).restore(loader)
        return iterator, batch, at_start


def _iterator(loader: Any) -> Iterator[Any]:
    """Start an epoch. JAX's and Python's warnings about forked workers are suppressed: they concern datasets that use
    JAX, or another thread's locks, themselves (docs/traced-steps.md)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called.*JAX is multithreaded", RuntimeWarning)
        warnings.filterwarnings("ignore", r".*is multi-threaded, use of fork", DeprecationWarning)
        return iter(loader)


def is_iterator(loader: Any) -> bool:
    """Whether `loader` is an iterator, which can be iterated only once."""
    return hasattr(loader, "__next__")


@dataclass
class _Progress:
    """How far a loop has read a DataLoader, which keeps this object and not the reader.

    In a reference cycle of the two, an abandoned loop's workers would live until the next garbage collection, and torch
    would then wait 5 s for each: the collector ends their queues before it runs the iterator's `__del__`, which sends
    them a last message.

    Attributes:
        epoch, batch: what has been yielded.
        first: the position before the first batch, or where the reader was closed.
        begun: the generators' state at the beginning of the epoch; None before the first batch and once closed.
        ahead: what has been read ahead: "batch", "end" or "error"; "closed" if nothing will be read any more.
        now: the position before that was read.
    """

    epoch: int
    first: dict[str, Any] | None
    batch: int = 0
    begun: RandomState | None = None
    ahead: str | None = None
    now: tuple[RandomState, Any] | None = None

    def position(self, loader: DataLoader) -> dict[str, Any]:
        """The position after the last batch yielded."""
        if self.begun is None:
            return self.first if self.first is not None else {"epoch": self.epoch, "batch": 0}
        now, own = self.now if self.ahead is not None and self.now is not None else _snapshot(loader)
        if self.ahead == "end":
            return {"epoch": self.epoch + 1, "batch": 0, "begun": now.tensors()}
        out = {"epoch": self.epoch, "batch": self.batch, "begun": self.begun.tensors(), "now": now.tensors()}
        if own is not None:
            out["loader"] = own
        return out


class BatchReader:
    """Reads a DataLoader's batches, one ahead if asked to.

    Args:
        epochs: the number of epochs; None: endless.
        to_device: move each batch to the backend's device as soon as it is read.
    """

    def __init__(self, loader: DataLoader, epochs: int | None, to_device: bool = False) -> None:
        self._loader = loader
        self._to_device = to_device
        self._left = epochs
        self._iterator: Iterator[Any] | None = None
        self._given = 0
        self._item: Any = None  # the batch ahead, or the error
        self._progress = loader._progress = _Progress(loader._epoch, loader._resume)

    def __iter__(self) -> BatchReader:
        return self

    def __next__(self) -> Any:
        self.read_ahead()
        progress = self._progress
        item, self._item = self._item, None
        if progress.ahead == "error":
            progress.ahead = "closed"
            try:
                raise item
            finally:
                del item  # it holds this frame
        if progress.ahead != "batch":
            raise StopIteration
        progress.ahead = None
        progress.batch += 1
        self._given += 1
        return item

    def at_end(self) -> bool:
        """Whether no batch is left."""
        self.read_ahead()
        return self._progress.ahead == "end"

    def close(self) -> None:
        """Stop reading: keep the position, and drop the iterator, so that its workers end now."""
        progress = self._progress
        progress.first = progress.position(self._loader)
        self._iterator, progress.begun, progress.now = None, None, None
        if progress.ahead in (None, "batch"):
            progress.ahead, self._item = "closed", None

    def read_ahead(self) -> None:
        """Read the next batch, unless it has been read already."""
        progress = self._progress
        if progress.ahead is not None:
            return
        if session.trace is not None:
            raise LoaderError(
                f"{here()}: {self._loader.name} is read inside a traced step, which is traced once and would see the "
                "same batch forever. Loop over the loader outside, and pass the batch to the step as an argument."
            )
        try:
            progress.ahead, self._item = self._read()
        except LoaderError as error:
            progress.ahead, self._item = "error", error
        except Exception as error:
            progress.ahead, self._item = "error", self._failure(error)

    def _failure(self, error: Exception) -> LoaderError:
        progress = self._progress
        failure = LoaderError(
            f"{self._loader.name} failed at batch {progress.batch} of epoch {progress.epoch} (both counted from 0): "
            f"{_summary(error)}"
        )
        failure.__cause__ = error
        return failure

    def _read(self) -> tuple[str, Any]:
        progress = self._progress
        if self._iterator is None:
            self._begin()
        empty = progress.batch == 0
        while True:
            progress.now = _snapshot(self._loader)
            assert self._iterator is not None
            try:
                return "batch", batch_transfer.put(next(self._iterator)) if self._to_device else next(self._iterator)
            except StopIteration:
                pass
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    self._loader._epoch = progress.epoch + 1
                    return "end", None
            if empty:
                raise self._no_batch()
            progress.epoch += 1
            self._loader._epoch = progress.epoch
            self._begin()
            empty = True

    def _begin(self) -> None:
        progress = self._progress
        self._iterator, progress.batch, progress.begun = self._loader._begin(progress.epoch)

    def _no_batch(self) -> LoaderError:
        name = self._loader.name
        if not is_iterator(self._loader.loader):
            return LoaderError(f"{name} has no batch in epoch {self._progress.epoch}.")
        return LoaderError(
            f"{name} ended after {self._given} batches, but more are needed. It is an iterator, which can be iterated "
            "only once: let the function create a new one at each call."
        )


def _snapshot(loader: DataLoader) -> tuple[RandomState, Any]:
    user = loader.loader
    own = user.state_dict() if hasattr(user, "state_dict") and hasattr(user, "load_state_dict") else None
    return RandomState.now(user), own


def _summary(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    last = f" ... {lines[-1]}" if len(lines) > 1 else ""  # a worker's error holds a whole traceback
    return f"{type(error).__name__}: {lines[0]}{last}"


_latest: DataLoader | None = None


def latest() -> DataLoader | None:
    """The DataLoader created last."""
    return _latest


def with_workers(loader: Any, name: str) -> Any:
    """Set the number of workers of `loader` as the current backend's ClusterConfig asks.

    Args:
        name: the loader's name, for errors.

    Raises:
        LoaderError: if the loader cannot have workers.
    """
    count = num_workers_setting()
    if count is None:
        return loader
    if not isinstance(loader, torch.utils.data.DataLoader):
        if count == 0:
            return loader
        raise LoaderError(
            f"{name} is not a torch.utils.data.DataLoader and cannot have workers, but the backend's ClusterConfig "
            "sets num_workers_per_csx. Leave that out, or return DataLoader(dataset, ...)."
        )
    if loader.num_workers != count:
        loader.num_workers = count
        # The default with DataLoader(num_workers=count).
        if count and loader.prefetch_factor is None:
            loader.prefetch_factor = 2
        if not count:
            loader.prefetch_factor = None
            object.__setattr__(loader, "persistent_workers", False)
    return loader


def num_workers_setting() -> int | None:
    """The number of workers of this process by the current backend; None if it is left to loaders."""
    backend = current_backend(raise_exception=False)
    config = None if backend is None else backend.cluster_config
    if config is None or config.num_workers_per_csx is None:
        return None
    return -(-config.num_workers_per_csx * config.num_csx // processes(backend).count)
