"""Metrics as JSON lines and CSV in the run folder."""

from __future__ import annotations

import csv
import json
import math
import os
from typing import IO, TYPE_CHECKING, Any

from ...files import atomic_write
from ..callback import Callback

if TYPE_CHECKING:
    from ..trainer import Trainer


class JSONLogger(Callback):
    """Write one JSON object per line: "step" and the metrics of that step.

    A run that resumes from a checkpoint removes the lines of the steps that it runs again.

    Args:
        name: the file's name in the run folder.
    """

    def __init__(self, name: str = "metrics.jsonl") -> None:
        self.name = name
        self._file: IO[str] | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        path = os.path.join(trainer.model_dir, self.name)
        rows = [row for row in _json_rows(path) if row["step"] <= trainer.state.step]
        with atomic_write(path, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self._file = open(path, "a", encoding="utf-8")

    def on_metrics(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        if self._file is not None:
            plain = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            self._file.write(json.dumps({"step": step, **plain}) + "\n")
            self._file.flush()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class CSVLogger(Callback):
    """Write a table with one column per metric; metrics that appear later get new columns.

    The file is always valid: it is rewritten atomically when a column is added, and appended to otherwise.

    Args:
        name: the file's name in the run folder.
    """

    def __init__(self, name: str = "metrics.csv") -> None:
        self.name = name
        self._columns: list[str] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        columns, rows = _csv_rows(os.path.join(trainer.model_dir, self.name))
        self._columns = columns or ["step"]
        self._write(trainer, [row for row in rows if int(row["step"]) <= trainer.state.step])

    def on_metrics(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        if not self._columns:  # called by `validate` outside a run
            return
        new = [name for name in metrics if name not in self._columns]
        if new:
            _, rows = _csv_rows(os.path.join(trainer.model_dir, self.name))
            self._columns += new
            self._write(trainer, rows)
        with open(os.path.join(trainer.model_dir, self.name), "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow({"step": step, **metrics})

    def on_fit_end(self, trainer: Trainer) -> None:
        self._columns = []

    def _write(self, trainer: Trainer, rows: list[dict[str, Any]]) -> None:
        with atomic_write(os.path.join(trainer.model_dir, self.name), "w") as file:
            table = csv.DictWriter(file, self._columns, lineterminator="\r\n")
            table.writeheader()
            table.writerows(rows)


def _json_rows(path: str) -> list[dict[str, Any]]:
    """The complete lines of the file: the last one may have been cut off when a process was killed."""
    rows = []
    for line in _lines(path):
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _csv_rows(path: str) -> tuple[list[str], list[dict[str, Any]]]:
    lines = _lines(path)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    table = csv.DictReader(lines)
    return list(table.fieldnames or []), list(table)


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.readlines()
    except FileNotFoundError:
        return []
