"""The parts of `recycle bench cluster` that need the hardware, for machines that have torch and nothing else of ours installed.

PYTHONPATH=src python -m recycle.evaluate.hardware profile FOLDER --backend cpu-cores
PYTHONPATH=src python -m recycle.evaluate.hardware race FOLDER
PYTHONPATH=src python -m recycle.evaluate.hardware deaths FOLDER
"""

import argparse
import signal
import sys
from pathlib import Path

from recycle.core.errors import UserError
from recycle.evaluate.hardware import DEFAULT_ITERATIONS, DEFAULT_KILLS, DEFAULT_ROUNDS
from recycle.evaluate.hardware.evaluation_folder import (
    begin_evaluation,
    hardware,
    measure_deaths,
    measure_profile,
    measure_race,
    read_setup,
)
from recycle.evaluate.hardware.setup import BACKENDS, Setup

_NAME = "python -m recycle.evaluate.hardware"


def main() -> int:
    args = _parser().parse_args()
    try:
        _measure(args)
    except UserError as problem:
        print(f"{_NAME}: {problem}", file=sys.stderr)
        return problem.exit_code
    except KeyboardInterrupt:
        later = "goes on with what is missing" if args.part == "race" else "begins again"
        print(f"\n{_NAME}: interrupted; the same command {later}", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_NAME, description="Measure a cluster on this machine.")
    parser.add_argument("part", choices=("profile", "race", "deaths"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, help="of a folder that is new")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a small model, for a folder that is new")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    parser.add_argument("--iterations", type=int, default=DEFAULT_ITERATIONS)
    parser.add_argument("--kills", type=int, default=DEFAULT_KILLS)
    return parser


def _measure(args: argparse.Namespace) -> None:
    for name in ("rounds", "iterations", "kills"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} is {getattr(args, name)}, but it must be at least 1")
    if args.backend:
        begin_evaluation(args.folder, Setup.usual(args.backend, args.workers, args.small))
    setup = read_setup(args.folder)
    with hardware(setup):
        if args.part == "profile":
            measure_profile(args.folder, setup, print)
        elif args.part == "deaths":
            measure_deaths(args.folder, setup, args.kills, print)
        else:
            measure_race(args.folder, setup, args.rounds, args.iterations, print)


if __name__ == "__main__":
    sys.exit(main())
