"""Runs a schedule for each of many seeds, in all processors, and says which failed. A schedule is a function of its seed."""

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

RunSchedule = Callable[[int], Counter[str]]
"""Runs the schedule of a seed, and returns what happened in it; raises if an invariant does not hold."""

_CHUNK = 100


def run_seeds(run_schedule: RunSchedule, first: int, num: int) -> tuple[Counter[str], list[int]]:
    """Run the schedules of `num` seeds; return what happened in all of them, and the seeds that failed."""
    happened, failed = Counter[str](), []
    for seed in range(first, first + num):
        try:
            happened += run_schedule(seed)
        except Exception:
            failed.append(seed)
    return happened, failed


def main(run_schedule: RunSchedule, description: str) -> int:
    """Run the seeds that the command line names, and print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--num", type=int, default=10_000, help="how many schedules (default: 10000)")
    args = parser.parse_args()
    if args.num == 1:
        print(dict(run_schedule(args.first)))
        return 0
    begin_s, happened, failed, done = time.monotonic(), Counter[str](), [], 0
    starts = range(args.first, args.first + args.num, _CHUNK)
    sizes = [min(_CHUNK, args.first + args.num - start) for start in starts]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for size, (events, seeds) in zip(sizes, pool.map(partial(run_seeds, run_schedule), starts, sizes), strict=True):
            happened, failed, done = happened + events, failed + seeds, done + size
            took_s = time.monotonic() - begin_s
            for seed in seeds:
                print(f"\rthe schedule of seed {seed} failed{'':40}", file=sys.stderr)
            print(f"\r{done} of {args.num} schedules, {len(failed)} failed, {took_s:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(f"schedules  {args.num}, seeds {args.first} to {args.first + args.num - 1}")
    print(f"events     {happened.total()}: " + ", ".join(f"{number} {name}" for name, number in happened.most_common()))
    print(f"failed     {len(failed)}" + (f": seeds {', '.join(map(str, failed[:20]))}" if failed else ""))
    if failed:
        try:
            run_schedule(failed[0])
        except Exception:
            traceback.print_exc()
    return 1 if failed else 0
