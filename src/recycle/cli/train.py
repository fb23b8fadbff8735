"""`recycle train`: a small GPT on real text, with a process for every live worker of a plan."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.cli.live import LiveView
from recycle.cli.train_config import TrainConfig, add_config_arguments, changes, load_config, read_config
from recycle.cli.train_plan import choose_plan, seats_taken
from recycle.core.errors import FileProblem, ForeignRun, UserError
from recycle.core.files import refuse_unwritable
from recycle.core.plan import Plan
from recycle.core.record import CHECKPOINTS, SUMMARY, Event
from recycle.core.units import format_bytes, format_us

if TYPE_CHECKING:
    from recycle.core.profile import Profile
    from recycle.runtime.books import Trained

_DESCRIPTION = """\
Train a small GPT on this machine, a process for every live worker of a plan. Workers may be dead from the start.

Every key of the configuration is a flag, and can stand in a TOML file; flags outrank the file. With --out, the run leaves
config.toml, plan.json, record.jsonl, summary.json and checkpoints, and 'recycle report' shows it."""
_EXAMPLES = """\
examples:
  twelve workers, one of them dead from the start
    recycle train --pipelines 3 --stages 4 --microbatches 6 --steps 20 --dead W1_2 --out runs/a
    recycle report runs/a
  the same weights, bit for bit, with nobody dead: compare weights_sha256
    recycle train --pipelines 3 --stages 4 --microbatches 6 --steps 20 --exact --json
    recycle train --pipelines 3 --stages 4 --microbatches 6 --steps 20 --exact --dead W1_2 --json
  go on to step 40, with another worker dead
    recycle train --resume runs/a --steps 40 --dead W0_0
  a file, and what differs from it
    recycle train runs/a/config.toml --model.width 128 --out runs/b

