"""The benchmark of what a GPU waits for: its host between two ops, and its peers after the last one.

make bench-gpu                                          on a machine with an NVIDIA GPU, which twelve workers share by MPS
python benchmarks/launch_ahead.py --only small          ops of 1 to 2 ms
python benchmarks/launch_ahead.py --quick               one round; without a GPU on the cores, to try the benchmark itself
python benchmarks/launch_ahead.py --save                also writes docs/benchmarks/<date>-launch_ahead.md

The same processes train by all variants in turn, round after round. A host that launches no op ahead waits for each op before it
launches the next one. With one bucket, a stage's gradient is summed at once, after the last op.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from statistics import median

import torch
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section

import recycle
from recycle.core.cluster import Worker
from recycle.core.events.op_columns import REDUCE
from recycle.core.op import Kind, Op
from recycle.core.plans.row_programs import row_programs
from recycle.evaluate.hardware.gpu_slices import slices
from recycle.evaluate.hardware.setup import CPU_CORES, GPU_SLICES, Setup
from recycle.profiling.plan_runner import PlanRun, PlanRunner
from recycle.profiling.worker_pool import worker_pool
from recycle.runtime.execute import executor, gradient_reduction
from recycle.runtime.execute.buckets import BUCKET_BYTES, make_buckets
from recycle.runtime.execute.span_clock import AHEAD, SpanClock
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.worker.epoch_setup import worker_program

HAS_GPU = torch.cuda.device_count() > 0  # `is_available` would load CUDA before workers make their settings
BACKEND = GPU_SLICES if HAS_GPU else CPU_CORES
WARM_UP, NUM_ITERATIONS, NUM_ROUNDS = 2, 8, 3
ALL, COSTS = "adaptive,decoupled,staggered", (10, 13, 9)
# Longer than a host needs to launch an op, by the clock of an H200.
_SLEEP_CYCLES = 12_000_000
_ONE_BUCKET = 2**62
SETUPS = {
    "usual": Setup.usual(BACKEND, is_small=not HAS_GPU),
    "small": Setup(BACKEND, width=512, heads=8, context=512) if HAS_GPU else Setup.usual(BACKEND, is_small=True),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A plan, how many ops the host may be ahead, and how large a bucket is. A paced host launches an op while its GPU sleeps."""

    title: str
    techniques: str = ALL
    dead: str = ""
    ahead: int = AHEAD
    bucket_bytes: int = BUCKET_BYTES
    is_paced: bool = False


_ONE_F_ONE_B, _FAULT_FREE = Variant("1F1B", "none"), Variant("all techniques")
_ONE_DEAD = Variant("all techniques, W1_2 dead", dead="W1_2")
VARIANTS = [
    *(replace(one, ahead=ahead) for one in (_ONE_F_ONE_B, _FAULT_FREE, _ONE_DEAD) for ahead in (0, AHEAD)),
    replace(_FAULT_FREE, title="all techniques, one bucket", bucket_bytes=_ONE_BUCKET),
    replace(_FAULT_FREE, title="all techniques, its host never late", is_paced=True),
]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn of a variant gave.

    `gap_share` is the share of gaps in the time from the end of an op to the end of the next, if that waits for no message.
    """

    iteration_us: float
    gap_share: float
    times_us: Mapping[str, float]


def _turn(number: int, variant: Variant, plan: recycle.Plan, runner: PlanRunner) -> PlanRun:
    """One variant's turn in one worker."""
    with _as_in(variant):
        return runner.run(number, plan, WARM_UP + NUM_ITERATIONS)


@contextmanager
def _as_in(variant: Variant) -> Iterator[None]:
    """Train in this process as the variant says."""
    start = SpanClock.start

    def start_after_a_sleep(clock: SpanClock) -> object:
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        return start(clock)

    executor.AHEAD = variant.ahead  # type: ignore[attr-defined]
    gradient_reduction.make_buckets = partial(make_buckets, bucket_bytes=variant.bucket_bytes)  # type: ignore[attr-defined]
    if variant.is_paced and HAS_GPU:
        SpanClock.start = start_after_a_sleep  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SpanClock.start = start  # type: ignore[method-assign]
        executor.AHEAD, gradient_reduction.make_buckets = AHEAD, make_buckets  # type: ignore[attr-defined]


