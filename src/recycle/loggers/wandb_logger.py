"""`WandbLogger`: a run in Weights & Biases."""

from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem
from recycle.core.events.record import Evaluated, Recovered
from recycle.loggers.kept_run import KeptRun
from recycle.loggers.log_values import evaluation_values, recovery_text, recovery_values, refuse_missing, step_values
from recycle.runtime.callbacks.protocol import Logger, RunStart, StepMetrics
from recycle.runtime.coordinator.ledger.trained import Trained

# The steps of W&B only grow, and all that is logged at one of them is one row. So the step is a number in a row of its own.
STEP = "step"


class WandbLogger(Logger):
    """Logs every step, evaluation and recovery as a row; the curves have `step` on their x-axis.

    A resumed run goes on in the same run of W&B. Steps that it trains again are there already, and are not logged again.

    Args:
        project: The project of W&B.
        name: The name of the run; by default the name of the run folder.
        mode: "online", "offline" (files that `wandb sync` uploads), or "disabled"; by default as WANDB_MODE says.
        folder: Where W&B keeps its files, by default the run folder.
        settings: More keyword arguments of `wandb.init`.

    Raises:
        UserError: wandb is not installed.

    Example:
        recycle.train(..., out="runs/a", callbacks=[recycle.WandbLogger("my-project", mode="offline")])
    """

    NAME = "wandb"

    def __init__(
        self,
        project: str = "recycle",
        name: str | None = None,
        mode: str | None = None,
        folder: Path | str | None = None,
        **settings: Any,
    ) -> None:
        refuse_missing("Weights & Biases", "wandb", "wandb")
        self._settings = {"project": project, "name": name, "mode": mode, "dir": folder, **settings}
        self._run: Any = None

    def on_start(self, run: RunStart) -> None:
        import wandb

        kept = KeptRun(run.folder, self.NAME)
        settings = dict(self._settings)
        settings["name"] = settings["name"] or (run.folder.name if run.folder is not None else None)
        settings["dir"] = str(settings["dir"] or run.folder or ".")
        if (known := kept.find(run.is_continued)) is not None:
            settings |= {"id": known, "resume": "allow"}
        self._run = wandb.init(**settings)
        kept.save(self._run.id)
        self._run.define_metric("*", step_metric=STEP)

    def on_step(self, step: StepMetrics) -> None:
        self._log(step_values(step), step.step)

    def on_evaluate(self, evaluation: Evaluated) -> None:
        self._log(evaluation_values(evaluation), evaluation.num_steps)

    def on_recovery(self, recovery: Recovered) -> None:
        self._log({**recovery_values(recovery), "recovery/text": recovery_text(recovery)}, recovery.iteration + 1)

    def on_end(self, trained: Trained | None) -> None:
        if self._run is None:
            return
        if trained is not None:
            self._run.summary["weights_sha256"] = trained.weights_sha256
        self._run.finish(exit_code=0 if trained is not None else 1)

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._run is None:
            raise FileProblem("the run of W&B was not started")
        self._run.log({**values, STEP: step})