exit codes: 0 done; 2 input that cannot be used; 10 the model cannot be cut so; 11 too little data; 12 a plan or library of
something else; 13 a port in use; 14 a run of another job; 15 no whole checkpoint; 16 a stage's output cannot be sent; 17 a loss
that is no scalar; 20 a worker failed; 130 interrupted."""
CONFIG = "config.toml"
# What may change when a run goes on: who computes, where, and how long.
_FREE = ("cluster.", "checkpoint.", "log.", "training.steps", "training.device")
_BOUND = ("cluster.pipelines", "cluster.stages", "cluster.microbatches")


def is_free(name: str) -> bool:
    """Whether a key of the configuration may change when a run goes on."""
    return name.startswith(_FREE) and name not in _BOUND


def add_train_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "train",
        usage="recycle train [CONFIG] [options]",
        help="train a small GPT on this machine, a process for every live worker",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="record the run there, with checkpoints")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder, from its last checkpoint")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    config, out = _config(args)
    if out:
        refuse_unwritable(out / SUMMARY)
    torch_parts = _Parts(config)
    plan = choose_plan(config.cluster, torch_parts.measured() if config.cluster.measure else None)
    with _watching(config, plan, out, args.resume is not None) as watch:
        trained = torch_parts.train(plan, out, args.resume is not None, watch)
    facts = trained.to_json()
    print(json.dumps(facts) if args.json else _text(facts, out))
    return 0


def _config(args: argparse.Namespace) -> tuple[TrainConfig, Path | None]:
    """What to train and where. A run that goes on has its configuration, but for what the flags change."""
    if args.resume is None:
        return read_config(args), args.out
    if args.config is not None or args.out is not None:
        raise UserError("--resume goes on with what is in its folder: leave CONFIG and --out out")
    path = args.resume / CONFIG
    if not path.is_file():
        raise FileProblem(f"{args.resume} is no run that can be resumed: it has no {CONFIG}")
    args.config = path
    config = read_config(args)
    for name, (before, now) in changes(load_config(path), config).items():
        if not is_free(name):
            raise ForeignRun(
                f"the run in {args.resume} has {name} = {before}, not {now}: what it computes cannot change when it goes on"
            )
    return config, args.resume


class _Parts:
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
        from recycle.runtime.batches import Batches
        from recycle.runtime.measure import measure

        cluster = self.config.cluster
        shape = Shape(cluster.pipelines, cluster.stages, cluster.microbatches)
        batches = Batches(self._text, shape, self.config.data.samples, self.config.training.seed)
        num_threads, training = torch.get_num_threads(), self.config.training
        torch.set_num_threads(1)  # as in a worker
        try:
            return measure(
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

    def train(self, plan: Plan, out: Path | None, resume: bool, watch: Callable[[Event], None]) -> "Trained":
        from recycle.models.gpt import next_byte_loss
        from recycle.runtime.schedules import WarmUpThen
        from recycle.runtime.train import train

        config, training = self.config, self.config.training
        return train(
            plan,
            self._stages,
            self._text,
            next_byte_loss,
            self._optimizer,
            steps=training.steps,
            samples=config.data.samples,
            seed=training.seed,
            exact=training.exact,
            max_norm=training.max_norm or None,
            schedule=WarmUpThen(training.schedule, training.warmup, training.steps),
            sums=self._sums,
            autocast=self._autocast,
            device=training.device,
            out=out,
            checkpoint_every=config.checkpoint.every,
            keep=config.checkpoint.keep,
            resume=resume,
            port=config.cluster.port,
            name=f"{config.model.layers}-layer GPT",
            about={name: value for name, value in config.values().items() if not is_free(name)},
            files={CONFIG: config.to_toml()},
            watch=watch,
        )


@contextmanager
def _watching(config: TrainConfig, plan: Plan, out: Path | None, resume: bool) -> Iterator[Callable[[Event], None]]:
    """Everybody who wants to hear how it goes."""
    with ExitStack() as stack:
        view = stack.enter_context(LiveView(config.training.steps))
        listeners: list[Callable[[Event], None]] = [view.hear]
        for sentence in seats_taken(plan, config.cluster):
            view.say(sentence)
        if config.log.metrics_port:
            from recycle.cli.metrics_server import MetricsServer
            from recycle.report.prometheus import Gauges

            gauges = Gauges()
            server = stack.enter_context(MetricsServer(config.log.metrics_port, gauges))
            view.say(f"metrics for Prometheus at {server.url}")
            listeners.append(gauges.hear)
        if config.log.tensorboard:
            from recycle.cli.tensorboard import TensorBoardLog

            if out is None:
                raise UserError("log.tensorboard writes beside the results: name a folder with --out")
            listeners.append(stack.enter_context(TensorBoardLog(out / "tensorboard", _num_done(out) if resume else 0)).hear)

        def watch(event: Event) -> None:
            for listener in listeners:
                listener(event)

        yield watch


def _num_done(run: Path) -> int:
    """From which step a run goes on."""
    from recycle.runtime.checkpoint import latest

    return latest(run / CHECKPOINTS)[0].num_steps


def _text(facts: dict[str, Any], out: Path | None) -> str:
    losses, peaks = facts["losses"], facts["peak_memory_bytes"].values()
    dead = f", dead from the start: {', '.join(facts['dead'])}" if facts["dead"] else ""
    lines = [f"workers    {facts['workers']}{dead}"]
    if losses:
        lines.append(f"loss       {_loss(losses[0])} at step 1, {_loss(losses[-1])} at step {facts['steps']}")
    if facts["iteration_us"]:
        ratio = facts["iteration_us"] / max(1, facts["planned_iteration_us"])
        lines.append(
            f"iteration  {format_us(facts['iteration_us'])}, {ratio:.2f} of what the plan says at the speed at which ops ran; "
            f"{facts['samples_per_s']:g} samples/s; first step after {format_us(facts['start_us'])}"
        )
    lines.append(f"memory     a worker's process held {format_bytes(max(peaks))} at most")
    lines.append(f"weights    sha256 {facts['weights_sha256']}")
    lines += [f"warning    {warning}" for warning in facts["warnings"]]
    return "\n".join([*lines, f"written    {out}"] if out else lines)


def _loss(value: float | None) -> str:
    return f"{value:.4f}" if value is not None else "not finite"
