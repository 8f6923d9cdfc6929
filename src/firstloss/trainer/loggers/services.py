"""Loggers for Weights & Biases and MLflow, if these are installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...errors import MissingDependencyError
from ..callback import Callback
from ..run_folder import settings

if TYPE_CHECKING:
    from ..trainer import Trainer


class _ServiceLogger(Callback):
    """Base of loggers to a service. Checkpoints hold the run's id, so that a resumed run continues the same one."""

    run_id: str | None = None

    def on_fit_end(self, trainer: Trainer) -> None:
        self._close(failed=False)

    def on_exception(self, trainer: Trainer) -> None:
        self._close(failed=True)

    def _close(self, failed: bool) -> None:
        """End the service's run, if there is one."""

    def state_dict(self) -> dict[str, Any]:
        """The id of the service's run.

        Returns:
            A dict for a checkpoint.
        """
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the checkpoint's run, unless another run was asked for.

        Args:
            state: what `state_dict` returned.
        """
        self.run_id = self.run_id or state["run_id"]


class WandbLogger(_ServiceLogger):
    """Log to Weights & Biases (`pip install wandb`). A run that resumes from a checkpoint continues its W&B run.

    Args:
        project, group, run_name, job_type, tags, entity: as for `wandb.init`.
        run_id: of a run to continue; by default the checkpoint's, or a new one.
        resume: as for `wandb.init`.
    """

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        run_id: str | None = None,
        run_name: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] | None = None,
        resume: str = "allow",
        entity: str | None = None,
    ) -> None:
        self._wandb = _imported("wandb", "WandbLogger")
        self._options = {
            "project": project,
            "group": group,
            "name": run_name,
            "job_type": job_type,
            "tags": None if tags is None else list(tags),
            "resume": resume,
            "entity": entity,
        }
        self.run_id: str | None = run_id
        self._run: Any = None

    def on_fit_start(self, trainer: Trainer) -> None:
        given = {**self._options, "id": self.run_id, "dir": trainer.model_dir, "config": settings(trainer)}
        self._run = self._wandb.init(**given)
        self.run_id = self._run.id

    def on_metrics(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        if self._run is not None:
            self._run.log(dict(metrics), step=step)

    def _close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None


class MLflowLogger(_ServiceLogger):
    """Log to MLflow (`pip install mlflow`). A run that resumes from a checkpoint continues its MLflow run.

    Args:
        experiment: the experiment's name; None: MLflow's default.
        run_name: the name of a new run.
        tracking_uri: where MLflow keeps runs; None: MLflow's default.
    """

    def __init__(
        self, experiment: str | None = None, run_name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        self._mlflow = _imported("mlflow", "MLflowLogger")
        self.experiment: str | None = experiment
        self.run_name: str | None = run_name
        self.tracking_uri: str | None = tracking_uri
        self._open = False

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.tracking_uri is not None:
            self._mlflow.set_tracking_uri(self.tracking_uri)
        if self.experiment is not None:
            self._mlflow.set_experiment(self.experiment)
        run = self._mlflow.start_run(run_id=self.run_id, run_name=None if self.run_id else self.run_name)
        self._open = True
        if self.run_id is None:
            self._mlflow.log_params({name: str(value)[:500] for name, value in settings(trainer).items()})
        self.run_id = run.info.run_id

    def on_metrics(self, trainer: Trainer, metrics: dict[str, float], step: int) -> None:
        if self._open:  # MLflow restricts the characters of names
            allowed = {"".join(c if c.isalnum() or c in "_-. /" else "_" for c in n): v for n, v in metrics.items()}
            self._mlflow.log_metrics(allowed, step=step)

    def _close(self, failed: bool) -> None:
        if self._open:
            self._mlflow.end_run("FAILED" if failed else "FINISHED")
            self._open = False


def _imported(module: str, logger: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{logger} needs {module}, which is not installed: pip install {module}"
        ) from error
