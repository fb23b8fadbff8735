"""What `recycle train` trains, made from a configuration: the GPT in stages, its text, its optimizer; and the job of them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.cli.training.plan_choice import choose_source
from recycle.cli.training.train_config import TrainConfig
from recycle.core.errors import UserError
from recycle.core.events.failure_script import NOTHING, Script
from recycle.core.events.record import Event
from recycle.core.events.trace import Trace
from recycle.core.plans.plan import Plan

if TYPE_CHECKING:
    from recycle.core.profile import Profile
    from recycle.runtime.coordinator.ledger.run_ledger import Trained
    from recycle.runtime.job import Job

CONFIG = "config.toml"
# What may change when a run goes on: who computes, where, and how long.
_FREE = ("cluster.", "checkpoint.", "log.", "training.steps", "training.device")
_BOUND = ("cluster.pipelines", "cluster.stages", "cluster.microbatches")


def is_free(name: str) -> bool:
    """Whether a key of the configuration may change when a run goes on."""
    return name.startswith(_FREE) and name not in _BOUND


class TrainingJobFactory:
    """What is trained, made from a configuration. torch is imported here, because planning and simulating work without it."""

    def __init__(self, config: TrainConfig) -> None:
        try:
            import torch

            from recycle.models.gpt import GptConfig, gpt_stages
            from recycle.models.text import Text
            from recycle.runtime.job import refuse_absent
        except ImportError as problem:
            raise UserError(f"training needs torch ({problem}): install it with pip install 'recycle-train[train]'") from None
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
        refuse_absent(training.device)
        self._stages = gpt_stages(gpt, config.cluster.stages, training.seed)
        self._text = Text(model.context, config.data.text or None)
        self._optimizer: Callable[..., Any] = (
            partial(torch.optim.AdamW, lr=training.rate, weight_decay=training.weight_decay)
            if training.optimizer == "adamw"
            else partial(torch.optim.SGD, lr=training.rate, weight_decay=training.weight_decay, momentum=training.momentum)
        )
        self._sums: torch.dtype = getattr(torch, training.sums)
        self._autocast = torch.bfloat16 if training.precision == "bfloat16" else None

    def measured(self) -> "Profile":
        """A profile of these stages on this machine."""
        import torch

        from recycle.core.cluster import Shape
        from recycle.models.gpt import next_byte_loss
        from recycle.profiling.stage_times import measure_stages
        from recycle.runtime.compute.microbatches import MicroBatches

        cluster = self.config.cluster
        shape = Shape(cluster.pipelines, cluster.stages, cluster.microbatches)
        batches = MicroBatches(self._text, shape, self.config.data.samples, self.config.training.seed)
        num_threads, training = torch.get_num_threads(), self.config.training
        torch.set_num_threads(1)  # as in a worker
        try:
            return measure_stages(
                self._stages,
                batches,
                next_byte_loss,
                is_exact=training.exact,
                make_optimizer=self._optimizer,
                sum_dtype=self._sums,
                autocast=self._autocast,
                device=training.device,
            )
        finally:
            torch.set_num_threads(num_threads)

    def arguments(self) -> dict[str, Any]:
        """What `recycle.train` and a job are told, apart from the plan and where it runs."""
        from recycle.models.gpt import next_byte_loss
        from recycle.runtime.compute.learning_rate import WarmUpThen

        config, training = self.config, self.config.training
        return {
            "stages": self._stages,
            "dataset": self._text,
            "loss": next_byte_loss,
            "optimizer": self._optimizer,
            "steps": training.steps,
            "samples": config.data.samples,
            "seed": training.seed,
            "exact": training.exact,
            "max_norm": training.max_norm or None,
            "schedule": WarmUpThen(training.schedule, training.warmup, training.steps),
            "sums": self._sums,
            "autocast": self._autocast,
            "device": training.device,
            "about": {name: value for name, value in config.values().items() if not is_free(name)},
        }

    def train(
        self,
        plan: Plan,
        out: Path | None,
        resume: bool,
        watch: Callable[[Event], None],
        script: Script = NOTHING,
        trace: Trace | None = None,
    ) -> "Trained":
        """Train with a process for every worker on this machine."""
        from recycle.runtime.train import train

        config = self.config
        return train(
            plan,
            **self.arguments(),
            out=out,
            checkpoint_every=config.checkpoint.every,
            keep=config.checkpoint.keep,
            resume=resume,
            port=config.cluster.port,
            name=self.name,
            files={CONFIG: config.to_toml()},
            watch=watch,
            plans=choose_source(plan, config.cluster),
            script=script,
            trace=trace,
            lease_s=config.cluster.lease,
        )

    def job(self, plan: Plan) -> "Job":
        """The same job for workers that are started by others."""
        from recycle.runtime.train import make_job

        return make_job(plan, **self.arguments())

    @property
    def name(self) -> str:
        return f"{self.config.model.layers}-layer GPT"
