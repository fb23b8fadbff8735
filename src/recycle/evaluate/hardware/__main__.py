"""The parts of `recycle bench cluster` that need the hardware, as a command for machines that have only torch and msgspec.

PYTHONPATH=src python -m recycle.evaluate.hardware profile FOLDER --backend cpu-cores
PYTHONPATH=src python -m recycle.evaluate.hardware race FOLDER
PYTHONPATH=src python -m recycle.evaluate.hardware deaths FOLDER
"""

import argparse
import signal
import sys
from pathlib import Path

from recycle.core.errors import UserError
from recycle.evaluate.hardware.evaluation_folder import begin_evaluation, hardware, measure_part, read_setup
from recycle.evaluate.hardware.measurement_size import MeasurementSize, add_size_arguments
from recycle.evaluate.hardware.setup import BACKENDS, STUDIES, TECHNIQUES, Setup
from recycle.evaluate.hardware.variants import chosen_variants

_NAME = "python -m recycle.evaluate.hardware"


def run_hardware_part() -> int:
    """Measure one part and return the exit code."""
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
    parser.add_argument("--backend", choices=BACKENDS, help="of a new folder")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="a small model, for a new folder")
    parser.add_argument("--study", choices=STUDIES, default=TECHNIQUES, help="of a new folder")
    parser.add_argument("--microbatches", type=int, help="of each pipeline, for a new folder")
    parser.add_argument("--variants", metavar="LIST", help="race only some variants, by their names in plans/")
    add_size_arguments(parser)
    return parser


def _measure(args: argparse.Namespace) -> None:
    size = MeasurementSize.from_arguments(args)
    if args.backend:
        usual = Setup.usual(args.backend, args.workers, args.small, args.study, args.microbatches)
        begin_evaluation(args.folder, usual)
    setup = read_setup(args.folder)
    with hardware(setup) as choose_cores:
        measure_part(args.part, args.folder, setup, size, print, chosen_variants(setup, args.variants), choose_cores)


if __name__ == "__main__":
    sys.exit(run_hardware_part())
