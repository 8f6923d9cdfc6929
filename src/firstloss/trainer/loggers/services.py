"""Log metrics to Weights & Biases and to MLflow, where these are installed."""

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
    """Logs to a run of a service. The run's id is in the checkpoints, so that a resumed run continues the same one."""

    run_id: str | None = None

    def on_fit_end(self, trainer: Trainer) -> None:
        self._close(failed=False)

    def on_exception(self, trainer: Trainer) -> None:
        self._close(failed=True)

    def _close(self, failed: bool) -> None:
        """End the service's run, if there is one."""

    def state_dict(self) -> dict[str, Any]:
        """Which run it is.

        Returns:
            The run's id, for a checkpoint.
        """
        return {"run_id": self.run_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that run, unless another one was asked for.

        Args:
            state: what `state_dict` returned.
        """
        self.run_id = self.run_id or state["run_id"]


class WandbLogger(_ServiceLogger):
    """Logs to Weights & Biases: `pip install wandb`. A run that resumes from a checkpoint goes on there, too.

    Args:
        project, group, run_name, job_type, tags, entity: as `wandb.init` takes them.
        run_id: of a run to go on with; by default a checkpoint's, or a new one.
        resume: as `wandb.init` takes it.
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
        self.run_id = run_id
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
    """Logs to MLflow: `pip install mlflow`. A run that resumes from a checkpoint goes on there, too.

    Args:
        experiment: its name; None: MLflow's own.
        run_name: of a new run.
        tracking_uri: where MLflow keeps runs; None: as MLflow is set.
    """

    def __init__(
        self, experiment: str | None = None, run_name: str | None = None, tracking_uri: str | None = None
    ) -> None:
        self._mlflow = _imported("mlflow", "MLflowLogger")
        self.experiment, self.run_name, self.tracking_uri = experiment, run_name, tracking_uri
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
        if self._open:  # names as MLflow takes them
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
