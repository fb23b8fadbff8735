"""`recycle profile`: what every op, message, reduction and step costs here, with all workers of the cluster at work at once."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from recycle.cli.measuring.profile_text import at_rest, crowding, describe_profile
from recycle.cli.training.job_factory import TrainingJobFactory
from recycle.cli.training.train_config import TrainConfig, add_config_arguments, read_config
from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.core.files import refuse_unwritable, write_text

if TYPE_CHECKING:
    from recycle.profiling.rehearsal import Patience

DEFAULT_OUT = Path("profile.json")
_DEFAULT_ROUNDS = 8
_DESCRIPTION = """\
Measure what training costs on this machine: a process for every worker of the cluster trains for a while, over the links that
'recycle train' would have, until the medians stand still. The profile that comes of it is what plans are made from.

Flags and the TOML file are those of 'recycle train'. What says how long to train, what to keep or who is dead changes nothing
here: all workers are measured, and nothing that they learn is kept."""
_EXAMPLES = """\
examples:
  the GPT of 'recycle train' on this machine's cores, three pipelines of four stages, two samples a micro-batch
    recycle profile --stages 4 --microbatch 2 --out profile.json
  a larger one on a GPU, computed in bfloat16
    recycle profile --stages 4 --microbatch 2 --device cuda --width 1024 --heads 8 --context 1024 --precision bfloat16
  what a run trains, from its own file
    recycle profile runs/a/config.toml --out profile.json
  then a plan from it, for the cluster that was measured
    recycle plan --profile profile.json --pipelines 3 --stages 4 --microbatches 6 --fail W1_2 --out plan.json"""


def add_profile_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "profile",
        usage="recycle profile [CONFIG] [options]",
        help="measure a profile, with all workers at work at once",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--microbatch",
        type=int,
        dest="data.samples",
        default=argparse.SUPPRESS,
        metavar="N",
        help="samples of a micro-batch, another name of --samples",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=_DEFAULT_ROUNDS,
        metavar="N",
        help=f"rounds after which it ends though medians still move (default: {_DEFAULT_ROUNDS})",
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="FILE", help=f"where the profile goes (default: {DEFAULT_OUT})"
    )
    parser.add_argument("--json", action="store_true", help="print the profile as JSON instead of a table")
    parser.set_defaults(run=run_profile)


def run_profile(args: argparse.Namespace) -> int:
    if args.rounds < 1:
        raise UserError(f"--rounds is {args.rounds}, but at least 1 round must be measured")
    config = without_clipping(read_config(args))
    refuse_unwritable(args.out)
    parts = TrainingJobFactory(config)
    from recycle.profiling.machine import num_cores
    from recycle.profiling.rehearsal import Patience, rehearsal_plan, rehearse

    cluster, usual = config.cluster, Patience()
    shape = Shape(cluster.pipelines, cluster.stages, cluster.microbatches)
    patience = Patience(usual.share, min(usual.least_rounds, args.rounds), args.rounds)
    job = parts.job(rehearsal_plan(shape, is_split=True))
    if config.training.device == "cpu" and (note := crowding(shape.num_workers, num_cores())):
        print(note, file=sys.stderr)
    with _progress(patience) as progress:
        found = rehearse(job, config.model_text, patience, progress)
    write_text(args.out, json.dumps(found.profile.to_json(), indent=1) + "\n")
    if args.json:
        print(json.dumps(found.profile.to_json()))
        if not found.is_stable:
            print(f"note: {at_rest(found, patience)}", file=sys.stderr)
    else:
        print(describe_profile(found, patience, shape, args.out))
    return 0


def without_clipping(config: TrainConfig) -> TrainConfig:
    """The same, with steps that wait for nobody: one that is clipped waits for all stages, which is no cost of its own."""
    return replace(config, training=replace(config.training, max_norm=0.0))


@contextmanager
def _progress(patience: "Patience") -> Iterator[Callable[[int, float], None]]:
    """What shows each round on the error stream: in one line that changes, or line by line where that is no terminal."""
    console = Console(stderr=True)
    with console.status("starting a process for every worker") as status:

        def tell(number: int, unrest: float) -> None:
            moved = f": medians moved by {unrest:.1%}" if number > 1 else ""
            line = f"round {number} of at most {patience.most_rounds}{moved}"
            if console.is_terminal:
                status.update(line)
            else:
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield tell
