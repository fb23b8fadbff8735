"""`MlflowLogger`: a run in MLflow."""

import time
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.events.record import Evaluated, Recovered
from recycle.loggers.kept_run import KeptRun
from recycle.loggers.log_values import evaluation_values, recovery_text, recovery_values, refuse_missing, step_values
from recycle.runtime.callbacks.protocol import Logger, RunStart, StepMetrics
from recycle.runtime.coordinator.ledger.trained import Trained


class MlflowLogger(Logger):
    """Logs every step, evaluation and recovery as metrics at their step; the recoveries in words are tags.

    A resumed run goes on in the same run of MLflow. Steps that it trains again are there already, and are not logged again.

    Args:
        experiment: The experiment of MLflow.
        tracking_uri: The tracking server or store, such as `sqlite:///mlflow.db`; by default as MLFLOW_TRACKING_URI says.
        name: The name of the run; by default the name of the run folder.

    Raises:
        UserError: mlflow is not installed.

    Example:
        recycle.train(..., out="runs/a", callbacks=[recycle.MlflowLogger("my-experiment")])
    """

    NAME = "mlflow"

    def __init__(self, experiment: str = "recycle", tracking_uri: str | None = None, name: str | None = None) -> None:
        refuse_missing("MLflow", "mlflow", "mlflow-skinny")
        self._experiment, self._uri, self._name = experiment, tracking_uri, name
        self._client: Any = None
        self._run_id = ""
        self._num_recoveries = 0

    def on_start(self, run: RunStart) -> None:
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        kept = KeptRun(run.folder, self.NAME)
        if (known := kept.find(run.is_continued)) is not None:
            client.update_run(known, status="RUNNING")
            self._num_recoveries = sum(key.startswith("recovery.") for key in client.get_run(known).data.tags)
            self._run_id = known
            return
        experiment = client.get_experiment_by_name(self._experiment)
        number = experiment.experiment_id if experiment is not None else client.create_experiment(self._experiment)
        name = self._name or (run.folder.name if run.folder is not None else None)
        self._run_id = client.create_run(number, run_name=name).info.run_id
        kept.save(self._run_id)

    def on_step(self, step: StepMetrics) -> None:
        self._log(step_values(step), step.step)

    def on_evaluate(self, evaluation: Evaluated) -> None:
        self._log(evaluation_values(evaluation), evaluation.num_steps)

    def on_recovery(self, recovery: Recovered) -> None:
        self._log(recovery_values(recovery), recovery.iteration + 1)
        self._num_recoveries += 1
        self._client.set_tag(self._run_id, f"recovery.{self._num_recoveries}", recovery_text(recovery))

    def on_end(self, trained: Trained | None) -> None:
        if self._run_id:
            self._client.set_terminated(self._run_id, status="FINISHED" if trained is not None else "FAILED")

    def _log(self, values: dict[str, float], step: int) -> None:
        if not self._run_id:
            raise FileProblem("the run of MLflow was not started")
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 1_000_000
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)
