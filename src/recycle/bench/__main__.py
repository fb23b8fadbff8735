"""The parts of `recycle bench cluster` that need the hardware, for machines that have torch and nothing else of ours installed.

PYTHONPATH=src python -m recycle.bench profile FOLDER --backend cpu-cores
PYTHONPATH=src python -m recycle.bench race FOLDER
PYTHONPATH=src python -m recycle.bench deaths FOLDER
"""

import argparse
import sys
from pathlib import Path

from recycle.bench.cluster import (
    DEFAULT_ITERATIONS,
    DEFAULT_KILLS,
    DEFAULT_ROUNDS,
    begin,
    measure_deaths,
    measure_profile,
    measure_race,
    read_setup,
)
from recycle.bench.setup import BACKENDS, Setup


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recycle.bench", description="Measure a cluster on this machine.")
    parser.add_argument("part", choices=("profile", "race", "deaths"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=BACKENDS, help="of a folder that is new")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    parser.add_argument("--iterations", type=int, default=DEFAULT_ITERATIONS)
    parser.add_argument("--kills", type=int, default=DEFAULT_KILLS)
    args = parser.parse_args()
    if args.backend:
        begin(args.folder, Setup.usual(args.backend, args.workers))
    setup = read_setup(args.folder)
    if args.part == "profile":
        measure_profile(args.folder, setup, print)
    elif args.part == "deaths":
        measure_deaths(args.folder, setup, args.kills, print)
    else:
        measure_race(args.folder, setup, args.rounds, args.iterations, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
