"""The benchmark of NCCL with several workers on one GPU: failures, weights beside those of other transports, random plans.

make bench-gpu                                      every table, on a machine with a GPU
python benchmarks/nccl.py --only kills              one of them
python benchmarks/nccl.py --quick                   few kills and plans; without a GPU over gloo, to try the benchmark itself
python benchmarks/nccl.py --save                    also writes docs/benchmarks/<date>-nccl.md

The table of plans needs the folder of the tests: `PYTHONPATH=. python benchmarks/nccl.py --only plans`. What is measured is
whether it works, and how soon it goes on after a failure. How fast NCCL is cannot be seen on one GPU, where it uses sockets.
On a GPU it needs MPS, by which the workers share it, and starts a daemon of its own: otherwise kernels would take turns, and
one that waits for another worker's would have to wait for that worker's turn.
"""

import os
import random
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from statistics import median

import torch
from recovery_cases import Failure, RunLog, TimeLimitExceeded, describe_deviation, names, train
from recovery_signals import Holdings, PlannedSignal, SignalledRun, run_with_signals
from runtime_cases import EXACT, SEED, TWELVE, Sizes, adamw
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section
from torch import Tensor, nn

import recycle
from recycle.core.cluster import Shape, Worker
from recycle.core.plans.plan import Plan
from recycle.evaluate.hardware.gpu_slices import slices
from recycle.profiling.plan_runner import PlanRunner
from recycle.profiling.worker_pool import worker_pool
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.options import GLOO, IPC, NCCL, FailureOptions, TrainOptions

