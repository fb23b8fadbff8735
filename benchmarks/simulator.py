"""Benchmark of the simulator: seconds of `recycle simulate` and `recycle replay`, cold and with cached plans.

make bench                                          every table, printed
python benchmarks/simulator.py --save               also writes docs/benchmarks/<date>-simulator.md
"""

import argparse
import datetime
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from rich.console import Console
from sheet import NO, ROOT, YES, Case, Row, Section, exit_code, machine, markdown, measure

from recycle.sim.systems.registry import SYSTEMS

ASKED_COLD_S, ASKED_CACHED_S, ASKED_MONTH_S, ASKED_REPLAY_S = 60, 10, 60, 60
JOB = "--model gpt-145.6b,microbatch=4 --gpu a100-80 --tensor-parallel 8"
DAY = "--interval 30m --hours 24"
# 419 interruptions in 54 days on 16,384 GPUs: one worker of 8 in 264 days.
MONTH = (
    "--model gpt-145.6b --gpu h100 --tensor-parallel 8 --pipelines 128 --stages 16 --microbatches 32 "
    "--mtbf 264d --rejoin 24h --hours 720"
)
SHAPES = {"24 × 8": (24, 8, 24), "12 × 16": (12, 16, 48), "3 × 64": (3, 64, 192)}
PLANS = {"16 × 16, 64, 25 dead": (16, 16, 64, 25), "32 × 64, 128, 200 dead": (32, 64, 128, 200)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="keep the tables under docs/benchmarks")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sections = [_campaigns(Path(folder)), _replays(Path(folder))]
        about = machine(f"python benchmarks/simulator.py{' --save' if args.save else ''}")
        results = measure(sections, Console())
    if args.save:
        path = ROOT / "docs" / "benchmarks" / f"{datetime.date.today()}-simulator.md"
        path.write_text(markdown("Simulator benchmark", about, sections, results), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return exit_code(results)


def _campaigns(folder: Path) -> Section:
    cases = []
    for name, (pipelines, stages, microbatches) in SHAPES.items():
        shape = f"--pipelines {pipelines} --stages {stages} --microbatches {microbatches}"
        command = f"simulate {JOB} {shape} {DAY} --cache {folder / name.replace(' ', '')}"
        cases += [
            Case(f"{name}, cold", partial(_timed, f"1,536 GPUs as {name}, 24 h, nothing cached", command, ASKED_COLD_S)),
            Case(
                f"{name}, cached",
                partial(_timed, "the same, other workers fail, plans cached", f"{command} --seed 2", ASKED_CACHED_S),
            ),
        ]
    command = f"simulate {MONTH} --cache {folder / 'month'}"
    cases.append(
        Case("16,384 GPUs", partial(_timed, "16,384 GPUs, 30 days at Llama 3's rate, nothing cached", command, ASKED_MONTH_S))
    )
    about = f"All {len(SYSTEMS)} systems over one trace, each time in a new process, from the command line to the table."
    return Section("campaigns", "Systems side by side", about, ("campaign", "target", "seconds", "met"), tuple(cases))


def _replays(folder: Path) -> Section:
    cases = tuple(
        Case(name, partial(_replay, name, shape, folder / f"plan{number}.json"))
        for number, (name, shape) in enumerate(PLANS.items())
    )
    about = "Three iterations, paced and eager, with the chart, as a fresh process; costs 10,13,9, memory 2S."
    return Section("replays", "Replay of a plan", about, ("plan", "target", "seconds", "met"), cases)


def _replay(name: str, shape: tuple[int, int, int, int], path: Path) -> Row:
    pipelines, stages, microbatches, dead = shape
    cluster = f"--pipelines {pipelines} --stages {stages} --microbatches {microbatches} --failures {dead}"
    _run(f"plan {cluster} --costs 10,13,9 --comm 1 --memory {2 * stages} --method greedy --out {path}")
    return _timed(name, f"replay {path} --iterations 3", ASKED_REPLAY_S)


def _timed(name: str, command: str, target_s: float) -> Row:
    began = time.monotonic()
    _run(command)
    seconds = time.monotonic() - began
    return name, f"< {target_s:g} s", f"{seconds:.1f}", YES if seconds < target_s else NO


def _run(command: str) -> None:
    arguments = [sys.executable, "-m", "recycle", *command.split()]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
