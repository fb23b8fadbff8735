"""`TrainingJobFactory`: the job of `recycle train` and `recycle coordinator`, made from a `TrainConfig`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recycle.cli.training.train_config import TrainConfig
from recycle.core.errors import UserError
from recycle.core.events.failure_script import NOTHING, Script
from recycle.core.events.trace import Trace
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import PlanSource

if TYPE_CHECKING:
    from recycle.core.profile import Profile
    from recycle.runtime.compute.optimizer_step import MakeOptimizer
    from recycle.runtime.job import Job

CONFIG = "config.toml"
# Keys that a resumed run may change: where and for how long it computes, but not what.
_FREE = ("cluster.", "checkpoint.", "log.", "training.steps", "training.device")
_BOUND = ("cluster.pipelines", "cluster.stages", "cluster.microbatches")


def is_free(name: str) -> bool:
    """Whether a resumed run may change this key of the configuration."""
    return name.startswith(_FREE) and name not in _BOUND


class TrainingJobFactory:
    """Makes the job that a configuration describes. torch is imported here, because planning and simulating work without it."""

    def __init__(self, config: TrainConfig) -> None:
        try:
            import torch

            from recycle.models.gpt import GptConfig, gpt_stages
            from recycle.models.text import Text
            from recycle.runtime.options import refuse_absent_device
        except ImportError as problem:
            raise UserError(
                f"training needs torch ({problem}): install it with pip install -e '.[train]' in a clone of ReCycle"
            ) from None
        self.config = config
        model, training = config.model, config.training
        gpt = GptConfig(
            context=model.context,
            width=model.width,
            num_heads=model.heads,
            num_layers=model.layers,
            dropout=model.dropout,
            ties_embeddings=model.tied,
        )
        refuse_absent_device(training.device)
        self._stages = gpt_stages(gpt, config.cluster.stages, training.seed)
        self._text = Text(model.context, config.data.text or None)
        self._optimizer: MakeOptimizer = (
            partial(torch.optim.AdamW, lr=training.rate, weight_decay=training.weight_decay)
            if training.optimizer == "adamw"
            else partial(torch.optim.SGD, lr=training.rate, weight_decay=training.weight_decay, momentum=training.momentum)
        )
        self._sum_dtype: torch.dtype = getattr(torch, training.sums)
        self._autocast = torch.bfloat16 if training.precision == "bfloat16" else None

    def measure_profile(self) -> "Profile":
        """Measure a profile of the stages on this machine, in this process."""
        import torch

        from recycle.profiling.rehearsal import rehearsal_plan
        from recycle.profiling.stage_times import measure_stages

        job = self.job(rehearsal_plan(self.config.cluster.shape, is_split=True))
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker
        try:
            return measure_stages(job)
        finally:
            torch.set_num_threads(num_threads)

    def job(
        self,
        plan: Plan,
        out: Path | None = None,
        resume: bool = False,
        plan_source: PlanSource | None = None,
        script: Script = NOTHING,
        trace: Trace | None = None,
    ) -> "Job":
        """The job by this plan. This is the only place that maps the keys of the configuration to options."""
        from recycle.models.gpt import next_byte_loss
        from recycle.runtime.compute.learning_rate import WarmUpThen
        from recycle.runtime.job import Job
        from recycle.runtime.options import CheckpointOptions, FailureOptions, RunFolderOptions, TrainOptions

        config, training = self.config, self.config.training
        about = {name: value for name, value in config.values().items() if not is_free(name)}
        options = TrainOptions(
            seed=training.seed,
            is_exact=training.exact,
            max_norm=training.max_norm or None,
            schedule=WarmUpThen(training.schedule, training.warmup, training.steps),
            sum_dtype=self._sum_dtype,
            autocast=self._autocast,
            device=training.device,
            port=config.cluster.port,
            checkpoint=CheckpointOptions(config.checkpoint.every, config.checkpoint.keep, resume, about),
            run_folder=RunFolderOptions(f"{config.model.layers}-layer GPT", {CONFIG: config.to_toml()}),
            failures=FailureOptions(
                plan_source, script, trace, config.cluster.lease, config.cluster.compare_every, config.cluster.restarts
            ),
        )
        samples = config.data.samples
        return Job(plan, self._stages, self._text, next_byte_loss, self._optimizer, training.steps, samples, out, options)
