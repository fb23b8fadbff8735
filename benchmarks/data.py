"""The benchmark of data: how much of their time workers wait for samples that take long to make.

python benchmarks/data.py                 0, 1, 2 and 4 loader processes
python benchmarks/data.py --quick         fewer steps
python benchmarks/data.py --save          also writes docs/benchmarks/<date>-data.md

Two pipelines of two stages are trained by real processes. Ops and samples sleep for their time in the place of computing, so that
two cores are enough for all processes, and the waits are those of a machine that has a core for each. On a busy machine processes
get their turns late: the share is that of the best of several runs.
"""

import time
from functools import partial

import torch
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section
from timed_layers import TimedLinear
from torch import Tensor, nn

import recycle
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import FailureOptions, TrainOptions

OP_MS, SAMPLE_MS, WIDTH = 5, 20, 8
SHAPE, SAMPLES = (2, 2, 4), 1
STEPS, QUICK_STEPS, RUNS, QUICK_RUNS = 150, 10, 2, 1
MOST_SHARE, TARGET_PROCESSES = 0.02, 4


class SlowSamples:
    """A dataset whose samples take long to make, as from a remote disk."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        time.sleep(SAMPLE_MS / 1e3)
        return torch.full((WIDTH,), number / 1000), torch.ones(WIDTH)


def trained(processes: int, steps: int) -> Trained:
    """The summary of a run with so many loader processes in each worker that reads."""
    problem = recycle.problem(*SHAPE, costs=(1, 1, 1))
    stages = [TimedLinear(WIDTH, OP_MS) for _ in range(SHAPE[1])]
    options = TrainOptions(data=recycle.DataOptions(processes), failures=FailureOptions(recovers=False))
    optimizer = partial(torch.optim.SGD, lr=0.01)
    plan = recycle.solve(problem, "greedy", effort=100_000)
    return launch(Job(plan, stages, SlowSamples(), nn.functional.mse_loss, optimizer, steps, SAMPLES, options=options))


def waits(processes: int, steps: int, runs: int) -> Row:
    """The shares of their time that workers wait for data, and how long a step takes."""
    best = min((trained(processes, steps) for _ in range(runs)), key=lambda run: max(run.data_wait_shares.values()))
    shares = best.data_wait_shares
    is_met = UNJUDGED if processes != TARGET_PROCESSES else YES if max(shares.values()) < MOST_SHARE else NO
    kind = "the worker itself" if not processes else str(processes)
    mean = sum(shares.values()) / len(shares)
    return kind, f"{100 * mean:.1f} %", f"{100 * max(shares.values()):.1f} %", f"{best.iteration_us / 1e3:.1f}", is_met


def sections(name: str, is_quick: bool) -> list[Section]:
    steps, runs = (QUICK_STEPS, QUICK_RUNS) if is_quick else (STEPS, RUNS)
    pipelines, stages, microbatches = SHAPE
    about = (
        f"{pipelines} pipelines of {stages} stages, {microbatches} micro-batches of {SAMPLES} sample each; ops of {OP_MS} ms (a "
        f"whole backward pass {2 * OP_MS} ms), samples of {SAMPLE_MS} ms. Ops and samples sleep and compute nothing, so that "
        "two cores are enough. All workers read, since all are of the first or the last stage. The share is that of a worker's "
        f"whole time in training, the wait for the first sample included; the best of {runs} runs of {steps} steps. "
        "Without loader processes, as before this release, a worker makes samples between its ops. The target: less than "
        f"{100 * MOST_SHARE:.0f} % in every worker with {TARGET_PROCESSES} loader processes."
    )
    header = ("loader processes of a worker", "mean wait for data", "longest", "step (ms)", "met")
    cases = [Case(f"{number} processes", partial(waits, number, steps, runs)) for number in (0, 1, 2, TARGET_PROCESSES)]
    return [Section("waits", "How long workers wait for data", about, header, tuple(cases))]


if __name__ == "__main__":
    script = Script("data", __doc__ or "", ("waits",), "fewer steps and runs", libraries=("torch",), quantity="waits")
    raise SystemExit(script.run(sections))
