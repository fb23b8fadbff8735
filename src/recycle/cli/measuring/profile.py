"""`recycle profile`: measure the cost of every op, message, reduction and step while all workers of the cluster compute."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.cli.profile_text import describe_profile, stability_text, start_text
from recycle.cli.terminal import progress_bar
from recycle.cli.training.job_from_config import TrainingJobFactory
from recycle.cli.training.train_config import TrainConfig, add_config_arguments, read_config
from recycle.core.errors import UserError
from recycle.core.files import refuse_unwritable, write_text
from recycle.core.units import count_text, format_duration
from recycle.report.record.contention_text import oversubscription_note

if TYPE_CHECKING:
    from recycle.profiling.rehearsal import Patience

DEFAULT_OUT = Path("profile.json")
_DEFAULT_ROUNDS = 8
_DESCRIPTION = """\
Measure the costs of training on this machine: a process for every worker of the cluster trains for a while, over the transport of
'recycle train', until the medians of the measured times are stable. Plans are made from the profile that is written. A small
model on a few cores takes about a minute, a larger one several.

Flags and the TOML file are those of 'recycle train'. Settings of steps, checkpoints and dead workers have no effect here: all
workers are measured, and the trained weights are discarded."""
_EXAMPLES = """\
examples:
  the GPT of 'recycle train' on this machine's cores, three pipelines of four stages, two samples a micro-batch
    recycle profile --stages 4 --microbatch 2 --out profile.json
  a larger one on a GPU, computed in bfloat16
    recycle profile --stages 4 --microbatch 2 --device cuda --width 1024 --heads 8 --context 1024 --precision bfloat16
  the model of an earlier run, from its configuration file
    recycle profile runs/a/config.toml --out profile.json
  then a plan from it, for the cluster that was measured
    recycle plan --profile profile.json --pipelines 3 --stages 4 --microbatches 6 --fail W1_2 --out plan.json"""


def add_profile_parser(subparsers: Subparsers) -> None:
    summary, usage = "measure a profile while all workers compute", "recycle profile [CONFIG] [options]"
    parser = add_command(subparsers, "profile", run_profile, summary, _DESCRIPTION, _EXAMPLES, usage)
    add_config_arguments(parser)
    about = "samples of a micro-batch, another name of --samples"
    parser.add_argument("--microbatch", type=int, dest="data.samples", default=argparse.SUPPRESS, metavar="N", help=about)
    about = f"the most rounds, if medians do not become stable before (default: {_DEFAULT_ROUNDS})"
    parser.add_argument("--rounds", type=int, default=_DEFAULT_ROUNDS, metavar="N", help=about)
    about = f"the profile to write (default: {DEFAULT_OUT})"
    parser.add_argument("--out", type=output_path, default=DEFAULT_OUT, metavar="FILE", help=about)
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of a table")


def run_profile(args: argparse.Namespace) -> None:
    if args.rounds < 1:
        raise UserError(f"--rounds is {args.rounds}, but at least 1 round must be measured")
    config = without_clipping(read_config(args))
    refuse_unwritable(args.out)
    factory = TrainingJobFactory(config)
    config = factory.config
    from recycle.profiling.machine import num_cores
    from recycle.profiling.rehearsal import Patience, rehearsal_plan, rehearse

    shape, usual = config.cluster.shape, Patience()
    patience = Patience(usual.share, min(usual.least_rounds, args.rounds), args.rounds)
    job = factory.job(rehearsal_plan(shape, is_split=True))
    if config.training.device == "cpu" and (note := oversubscription_note(shape.num_workers, num_cores())):
        print(note, file=sys.stderr)
    print(start_text(shape, patience), file=sys.stderr, flush=True)
    with showing_rounds(shape.num_workers, patience) as advance:
        found = rehearse(job, config.model_text, patience, advance)
    write_text(args.out, json.dumps(found.profile.to_json(), indent=1) + "\n")
    if args.json:
        print(json.dumps(found.profile.to_json()))
        if not found.is_stable:
            print(f"note: {stability_text(found, patience)}", file=sys.stderr)
    else:
        print(describe_profile(found, patience, shape, args.out))


def without_clipping(config: TrainConfig) -> TrainConfig:
    """Return the configuration without gradient clipping: a clipped step waits for all stages, which is no cost of its own."""
    return replace(config, training=replace(config.training, max_norm=0.0), given=config.given | {"training.max_norm"})


@contextmanager
def showing_rounds(num_workers: int, patience: "Patience") -> Iterator[Callable[[int, float], None]]:
    """Show the progress of a measurement on stderr: a bar on a terminal, otherwise one line for each phase.

    Yields the function to call after a round, with its number and the share by which its medians changed.
    """
    with progress_bar() as bar:
        task, round_began_s = bar.add_task("", total=patience.most_rounds), time.monotonic()

        def show(num_done: int, text: str) -> None:
            bar.update(task, completed=num_done, description=text)
            if bar.disable:
                print(text, file=sys.stderr, flush=True)

        def advance(number: int, change: float) -> None:
            nonlocal round_began_s
            took_us = round((time.monotonic() - round_began_s) * 1e6)
            round_began_s, num_left = time.monotonic(), patience.most_rounds - number
            left = f", at most {format_duration(took_us * num_left)} left" if num_left else ""
            moved = f": medians moved by {change:.1%}" if number > 1 else ""
            show(number, f"round {number} of at most {patience.most_rounds}{moved}{left}")

        show(0, f"starting the processes of {count_text(num_workers, 'worker')}")
        yield advance
