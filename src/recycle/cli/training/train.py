"""`recycle train`: it trains a job file or a small GPT on this machine, with a process for every live worker of a plan."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.cli.live.event_text import format_loss, format_rate
from recycle.cli.live.json_lines import JsonLines
from recycle.cli.live.page_process import add_page_arguments, refuse_page_without_folder
from recycle.cli.live.run_observers import RunObservers, observers_of_run
from recycle.cli.profile_text import mismatch_note
from recycle.cli.training.failure_flags import add_failure_arguments, read_failures
from recycle.cli.training.job_from_config import TrainingJobFactory
from recycle.cli.training.plan_choice import choose_layers, choose_plan, choose_source, describe_moves
from recycle.cli.training.resumed_config import resumed_config
from recycle.cli.training.train_config import TrainConfig, add_config_arguments, read_config
from recycle.cli.training.train_sections import ClusterSection, LogSection
from recycle.core.errors import NotSaved, UserError
from recycle.core.events.record import PARTS
from recycle.core.events.record_file import SUMMARY
from recycle.core.files import refuse_unwritable
from recycle.core.plans.plan import Plan
from recycle.core.units import format_bytes, format_us
from recycle.planner.problem_from_text import unsplit_costs

if TYPE_CHECKING:
    from recycle.runtime.callbacks.protocol import Logger
    from recycle.runtime.options import ShowOptions

_DESCRIPTION = """\
Train on this machine, a process for every live worker of a plan: the job of a Python file, whose function job returns a
recycle.Job, or else a small GPT. Workers may be dead from the start, and may die, hang and come back while it runs: kill -9 any
of them, or let --kill do it.

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
  go on to step 60 with four workers instead of twelve: the same batches, and with --exact the same weights
    recycle train --resume runs/a --steps 60 --pipelines 2 --stages 2
  one worker is killed in step 5, another hangs in step 8, and the first comes back: the same weights again
    recycle train --steps 20 --exact --kill W1_2@5 --hang W0_1@8 --rejoin W1_2@12 --json
  your own model, data and optimizer, with some changes
    recycle train train.py --steps 100 --kill W1_1@5 --out runs/mine
  neighbouring stages share layers, as many as memory allows and one dead worker needs: a death shifts the cuts
    recycle train --pipelines 3 --stages 4 --layers 16 --steps 20 --exact --shared-layers auto --kill W1_2@8
  a page in the browser, on which a click kills a worker
    recycle train --pipelines 3 --stages 4 --steps 200 --out runs/c --dashboard --allow-injection
  a file, and what differs from it
    recycle train runs/a/config.toml --model.width 128 --out runs/b

