"""TensorBoard summaries, which can be written inside traced steps and may be tensors."""

from __future__ import annotations

import os
import time
import weakref
from pathlib import Path
from typing import Any

import torch

from ..errors import MissingDependencyError, SummaryError
from ..runtime.step import loop as loops
from ..runtime.step.closures import step_closure

try:
    from torch.utils.tensorboard import SummaryWriter as _SummaryWriter
except ImportError as error:
    raise MissingDependencyError("firstloss.utils.tensorboard needs tensorboard: pip install tensorboard") from error

_writer: weakref.ref[SummaryWriter] | None = None


class SummaryWriter(_SummaryWriter):
    """A `torch.utils.tensorboard.SummaryWriter` that also writes tensors, and can be written to in a traced step.

    `summarize_scalar` and `summarize_tensor` may be called in a traced step: they write after each execution, with the
    executor's step number. The module's functions of these names write to the writer created last.

    Args:
        base_step: the number of the executor's first step.
    """

    def __init__(self, *args: Any, base_step: int = 1, **kwargs: Any) -> None:
        global _writer
        super().__init__(*args, **kwargs)
        self.base_step = base_step
        _writer = weakref.ref(self)

    def add_tensor(self, name: str, tensor: torch.Tensor, step: int) -> None:  # type: ignore[override]
        """Write a whole tensor for `SummaryReader.read_tensor`, as a `torch.save` file beside the events."""
        folder = Path(self.log_dir) / "tensors" / name
        folder.mkdir(parents=True, exist_ok=True)
        content = {"step": int(step), "tensor": tensor.detach().cpu().clone(), "name": name}
        torch.save(content, folder / f"{int(step)}.{time.time_ns()}.pt")

    def summarize_scalar(self, name: str, value: torch.Tensor | float) -> None:
        """`add_scalar` with the executor's step."""
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise SummaryError(f"{name} has the shape {list(value.shape)} and is not a scalar. Use summarize_tensor.")
        _add_scalar(self, name, value)

    def summarize_tensor(self, name: str, value: torch.Tensor) -> None:
        """`add_tensor` with the executor's step."""
        if not isinstance(value, torch.Tensor):
            raise SummaryError(f"{name} is an object of type {type(value).__name__}, not a tensor.")
        _add_tensor(self, name, value)

    def _step(self) -> int:
        loop = loops.current()
        if loop is None:
            raise SummaryError(
                "a summary needs the step number of a DataExecutor, but no such loop is running. Loop over "
                "fl.utils.data.DataExecutor(loader), or write add_scalar(name, value, step)."
            )
        return loop.step - 1 + self.base_step


@step_closure
def _add_scalar(writer: SummaryWriter, name: str, value: torch.Tensor | float) -> None:
    writer.add_scalar(name, float(value), writer._step())


@step_closure
def _add_tensor(writer: SummaryWriter, name: str, value: torch.Tensor) -> None:
    writer.add_tensor(name, value, writer._step())


def summarize_scalar(name: str, value: torch.Tensor | float) -> None:
    """Write a scalar to the `SummaryWriter` created last; in a traced step, after each execution.

    Raises:
        SummaryError: if there is no writer, or `value` is not a scalar.
    """
    _latest().summarize_scalar(name, value)


def summarize_tensor(name: str, value: torch.Tensor) -> None:
    """Write a tensor to the `SummaryWriter` created last; in a traced step, after each execution.

    Raises:
        SummaryError: if there is no writer, or `value` is not a tensor.
    """
    _latest().summarize_tensor(name, value)


def _latest() -> SummaryWriter:
    writer = None if _writer is None else _writer()
    if writer is None:
        raise SummaryError("there is no SummaryWriter. Create one first, and keep a reference to it.")
    return writer


class SummaryReader:
    """Reads what a `SummaryWriter` has written.

    Args:
        log_dirs: one folder or several, searched recursively for events.
    """

    def __init__(self, log_dirs: str | os.PathLike[str] | list[str | os.PathLike[str]]) -> None:
        folders = log_dirs if isinstance(log_dirs, (list, tuple, set)) else [log_dirs]
        self._folders = [Path(folder) for folder in folders]

    def _events(self) -> list[Any]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folders = {file.parent for folder in self._folders for file in folder.rglob("events.out.tfevents.*")}
        accumulators = [EventAccumulator(str(folder), size_guidance={"scalars": 0}) for folder in sorted(folders)]
        for accumulator in accumulators:
            accumulator.Reload()
        return accumulators

    def scalar_names(self) -> set[str]:
        """The names of all scalars."""
        return {name for events in self._events() for name in events.Tags()["scalars"]}

    def read_scalar(self, name: str, step: int | None = None) -> Any:
        """All events of a scalar in order, each with `step`, `value` and `wall_time`; with `step`, the first of that
        step.

        Raises:
            SummaryError: if there is no such event.
        """
        events = [e for source in self._events() if name in source.Tags()["scalars"] for e in source.Scalars(name)]
        if not events:
            raise SummaryError(f"there is no scalar {name!r}, only {', '.join(sorted(self.scalar_names())) or 'none'}.")
        if step is None:
            return events
        scalar_event = next((event for event in events if event.step == step), None)
        if scalar_event is None:
            raise SummaryError(f"the scalar {name!r} has no step {step}, only {[event.step for event in events]}.")
        return scalar_event

    def tensor_names(self) -> set[str]:
        """The names of all tensors."""
        return {str(file.parent.relative_to(root)) for root in self._roots() for file in root.rglob("*.pt")}

    def read_tensor(self, name: str, step: int | None = None) -> Any:
        """A tensor's values as {step: tensor}; with `step`, the latest of that step.

        Raises:
            SummaryError: if there is no such tensor.
        """
        files = [file for root in self._roots() for file in (root / name).glob("*.pt")]
        latest: dict[int, tuple[int, Path]] = {}
        for file in files:
            of, when = (int(part) for part in file.stem.split("."))
            latest[of] = max(latest.get(of, (-1, file)), (when, file))
        if not latest or (step is not None and step not in latest):
            where = f"step {step} of the tensor {name!r}" if latest else f"tensor {name!r}"
            raise SummaryError(f"there is no {where}; tensors: {', '.join(sorted(self.tensor_names())) or 'none'}.")
        tensors = {of: torch.load(file, weights_only=True)["tensor"] for of, (_, file) in sorted(latest.items())}
        return tensors if step is None else tensors[step]

    def _roots(self) -> list[Path]:
        return sorted({path for folder in self._folders for path in folder.rglob("tensors") if path.is_dir()})
