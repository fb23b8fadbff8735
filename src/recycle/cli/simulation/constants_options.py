"""The option --constants: a file of constants, or the folder of a run that measured them."""

import argparse
from pathlib import Path

from recycle.cli.arguments import add_set_option
from recycle.sim.campaign.run_constants import DEATH_TO_GO_MS, RunConstants, read_run_constants
from recycle.sim.systems.constants import Constants


def add_constants_options(options: argparse._ActionsContainer) -> None:
    about = "TOML with pauses and checkpoints, a table a system; or the folder of a run, whose recoveries give ReCycle's pauses"
    options.add_argument("--constants", type=Path, metavar="FILE|RUN", help=about)
    add_set_option(options, "one of them, such as oobleck.reconfigure=57s")


def constants_of_run(args: argparse.Namespace) -> RunConstants | None:
    """What the run measured that --constants names; None if it names a file, or is not given."""
    return read_run_constants(args.constants) if args.constants and args.constants.is_dir() else None


def constants_from_options(args: argparse.Namespace, num_parameters: float, num_workers: int) -> Constants:
    """The constants for the size of the model, changed by --constants, and then by --set."""
    constants = Constants.for_model(num_parameters)
    if measured := constants_of_run(args):
        constants = measured.applied(constants, num_workers)
    elif args.constants:
        constants = constants.with_file(args.constants)
    return constants.with_values(args.set)


def constants_note(args: argparse.Namespace, num_workers: int) -> str | None:
    """Say which pauses the run measured, and what they are with so many workers."""
    measured = constants_of_run(args)
    if measured is None:
        return None
    times = (measured.detect_us, measured.abort_us, measured.plan_us, measured.regroup_us)
    detect, abort, plan, regroup = (f"{time_us / 1000:g} ms" for time_us in times)
    beyond = ", extrapolated" if num_workers > DEATH_TO_GO_MS[-1][0] else ""
    return (
        f"pauses as measured with {measured.num_workers} workers (recoveries: {measured.num_recoveries}): detect {detect}, abort "
        f"{abort}, plan {plan}, regroup {regroup}; with {num_workers:,} workers regroup "
        f"{measured.regroup_at_us(num_workers) / 1000:.4g} ms{beyond}"
    )
