"""Random faults from outside on real processes: kill, or stop and continue, any process of a run at any time.

    python -m tests.chaos.external_faults --num 500        that many faults over runs of six shapes

Each run has a twin that nobody disturbs, and must end with its weights. A worker that was killed, or stopped for longer than its
lease, stays dead; the launcher replaces the coordinator. The last lines are a table.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from recycle.core.events.record import Stepped
from tests.runtime.test_recovery import Run, undisturbed
from tests.warm_processes import warm_context

SHAPES = ((2, 2, 2), (3, 2, 2), (2, 3, 2), (4, 1, 2), (3, 1, 3), (5, 2, 2))
STEPS, PAUSE_S, LEASE_S = 60, 0.01, 1.0
LIMIT_S = 300.0


@dataclass
class Faults:
    """The faults of one run: after some steps a random process is hit, as long as the job can survive it.

    With `num_needed` workers or fewer, none is killed, or stopped for long.
    """

    random: Random
    num: int
    longest_stop_s: float
    num_needed: int
    done: Counter[str] = field(default_factory=Counter)

    def __call__(self, event: object) -> None:
        if not isinstance(event, Stepped) or event.iteration % 4 != 2 or self.done.total() >= self.num:
            return
        # In the launcher's own thread: only it may ask its processes whether they live.
        children = [child for child in multiprocessing.active_children() if child.is_alive()]
        num_workers = sum(child.name.startswith("W") for child in children)
        victim = self.random.choice(children)
        is_coordinator = victim.name == "coordinator"
        is_spare = is_coordinator or num_workers > self.num_needed
        longest_s = self.longest_stop_s if is_spare else 0.4 * LEASE_S
        seconds = 0.0 if is_spare and self.random.random() < 0.5 else 0.1 * (longest_s / 0.1) ** self.random.random()
        self.done[f"{'stop' if seconds else 'kill'} {'coordinator' if is_coordinator else 'worker'}"] += 1
        threading.Timer(0.3 * self.random.random(), _hit, (victim.pid, seconds)).start()


def _hit(pid: int, seconds: float) -> None:
    """Kill a process, or stop it for so long."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP if seconds else signal.SIGKILL)
        if seconds:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)


def run_faults(seed: int, num: int, longest_stop_s: float) -> tuple[Counter[str], str, float]:
    """Run one job with faults; return the faults, the problem if there was one, and the seconds."""
    random = Random(seed)
    shape = SHAPES[seed % len(SHAPES)]
    # A stage may lose all workers but one; who dies is random, so no more than that are lost in all.
    faults = Faults(random, num, longest_stop_s, shape[0] * shape[1] - (shape[0] - 1))
    begin_s, problem = time.monotonic(), ""
    try:
        run = Run(shape, steps=STEPS, lease_s=LEASE_S, pause_s=PAUSE_S, watch=faults)
        weights, losses = undisturbed(shape, STEPS)
        if run.trained.weights_sha256 != weights or list(run.trained.losses) != losses:
            problem = "other weights or losses"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - begin_s
    return faults.done, problem or ("it took too long" if took_s > LIMIT_S else ""), took_s


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and stop processes of runs at random.")
    parser.add_argument("--num", type=int, default=500, help="how many faults (default: 500)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--longest-stop", type=float, default=60.0, help="the longest stop in seconds (default: 60)")
    args = parser.parse_args()
    warm_context()
    seed, total, problems, longest_s = args.first, Counter[str](), [], 0.0
    while total.total() < args.num:
        done, problem, took_s = run_faults(seed, min(10, args.num - total.total()), args.longest_stop)
        total, longest_s = total + done, max(longest_s, took_s)
        if problem:
            problems.append(f"seed {seed}: {problem}")
        said = problem or "same weights"
        print(f"seed {seed}, {SHAPES[seed % len(SHAPES)]}, {took_s:.0f} s: {dict(done)}: {said}", file=sys.stderr, flush=True)
        seed += 1
    print(f"runs     {seed - args.first} of {len(SHAPES)} shapes, the longest {longest_s:.0f} s")
    print(f"faults   {total.total()}: " + ", ".join(f"{number} {name}" for name, number in total.most_common()))
    print(f"failed   {len(problems)}" + "".join(f"\n  {problem}" for problem in problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