HAS_GPU = torch.cuda.device_count() > 0  # `is_available` would load CUDA, here and in every worker, before its settings are made
TRANSPORTS = (NCCL, IPC, GLOO) if HAS_GPU else (GLOO,)
TESTED = TRANSPORTS[0]
ASKED_MEDIAN_MS, ASKED_WORST_MS, LEASE_S = 1500, 3000, 5.0
MORE_ALLOWED, MEMORY_ALLOWED = 2, 1.10
SHARED_LAYERS = (0, 1)
RUN_LIMIT_S, BACK_LIMIT_S, STALLED_S, NUM_STEPS = 300, 30, 30.0, 12
SURVIVOR = "W0_0"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. It is judged only if it is enough, and over NCCL."""

    num_kills: int
    num_plans: int
    num_iterations: int
    is_judged: bool

    def judged(self, met: bool) -> str:
        return (YES if met else NO) if self.is_judged else UNJUDGED


WHOLE = Effort(num_kills=30, num_plans=125, num_iterations=8, is_judged=HAS_GPU)
QUICK = Effort(num_kills=3, num_plans=3, num_iterations=3, is_judged=False)


def options_of(transport: str, **failures: object) -> TrainOptions:
    options = FailureOptions(**{"lease_s": LEASE_S, **failures})  # type: ignore[arg-type]
    return replace(EXACT, device="cuda" if HAS_GPU else "cpu", transport=transport, failures=options)


FAILURES = (
    Failure("none", (), NUM_STEPS),
    Failure("a kill", ("kill W1_2@4",), NUM_STEPS),
    Failure("two kills, the second in the recovery", ("kill W1_1@4", "kill W2_2@4:recovery"), NUM_STEPS),
    Failure("a hang", ("hang W0_1@4",), NUM_STEPS),
)


def weights(effort: Effort) -> list[Section]:
    found = set[str]()
    cases = [
        Case(f"{transport}, {shared} shared, {failure.name}", partial(_weights, found, transport, shared, failure))
        for shared in SHARED_LAYERS
        for failure in FAILURES
        for transport in TRANSPORTS
    ]
    about = (
        f"`recycle.train` with `is_exact=True`, {_shape(TWELVE)}, {TWELVE.layers} layers, of which neighbouring stages share "
        f"none or {SHARED_LAYERS[-1]}, on one device: the weights after {NUM_STEPS} steps. A run counts only if its failures "
        "happened. It is repeated if MPS failed: where processes share a GPU by MPS, the death of one can end all. The target is "
        "that all have the same weights."
    )
    return [Section("weights", "The same weights over every transport", about, _WEIGHTS_HEADER, tuple(cases))]


_WEIGHTS_HEADER: Row = ("transport", "shared layers", "failure", "recoveries", "repeated", "as the script says", "weights", "met")


def _weights(found: set[str], transport: str, shared: int, failure: Failure) -> Row:
    num_repeated, options = 0, options_of(transport, script=failure.script)
    sizes = replace(TWELVE, shared_layers=shared)
    while True:
        log = RunLog()
        try:
            digest = train(sizes, NUM_STEPS, RUN_LIMIT_S, watch=log.observe, options=options).weights_sha256
            problem = describe_deviation(failure, log)
        except (recycle.UserError, TimeLimitExceeded) as reason:
            digest, problem = "", str(reason).splitlines()[0]
            if _MPS_FAULT in str(reason) and num_repeated < _MOST_REPEATED:
                num_repeated += 1
                continue
        break
    found |= {digest} - {""}
    met = YES if len(found) == 1 and digest and not problem else NO
    return (
        transport,
        str(shared),
        failure.name,
        str(len(log.recoveries)),
        str(num_repeated),
        problem or "all",
        digest[:12] or "–",
        met,
    )


# MPS ends all its clients with this error if one dies while its kernels use host memory, as NCCL's do over sockets. Workers that
# have a GPU each use no MPS.
_MPS_FAULT, _MOST_REPEATED = "an illegal memory access was encountered", 2


# A worker is killed so long after all have been there, at a random moment between these.
EARLIEST_S, LATEST_S = 0.5, 3.0
Sample = dict[str, float]


def kills(effort: Effort) -> list[Section]:
    samples = list[Sample]()
    run = cache(partial(_signalled, effort, samples))
    parts = ("detect", "abort", "plan", "regroup", "transfer")
    times = [Case("kills", partial(_latency, effort, run)), *(Case(part, partial(_part, run, part)) for part in parts)]
    about = (
        f"{_shape(TWELVE)} over {TESTED}, exact mode, one run: {effort.num_kills} workers are killed one after the other by "
        "SIGKILL from outside at random moments, and started again; the next is killed when all have been back for a moment. "
        f"Targets: all recovered, a median under {ASKED_MEDIAN_MS} ms, nothing over {ASKED_WORST_MS} ms."
    )
    header: Row = ("what", "unit", "times", "median", "worst", "target", "met")
    one = Section("kills", "From a kill to the first op of the new epoch", about, header, tuple(times))
    about = (
        f"What {SURVIVOR}, which is never killed, holds in that run, and the memory of the GPU that all hold together: medians "
        "over the first and the last quarter of the samples, each taken before a kill with everybody there. Targets: at most "
        f"{MORE_ALLOWED} more files, sockets and threads, at most {MEMORY_ALLOWED - 1:.0%} more memory."
    )
    cases = [
        Case(what, partial(_growth, effort, run, samples, what)) for what in ("files", "sockets", "threads", "MiB", "GPU MiB")
    ]
    header = ("what", "samples", "first quarter", "last quarter", "target", "met")
    return [one, Section("growth", "What grows in that run", about, header, tuple(cases))]


def _signalled(effort: Effort, samples: list[Sample]) -> SignalledRun:
    victims = [name for name in names(TWELVE) if name != SURVIVOR]
    chance = random.Random(SEED)
    rounds = [chance.sample(victims, len(victims)) for _ in range(effort.num_kills)]  # who dies often is started again later
    signals = [PlannedSignal(0.0, victim, back_s=None) for victim in list(chain(*rounds))[: effort.num_kills]]
    limit_s = RUN_LIMIT_S + BACK_LIMIT_S * effort.num_kills
    ready, over = partial(_is_due, _NextKill(chance), samples), partial(_is_over, effort.num_kills)
    return run_with_signals(TWELVE, signals, limit_s, ready, over, options=options_of(TESTED, restarts=effort.num_kills))


@dataclass
class _NextKill:
    """When the next kill is due, in seconds of the run; None until all workers are there."""

    chance: random.Random
    due_s: float | None = None


def _is_due(next_kill: _NextKill, samples: list[Sample], log: RunLog) -> bool:
    """Whether all workers have been there for a random time; if so, take a sample."""
    if not _all_train(log):
        next_kill.due_s = None
        return False
    if next_kill.due_s is None:
        next_kill.due_s = log.now_s + next_kill.chance.uniform(EARLIEST_S, LATEST_S)
    if log.now_s < next_kill.due_s:
        return False
    next_kill.due_s = None
    _take_sample(samples, log)
    return True


def _take_sample(samples: list[Sample], log: RunLog) -> None:
    held = Holdings.of(log.pids[SURVIVOR])
    sample = {"files": held.num_files, "sockets": held.num_sockets, "threads": held.num_threads, "MiB": held.rss_bytes / MIB}
    free, total = torch.cuda.mem_get_info() if HAS_GPU else (0, 0)
    samples.append({**sample, "GPU MiB": (total - free) / MIB})


def _all_train(log: RunLog) -> bool:
    """Whether all workers are there, and an op was told of since the last recovery."""
    return (
        log.num_live == len(names(TWELVE)) and log.num_left == log.num_joined and (not log.recoveries or log.first_ops_us[-1] > 0)
    )


def _is_over(num_kills: int, log: RunLog) -> bool:
    return log.num_left >= num_kills and _all_train(log)


def _latency(effort: Effort, run: Callable[[], SignalledRun]) -> Row:
    times_ms = [(op_us - at_us) / 1e3 for _, at_us, _, op_us in run().recoveries(signal.SIGKILL)]
    is_whole = len(times_ms) == effort.num_kills and not run().problem
    met = is_whole and median(times_ms) < ASKED_MEDIAN_MS and max(times_ms) < ASKED_WORST_MS
    what = " until: ".join(filter(None, ("SIGKILL to the first op", run().problem)))
    return (what, "ms", *_spread(times_ms), f"< {ASKED_MEDIAN_MS}, < {ASKED_WORST_MS}", effort.judged(met))


def _part(run: Callable[[], SignalledRun], part: str) -> Row:
    times_ms = [
        (recovery.at_us + recovery.detect_us - at_us if part == "detect" else recovery.parts_us[part]) / 1e3
        for _, at_us, recovery, _ in run().recoveries(signal.SIGKILL)
    ]
    return (f"of it: {part}", "ms", *_spread(times_ms), "none", UNJUDGED)


def _spread(numbers: list[float]) -> tuple[str, str, str]:
    """How many, the median, the worst."""
    return (str(len(numbers)), f"{median(numbers):.0f}", f"{max(numbers):.0f}") if numbers else ("0", "–", "–")


def _growth(effort: Effort, run: Callable[[], SignalledRun], samples: list[Sample], what: str) -> Row:
    run()
    if not samples:
        return (what, "0", "–", "–", "–", effort.judged(False))
    numbers, quarter = [sample[what] for sample in samples], max(1, len(samples) // 4)
    first, last = median(numbers[:quarter]), median(numbers[-quarter:])
    most = first * MEMORY_ALLOWED if "MiB" in what else first + MORE_ALLOWED
    return (what, str(len(numbers)), f"{first:.0f}", f"{last:.0f}", f"≤ {most:.0f}", effort.judged(last <= most))


# The largest shape of a random plan.
MOST = Shape(3, 3, 3)
WIDTH = 64


class Numbers:
    """Micro-batches made from their address."""

    def get(self, step: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + 10 * pipeline + index)
        given = torch.randn(8, WIDTH, generator=generator)
        return given, given.roll(1, -1).tanh()


def _loss(made: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(made, targets)


def plans(effort: Effort) -> list[Section]:
    about = (
        f"Random legal plans of up to {MOST.num_pipelines} × {MOST.num_stages} workers: any shape, any dead workers, any legal "
        f"order of ops, fused or split backward passes; {effort.num_iterations} iterations of each over {TESTED}, and over gloo. "
        "The targets are that none stalls, and that the losses of both are the same."
    )
    header: Row = ("transport", "plans", "workers", "iterations", "different losses", "ended", "met")
    case = Case(f"{effort.num_plans} plans", partial(_plans, effort))
    return [Section("plans", "Random legal plans", about, header, (case,))]


def _plans(effort: Effort) -> Row:
    # Here, because only this table needs them.
    from hypothesis import HealthCheck, Phase, given, settings

    from tests.random_plans import legal_plans

    workers = [Worker(pipeline, stage) for pipeline in range(MOST.num_pipelines) for stage in range(MOST.num_stages)]
    torch.manual_seed(1)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(MOST.num_stages)]
    job = Job(
        MOST, stages, Numbers(), _loss, adamw, effort.num_iterations, options=replace(options_of(TESTED), timeout_s=STALLED_S)
    )
    spec = worker_spec(job)
    num_plans, num_different, sizes = 0, 0, list[int]()
    with (
        worker_pool(workers, partial(PlanRunner, spec)) as pool,
        worker_pool(workers, partial(PlanRunner, replace(spec, options=options_of(GLOO)))) as other,
    ):

        @settings(
            max_examples=effort.num_plans,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(legal_plans())
        def play(plan: Plan) -> None:
            nonlocal num_plans, num_different
            num_plans += 1
            sizes.append(len(plan.rows))
            request = partial(_run, num_plans, plan, effort.num_iterations)
            num_different += pool.ask(request) != other.ask(request)

        problem = ""
        try:
            play()
        except recycle.UserError as reason:
            problem = str(reason).strip().splitlines()[-1]
    met = num_plans >= effort.num_plans and not num_different and not problem
    counts = (str(num_plans), f"1 to {max(sizes)}", str(num_plans * effort.num_iterations), str(num_different))
    return (TESTED, *counts, problem or "as asked", effort.judged(met))


def _run(number: int, plan: Plan, num_iterations: int, runner: PlanRunner) -> list[float]:
    return list(runner.run(number, plan, num_iterations).losses)


def _shape(sizes: Sizes) -> str:
    return f"{sizes.pipelines} × {sizes.stages} workers, {sizes.microbatches} micro-batches"


SECTIONS = {"weights": weights, "kills": kills, "plans": plans}


def _sections(name: str, is_quick: bool) -> list[Section]:
    if not HAS_GPU and not is_quick:
        raise SystemExit("torch finds no GPU here: --quick tries this benchmark over gloo")
    return SECTIONS[name](QUICK if is_quick else WHOLE)


SCRIPT = Script(
    "nccl",
    "Show that training over NCCL goes on when workers die, and changes nothing.",
    tuple(SECTIONS),
    quick="few kills and plans, which are not judged",
    libraries=("torch", "numpy"),
    width=170,
)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")  # so many clients of MPS get no more
    with ExitStack() as stack:
        if HAS_GPU:
            try:
                stack.enter_context(slices(1))
            except recycle.UserError as problem:  # no MPS
                sys.exit(f"nccl: {problem}")
        sys.exit(SCRIPT.run(_sections))