def _read(plan: recycle.Plan, runs: Mapping[Worker, PlanRun]) -> Turn:
    counted = range(WARM_UP - 1, WARM_UP + NUM_ITERATIONS)
    ends_us = [max(run.spans[number][-1].end_us for run in runs.values() if run.spans) for number in counted]
    gaps_us, busy_us, times_us = 0, 0, dict[str, list[int]]()
    for worker, run in runs.items():
        instructions = worker_program(row_programs(plan)[worker], plan.problem.shape).instructions if run.spans else ()
        for spans in run.spans[WARM_UP:]:
            ops = [span for span in spans if span.is_op and not span.is_discarded]
            for span in spans:
                kind = Op.parse(span.label, 0).kind.value if span.is_op else span.label
                times_us.setdefault(kind, []).append(span.end_us - span.start_us)
            for (before, span), instruction in zip(pairwise(ops), instructions[1:], strict=True):
                if instruction.receives is None:
                    gaps_us += span.start_us - before.end_us
                    busy_us += span.end_us - span.start_us
    iteration_us = median(after - before for before, after in pairwise(ends_us))
    return Turn(iteration_us, gaps_us / (gaps_us + busy_us), {kind: median(times) for kind, times in times_us.items()})


def _measure(setup: Setup, num_rounds: int) -> dict[Variant, list[Turn]]:
    shape, memory = (setup.pipelines, setup.stages, setup.microbatches), ",".join(map(str, range(setup.stages, 0, -1)))
    plans = {
        variant: recycle.solve(
            recycle.problem(
                *shape,
                fail=variant.dead,
                costs=COSTS,
                memory=memory if variant.techniques == "none" else None,
                techniques=variant.techniques,
            ),
            "greedy",
        )
        for variant in VARIANTS
    }
    spec = worker_spec(setup.job(plans[_FAULT_FREE]))
    turns: dict[Variant, list[Turn]] = {variant: [] for variant in VARIANTS}
    with worker_pool(list(setup.shape.workers()), partial(PlanRunner, spec)) as pool:
        for number in range(num_rounds * len(VARIANTS)):
            variant = VARIANTS[number % len(VARIANTS)]
            runs = pool.ask(partial(_turn, number + 1, variant, plans[variant]))
            turns[variant].append(_read(plans[variant], runs))
    return turns


_KINDS = (*(kind.value for kind in Kind), REDUCE)
_HEADER: Row = ("plan", "ops ahead", "iteration ms", "GPU waits for its host", *(f"{kind} ms" for kind in _KINDS), "met")


def _row(measure: Callable[[], Mapping[Variant, list[Turn]]], is_judged: bool, variant: Variant) -> Row:
    turns = measure()[variant]

    def times_ms(kind: str) -> str:
        times_us = [turn.times_us[kind] for turn in turns if kind in turn.times_us]
        return f"{median(times_us) / 1e3:.2f}" if times_us else "–"

    iteration_us = median(turn.iteration_us for turn in turns)
    share = "–" if variant.is_paced else f"{median(turn.gap_share for turn in turns):.1%}"
    waiting = [turn.iteration_us for turn in measure().get(replace(variant, ahead=0), ())]
    met = UNJUDGED
    if is_judged and waiting and variant.ahead:
        met = YES if iteration_us <= median(waiting) else NO
    return (variant.title, str(variant.ahead), f"{iteration_us / 1e3:.1f}", share, *map(times_ms, _KINDS), met)


def _sections(name: str, is_quick: bool) -> list[Section]:
    if not HAS_GPU and not is_quick:
        raise SystemExit("torch finds no GPU here: --quick tries this benchmark on the cores")
    setup, num_rounds = SETUPS[name], 1 if is_quick else NUM_ROUNDS
    measure = cache(partial(_measure, setup, num_rounds))
    cases = [Case(f"{one.title}, {one.ahead} ahead", partial(_row, measure, not is_quick and HAS_GPU, one)) for one in VARIANTS]
    about = (
        f"{setup.pipelines} × {setup.stages} workers, {setup.microbatches} micro-batches of {setup.samples} samples, "
        f"{setup.model}; medians of {num_rounds} rounds. A GPU waits for its host between two ops of which the second waits for "
        "no message. The target is that an iteration takes no longer than without launching ahead."
    )
    return [Section(name, f"The {name} model", about, _HEADER, tuple(cases))]


SCRIPT = Script(
    "launch_ahead", "Measure what GPUs wait for.", tuple(SETUPS), quick="one round", libraries=("torch", "numpy"), width=170
)

if __name__ == "__main__":
    # One service for all tables: workers of all pools come from one server, whose environment is that of the first.
    with slices(SETUPS["usual"].num_workers) if HAS_GPU else nullcontext():
        sys.exit(SCRIPT.run(_sections))
