"""`DataExecutor`: the loop over a loader's batches that dispatches steps and runs closures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from ...errors import ExecutorError, LoaderError
from ...runtime.backend import current_backend
from ...runtime.step import loop as loops
from .loader import BatchReader, DataLoader, latest


class DataExecutor:
    """The training loop's iterator: `for batch in executor: loss = step(batch)`.

    Batches are on the backend's device. While the device runs a step, the next batch is read and transferred, and the
    closures of earlier steps run; Python is never more than two steps ahead. Batches are read in the main thread, so
    that random numbers are drawn in the same order in every run; loaders with workers read in these.

    Examples:
        >>> backend = fl.backend("CPU")
        >>> loader = fl.utils.data.DataLoader(lambda: [torch.ones(2), torch.zeros(2)])
        >>> executor = fl.utils.data.DataExecutor(loader, num_steps=3)
        >>> [batch.sum().item() for batch in executor]
        [2.0, 0.0, 2.0]

    Args:
        loader: a `DataLoader`, or any iterable of batches; by default the DataLoader created last.
        num_steps: the number of steps; the loader is restarted as often as necessary. None: one epoch.
        checkpoint_steps: run checkpoint closures every so many steps (counted from 1), and at the last one; None or
            0: never.
        activation_steps: run step closures every so many steps, and at the last one; None: at every step.

    On a backend that only compiles or validates, the loop ends after one batch.

    A second loop over the same executor begins a new epoch, unless the loader's position has been set.

    Raises:
        ExecutorError: for numbers that are not positive, or if there is no loader.
        LoaderError: in the loop, if the loader fails or has no batch; earlier steps have been run and reported.
    """

    def __init__(
        self,
        loader: Any = None,
        num_steps: int | None = None,
        checkpoint_steps: int | None = None,
        activation_steps: int | None = None,
    ) -> None:
        if loader is None or loader is ...:
            loader = latest()
            if loader is None:
                raise ExecutorError("a DataExecutor needs batches: DataExecutor(loader, num_steps=...).")
        self.loader: DataLoader = DataLoader.of(loader)
        self.num_steps: int | None = _number("num_steps", num_steps, at_least=1)
        self.checkpoint_steps: int = _number("checkpoint_steps", checkpoint_steps, at_least=0) or 0
        self.activation_steps: int = _number("activation_steps", activation_steps, at_least=1) or 1
        self._loop = loops.Loop()
        self._reader: BatchReader | None = None
        self._artifact_dir: Path | None = None

    def __len__(self) -> int:
        """The number of steps in the loop."""
        return self.num_steps if self.num_steps is not None else len(self.loader)

    @property
    def step(self) -> int:
        """The current step, from 1 (0 before the first); inside a closure, the step that it belongs to."""
        return self._loop.step

    @property
    def iteration(self) -> int:
        """The current step, from 0 (-1 before the first)."""
        return self.step - 1

    @property
    def user_iteration(self) -> int:
        """The current step, from 1: another name of `step`."""
        return self.step

    @property
    def is_initial_step(self) -> bool:
        """Whether this is the first step of the loop."""
        return self.step == 1

    @property
    def on_final_iteration(self) -> bool:
        """Whether this is the last batch: another name of `is_last_step`."""
        return self.is_last_step

    @property
    def artifact_dir(self) -> Path:
        """A folder of this loop in the backend's, "executors/000001" and so on; created when it is first read."""
        if self._artifact_dir is None:
            self._artifact_dir = _new_folder(Path(current_backend().artifact_dir) / "executors")
        return self._artifact_dir

    @property
    def is_last_step(self) -> bool:
        """Whether this is the last batch. Without `num_steps` this reads one batch ahead."""
        if self._steps is not None:
            return self.step >= self._steps
        return self._reader is not None and self.step == self._loop.latest and self._reader.at_end()

    @property
    def is_activation_step(self) -> bool:
        """Whether step closures run at this step; False if steps are not executed."""
        return self._executes() and (self.step % self.activation_steps == 0 or self.is_last_step)

    @property
    def is_checkpoint_step(self) -> bool:
        """Whether checkpoint closures run at this step; False if steps are not executed."""
        return (
            self._executes()
            and self.checkpoint_steps > 0
            and (self.step % self.checkpoint_steps == 0 or self.is_last_step)
        )

    @property
    def _steps(self) -> int | None:
        """The number of steps, if known."""
        return self.num_steps if self._executes() else 1

    @staticmethod
    def _executes() -> bool:
        backend = current_backend(raise_exception=False)
        return backend is None or backend.is_e2e_execution

    def __iter__(self) -> Iterator[Any]:
        self._artifact_dir = None
        steps = self._steps
        reader = self._reader = BatchReader(self.loader, epochs=1 if steps is None else None, to_device=True)
        loop = self._loop = loops.Loop(self)
        loop.prefetch = lambda: self._prefetch(reader, loop)
        with closing(reader), loops.running(loop):
            step = 0
            while step != steps:
                try:
                    batch = next(reader)
                except StopIteration:
                    break
                except LoaderError:
                    loop.flush()
                    raise
                step += 1
                loop.begin(step)
                yield batch

    def _prefetch(self, reader: BatchReader, loop: loops.Loop) -> None:
        if self._steps is None or loop.step < self._steps:
            reader.read_ahead()


def _new_folder(parent: Path) -> Path:
    """Create a folder in `parent`, named by the next number."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(entry.name) for entry in parent.iterdir() if entry.name.isdigit()), default=0)
    while True:
        try:
            (parent / f"{number:06d}").mkdir()
        except FileExistsError:  # another process was faster
            number += 1
        else:
            return parent / f"{number:06d}"


def _number(name: str, value: int | None, at_least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ExecutorError(f"{name}={value!r}: pass an integer of at least {at_least}, or None.")
    return value


def current_executor() -> DataExecutor | None:
    """The DataExecutor whose loop is running.

    Examples:
        >>> executor = fl.utils.data.DataExecutor([torch.ones(2)])
        >>> [fl.current_executor() is executor for batch in executor]
        [True]

    Returns:
        The innermost one; None outside of such loops.
    """
    loop = loops.current()
    return None if loop is None else loop.owner
