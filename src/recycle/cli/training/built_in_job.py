"""The built-in job: a small GPT that learns text, as a `TrainConfig` describes it."""

from functools import partial
from typing import TYPE_CHECKING

from recycle.cli.training.train_config import TrainConfig
from recycle.core.errors import UserError
from recycle.planner.shared_layers_choice import AUTO

if TYPE_CHECKING:
    import torch

    from recycle.runtime.compute.optimizer_step import MakeOptimizer
    from recycle.runtime.job import Job
    from recycle.runtime.options import EvaluationOptions


def job(config: TrainConfig) -> "Job":
    """The job of the configuration, with the shape of its cluster instead of a plan."""
    from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
    from recycle.models.text import Text
    from recycle.runtime.compute.learning_rate import WarmUpThen
    from recycle.runtime.data.data_options import DataOptions
    from recycle.runtime.job import Job
    from recycle.runtime.options import CheckpointOptions, FailureOptions, RunFolderOptions, TrainOptions, refuse_absent_device

    model, training, cluster = config.model, config.training, config.cluster
    gpt = GptConfig(
        context=model.context,
        width=model.width,
        num_heads=model.heads,
        num_layers=model.layers,
        dropout=model.dropout,
        ties_embeddings=model.tied,
    )
    refuse_absent_device(training.device)
    options = TrainOptions(
        seed=training.seed,
        is_exact=training.exact,
        max_norm=training.max_norm or None,
        schedule=WarmUpThen(training.schedule, training.warmup, training.steps),
        sum_dtype=sum_dtype(training.sums),
        lean_steps=LEAN_STEPS[training.lean_steps],
        autocast=autocast_dtype(training.precision),
        activation_checkpointing=training.activation_checkpointing,
        compile_backend=training.compile,
        device=training.device,
        transport=cluster.transport,
        port=cluster.port,
        time_limit_s=training.time_limit_s,
        data=DataOptions(config.data.loader_processes),
        evaluation=_evaluation(config),
        checkpoint=CheckpointOptions(config.checkpoint.every, config.checkpoint.keep),
        run_folder=RunFolderOptions(f"{model.layers}-layer GPT"),
        failures=FailureOptions(
            lease_s=cluster.lease,
            compare_every=cluster.compare_every,
            restarts=cluster.restarts,
            follow_speeds=cluster.follow_speeds,
        ),
    )
    stages, text = gpt_stages(gpt, cluster.stages, training.seed), Text(model.context, config.data.text or None)
    return Job(
        cluster.shape,
        stages,
        text,
        next_byte_loss,
        _optimizer(config),
        training.steps,
        config.data.samples,
        options=options,
    )


def _evaluation(config: TrainConfig) -> "EvaluationOptions":
    from recycle.models.text import Text
    from recycle.runtime.options import EvaluationOptions

    if not (text := config.data.evaluation_text) and (config.training.evaluate_every or config.training.patience):
        raise UserError("there is no text to evaluate the GPT on: name some with --evaluation-text")
    data = Text(config.model.context, text) if text else None
    return EvaluationOptions(data, config.training.evaluate_every, config.training.patience)


LEAN_STEPS = {AUTO: None, "yes": True, "no": False}


def sum_dtype(name: str) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


def autocast_dtype(precision: str) -> "torch.dtype | None":
    import torch

    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)


def _optimizer(config: TrainConfig) -> "MakeOptimizer":
    import torch

    training = config.training
    if training.optimizer == "adamw":
        return partial(torch.optim.AdamW, lr=training.rate, weight_decay=training.weight_decay)
    return partial(torch.optim.SGD, lr=training.rate, weight_decay=training.weight_decay, momentum=training.momentum)