exit codes: 0 done; 2 input that cannot be used; 10 the model cannot be cut so; 11 too little data; 12 a plan or library of
something else; 13 a port in use; 14 a run of another job; 15 no whole checkpoint; 16 a stage's output cannot be sent; 17 a loss
that is no scalar; 20 a worker failed; 21 a planner failed; 22 peers hold different weights; 23 a loss that is not finite; 24 the
last checkpoint could not be written; 130 interrupted, 143 ended by SIGTERM."""

_MOMENT_S = 3.0


def add_train_parser(subparsers: Subparsers) -> None:
    summary = "train a job file or a small GPT on this machine, a process for every live worker"
    usage = "recycle train [FILE] [options]"
    parser = add_command(subparsers, "train", run_train, summary, _DESCRIPTION, _EXAMPLES, usage)
    add_config_arguments(parser)
    add_failure_arguments(parser)
    parser.add_argument("--out", type=output_path, metavar="FOLDER", help="record the run there, with checkpoints")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder, from its last checkpoint")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    add_page_arguments(parser, may_inject=True)


def run_train(args: argparse.Namespace) -> None:
    config, out = config_and_folder(args)
    if out:
        refuse_unwritable(out / SUMMARY)
    elif args.config is None:  # a job file may name a folder
        refuse_page_without_folder(args, out)
    factory, plan = prepare(config)
    from recycle.runtime.job_checks import (
        doubts_about,
        refuse_changing_data,
        refuse_float16_parameters,
        refuse_unusable_optimizer,
    )
    from recycle.runtime.launch.watched_launch import launch_watched

    config, out = factory.config, out or factory.out
    cluster, resume = plan.problem.cluster, args.resume is not None
    failures = read_failures(args, cluster.shape, config.training.steps, sorted(cluster.failed))
    source = factory.plan_source or choose_source(plan, config.cluster)
    job = factory.job(plan, out, resume, source, *failures)
    refuse_changing_data(job)
    refuse_unusable_optimizer(job)
    refuse_float16_parameters(job)
    for doubt in doubts_about(job):
        sayer(config.log.json_lines)(f"warning: {doubt}")
    loggers = loggers_of(config, out)
    with observers_of_config(args, config, plan, out) as view:
        trained = launch_watched(job, view.observers, loggers, view.warn, view.injections)
    facts = trained.to_json()
    print(json.dumps(facts) if args.json else describe_run(facts, out))
    if out is not None:
        refuse_unsaved(facts, f"recycle train --resume {out}")


def prepare(config: TrainConfig, is_local: bool = True) -> tuple[TrainingJobFactory, Plan]:
    """Make the job factory and the plan; a line on the error stream says what takes long, and what was chosen.

    Unless it `is_local`, nothing is known of the memory of the machines on which workers will run.
    """
    factory, profile = TrainingJobFactory(config), None
    if factory.plan is not None:
        return factory, factory.plan
    config = factory.config
    if config.cluster.measure or (is_local and config.cluster.shares_at_unknown_costs):
        with say_if_slow("measuring a profile of the model on this machine", config.log.json_lines):
            profile = factory.measure_profile()
    num_layers = factory.num_layers() if config.cluster.shared_layers or config.cluster.mean_time_between_failures else ()
    sentence = "planning (the first plan on a machine compiles the scheduler, which takes some seconds)"
    with say_if_slow(sentence, config.log.json_lines):
        limit_bytes = factory.worker_memory_bytes() if is_local else None
        if (choice := choose_layers(config.cluster, profile, num_layers, limit_bytes)) is not None:
            sayer(config.log.json_lines)(choice.sentence())
            factory.settle_shared_layers(choice.num)
        return factory, choose_plan(_with_costs(factory.config), profile, num_layers)


def _with_costs(config: TrainConfig) -> ClusterSection:
    """The cluster with the costs of ops whose backward pass is not split, if it is not and nothing else says what ops cost."""
    cluster, training = config.cluster, config.training
    if training.splits_backward or cluster.costs:
        return cluster
    costs = unsplit_costs(cluster.op_costs, training.activation_checkpointing)
    return replace(cluster, costs=",".join(map(str, costs)))


def sayer(as_json: bool) -> Callable[[str], None]:
    """What prints a sentence on the error stream, before there is a live view."""
    return JsonLines(sys.stderr).say if as_json else partial(print, file=sys.stderr, flush=True)


@contextmanager
def say_if_slow(sentence: str, as_json: bool) -> Iterator[None]:
    """Print the sentence on the error stream if the block takes longer than a moment."""
    timer = Timer(_MOMENT_S, sayer(as_json), (sentence,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def config_and_folder(args: argparse.Namespace) -> tuple[TrainConfig, Path | None]:
    """The configuration and the run folder. A resumed run has the configuration in its folder, with the changes of the flags."""
    if args.resume is None:
        return read_config(args), args.out
    if args.config is not None or args.out is not None:
        raise UserError("--resume goes on with what is in its folder: leave FILE and --out out")
    return resumed_config(args), args.resume


def show_options(log: LogSection, args: argparse.Namespace) -> "ShowOptions":
    """How the run is shown, by its configuration and by the flags of its page."""
    from recycle.runtime.options import ShowOptions

    exports = log.json_lines, log.metrics_port, log.metrics_host, log.otlp
    page = args.dashboard, args.dashboard_host, args.dashboard_token_file, tuple(args.dashboard_name)
    return ShowOptions(*exports, *page, getattr(args, "allow_injection", False))


@contextmanager
def observers_of_config(args: argparse.Namespace, config: TrainConfig, plan: Plan, out: Path | None) -> Iterator[RunObservers]:
    """The observers of the run of a configuration, after sentences about its plan: what it moves, whether its profile fits."""
    refuse_page_without_folder(args, out)
    with observers_of_run(show_options(config.log, args), plan, config.training.steps, out) as view:
        for sentence in describe_moves(plan, config.cluster):
            view.say(sentence)
        used_for = (plan.problem.shape.num_pipelines, config.training.device, config.data.samples, config.model_text)
        if note := mismatch_note(plan.problem.profile.taken, *used_for):
            view.say(note)
        yield view


def loggers_of(config: TrainConfig, out: Path | None) -> "Sequence[Logger]":
    """The loggers that the configuration names."""
    if not config.log.logger_names:
        return ()
    from recycle.loggers.select import make_loggers

    return make_loggers(config.log.logger_names, out)


def describe_run(facts: dict[str, Any], out: Path | None) -> str:
    losses, peaks = facts["losses"], facts["peak_memory_bytes"].values()
    dead = f", dead from the start: {', '.join(facts['dead'])}" if facts["dead"] else ""
    lines = [f"workers    {facts['workers']}{dead}"]
    if losses:
        first = next((number for number, loss in enumerate(losses) if loss is not None), 0)  # a new leader has not all of them
        lines.append(
            f"loss       {format_loss(losses[first])} at step {first + 1}, {format_loss(losses[-1])} at step {facts['steps']}"
        )
    if evaluations := facts.get("evaluations"):  # not of an earlier release
        best = min(evaluations, key=lambda each: math.inf if each["loss"] is None else each["loss"])
        last, lowest = (f"{format_loss(each['loss'])} after step {each['step']}" for each in (evaluations[-1], best))
        lines.append(f"evaluation loss {last}" + (f", at the best {lowest}" if best != evaluations[-1] else ""))
    if facts.get("stopped_because"):
        lines.append(f"stopped    after step {facts['steps']}: {facts['stopped_because']}")
    if facts["iteration_us"]:
        ratio = facts["iteration_us"] / max(1, facts["planned_iteration_us"])
        lines.append(
            f"iteration  {format_us(facts['iteration_us'])}, {ratio:.2f} of what the plan says at the speed at which ops ran; "
            f"{format_rate(facts['samples_per_s'])} samples/s; first step after {format_us(facts['start_us'])}"
        )
    lines += [f"recovery   {_recovery(each)}" for each in facts["recoveries"]]
    lines.append(f"memory     a worker's process held {format_bytes(max(peaks))} at most")
    lines.append(f"weights    sha256 {facts['weights_sha256']}")
    lines += [f"warning    {warning}" for warning in facts["warnings"]]
    if out:
        saved = f", but the newest checkpoint is of step {facts['saved_steps']}" if facts["saved_steps"] < facts["steps"] else ""
        lines.append(f"written    {out}{saved}")
    return "\n".join(lines)


def refuse_unsaved(facts: dict[str, Any], resume: str) -> None:
    """Raise if the last checkpoint of a run could not be written."""
    if facts["saved_steps"] < facts["steps"]:
        newest = f"the newest is of step {facts['saved_steps']}" if facts["saved_steps"] else "there is none"
        again = f", and go on with: {resume}" if facts["saved_steps"] else ""
        raise NotSaved(f"all steps are done, but the last checkpoint could not be written; {newest}: make room{again}")


def _recovery(facts: dict[str, Any]) -> str:
    what = f"{'joined' if facts['joins'] else 'lost'} {facts['worker']}" if facts["worker"] else "another plan"
    parts = [f"{part} {format_us(facts[f'{part}_us'])}" for part in PARTS if facts[f"{part}_us"]]
    return f"step {facts['step']}: {what} ({facts['cause']}); {', '.join(parts)}"
