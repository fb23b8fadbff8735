"""The benchmark of recoveries: whether failures change a bit of the weights, how long they take, and what is left of them.

make bench                                          every table, printed
python benchmarks/recovery.py --only latency        one of them
python benchmarks/recovery.py --quick               few runs, kills and minutes
python benchmarks/recovery.py --save                also writes docs/benchmarks/<date>-recovery.md
"""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median

from recovery_cases import STAGGERED, SYNCHRONOUS, Failure, RunLog, names, run_with_failures, run_without_failures, saved_weights
from recovery_signals import Holdings, Rhythm, SignalledRun, num_processes, run_with_signals
from runtime_cases import EXACT, TWELVE, Sizes
from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section

from recycle.core.plans.row_programs import warm_ups
from recycle.runtime.options import CheckpointOptions, FailureOptions

ASKED_MEDIAN_MS, ASKED_WORST_MS, LEASE_MS = 500, 2000, 2000
MORE_ALLOWED, RSS_ALLOWED = 2, 1.10
RUN_LIMIT_S = 240
MIB = 2**20

Setting = tuple[str, float | None]
"""The techniques and the clipping norm."""
# Between the norms of the first step and of most others: some are clipped, some are not.
CLIPPING_NORM = 2.0
CLIPPED_STAGGERED: Setting = (STAGGERED, CLIPPING_NORM)
SETTINGS: tuple[Setting, ...] = ((STAGGERED, None), (SYNCHRONOUS, None), CLIPPED_STAGGERED, (SYNCHRONOUS, CLIPPING_NORM))


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured. What a clock or a few samples say is judged only if it is enough."""

    settings: tuple[Setting, ...]
    num_kills: int
    num_hangs: int
    num_soak_kills: int
    soak_s: float
    is_judged: bool

    def judged(self, met: bool) -> str:
        return _judged(met) if self.is_judged else UNJUDGED


WHOLE = Effort(SETTINGS, num_kills=30, num_hangs=3, num_soak_kills=100, soak_s=900, is_judged=True)
QUICK = Effort((CLIPPED_STAGGERED,), num_kills=3, num_hangs=1, num_soak_kills=5, soak_s=60, is_judged=False)

TINY = Sizes(3, 4, 4, 32, 4, context=16)
CUT = Sizes(3, 4, 4, 32, 8, context=16, shared_layers=2)
# Processes load for some seconds. These steps are no shorter than a sixth of one on any machine.
LONG, PACE_S = 44, 0.02


def failures() -> list[Failure]:
    stages = range(TINY.stages)
    comes_back, both = ("kill W1_2@3", "rejoin W1_2@4"), ("kill W0_1@3", "kill W1_1@3")
    return [
        *(Failure(f"a kill at stage {stage}", (f"kill W1_{stage}@4",)) for stage in stages),
        Failure("at the first op of an iteration", ("kill W2_1@4:first",)),
        Failure("at a middle op", ("kill W2_1@4",)),
        Failure("at the last op", ("kill W2_1@4:last",)),
        Failure("in the gradient reduction", ("kill W1_2@4:reduce",)),
        *(Failure(f"after the step of stage {stage}", (f"kill W0_{stage}@4:step",)) for stage in stages),
        Failure("during checkpointing", ("kill W0_1@4:checkpoint",), checkpoint_every=2),
        Failure("four at once", ("kill W0_0@4", "kill W1_1@4", "kill W2_2@4", "kill W0_3@4")),
        Failure("a second kill in the recovery", ("kill W1_1@4", "kill W2_2@4:recovery")),
        Failure("a hang", ("hang W0_1@4",)),
        Failure("a hang that wakes up", ("hang W0_1@4+4s",), LONG, PACE_S),
        Failure("a kill and a re-join", comes_back, LONG, PACE_S),
        Failure("a kill, a re-join, a kill again", (*comes_back, "kill W1_2@36"), LONG, PACE_S),
        Failure("two of a stage, and both come back", (*both, "rejoin W0_1@4", "rejoin W1_1@4"), LONG, PACE_S),
        Failure("a kill of the coordinator", ("kill coordinator@4",)),
        Failure("a kill of the coordinator in a recovery", ("kill W1_1@4", "kill coordinator@4:recovery")),
    ]


def exact(effort: Effort) -> list[Section]:
    cases = tuple(Case(failure.name, partial(_exact, effort, failure)) for failure in failures())
    about = (
        f"`recycle.train` with `is_exact=True`, {_shape(TINY)}, real processes, a tiny GPT by AdamW: the number of different "
        "`weights_sha256` over runs with this failure and runs without any, the larger one of two: without clipping, and with "
        f"clipping to {CLIPPING_NORM:g}, each with the staggered and with the synchronous optimizer. A run counts only if its "
        "script happened as it says: who failed in which step, how that was noticed, who came back, that there was another "
        "coordinator; else the reason is shown. Whoever comes back does so well before the end, because samples are slow there. "
        "Clipped are steps of each run that was to clip: some, and not all. The target is 1."
    )
    header = ("failure", "script", "steps", "runs", "recoveries", "clipped", "as the script says", "different weights", "met")
    return [Section("exact", "Exactness: the same weights bit for bit, whatever fails", about, header, cases)]


def elastic(effort: Effort) -> list[Section]:
    cases = tuple(Case(failure.name, partial(_elastic, failure)) for failure in failures())
    about = (
        f"The same failures, {_shape(CUT)}, with {CUT.shared_layers} shared layers, so that every failure shifts the cuts: the "
        "number of different `weights_sha256` over the run with this failure, the run without any, and the run without shared "
        f"layers; staggered, clipped to {CLIPPING_NORM:g}. Moved are the micro-batches that the plan for the first dead worker "
        "cuts elsewhere than at the boundaries. The target is 1."
    )
    header = ("failure", "script", "recoveries", "moved", "as the script says", "different weights", "met")
    return [Section("elastic", "Exactness with elastic cuts", about, header, cases)]


def _elastic(failure: Failure) -> Row:
    techniques, max_norm = CLIPPED_STAGGERED
    outcome = run_with_failures(CUT, failure, techniques, max_norm, RUN_LIMIT_S)
    found = {
        outcome.weights_sha256,
        *(
            run_without_failures(sizes, failure.num_steps, techniques, max_norm, RUN_LIMIT_S).weights_sha256
            for sizes in (CUT, replace(CUT, shared_layers=0))
        ),
    }
    dead = next((word.partition("@")[0] for line in failure.lines for word in line.split()[1:2] if word.startswith("W")), "")
    cuts = CUT.plan(dead).cuts
    num_moved = sum(any(offsets) for offsets in zip(*cuts, strict=True)) if cuts else 0
    met = len(found) == 1 and not outcome.problem
    shown = (str(outcome.num_recoveries), f"{num_moved} of {CUT.pipelines * CUT.microbatches}", outcome.problem or "all")
    return (failure.name, ", ".join(failure.lines), *shown, str(len(found)), _judged(met))


def _exact(effort: Effort, failure: Failure) -> Row:
    num_steps = failure.num_steps
    found: dict[float | None, set[str]] = {}
    problem, num_recoveries, clipped = "", 0, set[int]()
    for techniques, max_norm in effort.settings:
        outcome = run_with_failures(TINY, failure, techniques, max_norm, RUN_LIMIT_S)
        expected = run_without_failures(TINY, num_steps, techniques, max_norm, RUN_LIMIT_S).weights_sha256
        found.setdefault(max_norm, set()).update((outcome.weights_sha256, expected))
        problem = problem or outcome.problem
        num_recoveries += outcome.num_recoveries
        if max_norm is not None:
            clipped.add(outcome.num_clipped)
    num_weights = max(map(len, found.values()))
    met = num_weights == 1 and not problem and all(0 < num < num_steps for num in clipped)
    counts = (str(num_steps), str(len(effort.settings)), str(num_recoveries), _few(clipped))
    return (failure.name, ", ".join(failure.lines), *counts, problem or "all", str(num_weights), _judged(met))


# Twelve seconds: everybody is there at first, one gets a signal, and is back, loaded, by the end. A hang is fenced in between.
RHYTHM = Rhythm(cycle_s=12, earliest_s=0.5, latest_s=4, back_s=7)


def latency(effort: Effort) -> list[Section]:
    run = cache(partial(_signalled_run, effort))
    parts = ("detect", "abort", "plan", "regroup", "transfer")
    cases = [
        Case("kills", partial(_latency, effort, run)),
        *(Case(part, partial(_part, run, part)) for part in parts),
        Case("hangs", partial(_hangs, effort, run)),
        Case("ops", partial(_redone, effort, run)),
    ]
    about = (
        f"{_shown(TWELVE)}, exact mode: {effort.num_kills} workers are killed one after the other, by SIGKILL from outside at "
        f"random moments; then {effort.num_hangs} are stopped by SIGSTOP. Each is started again some seconds later, and the next "
        "gets its signal when it is back. The time of a kill is that at which the signal was sent; the first op of the new "
        f"epoch is in the record. Targets: a median under {ASKED_MEDIAN_MS} ms and nothing over {ASKED_WORST_MS} ms; a stopped "
        f"worker has been killed within its lease of {LEASE_MS} ms; and no more ops are done again than those of the iteration "
        f"in flight ({TWELVE.plan().num_ops}), and the forward passes of the next one with which stages that have stepped begin."
    )
    header = ("what", "unit", "times", "median", "worst", "target", "met")
    return [Section("latency", "From a kill to the first op of the new epoch", about, header, tuple(cases))]


def _signalled_run(effort: Effort) -> SignalledRun:
    kinds = [signal.SIGKILL] * effort.num_kills + [signal.SIGSTOP] * effort.num_hangs
    signals = RHYTHM.signals(names(TWELVE), kinds)
    options = replace(EXACT, failures=FailureOptions(lease_s=LEASE_MS / 1e3))
    limit_s = (signals[-1].back_s or 0.0) + RUN_LIMIT_S
    return run_with_signals(TWELVE, signals, limit_s, _all_there, _goes_on, options=options)


def _all_there(log: RunLog) -> bool:
    return log.num_live == len(names(TWELVE))


def _goes_on(log: RunLog) -> bool:
    """Whether an op was told of since the last recovery."""
    return bool(log.first_ops_us and log.first_ops_us[-1])


def _latency(effort: Effort, run: Callable[[], SignalledRun]) -> Row:
    times_ms = _times_ms(run())
    is_whole = len(times_ms) == effort.num_kills and not run().problem
    met = is_whole and median(times_ms) < ASKED_MEDIAN_MS and max(times_ms) < ASKED_WORST_MS
    what = " until: ".join(filter(None, ("SIGKILL to the first op", run().problem)))
    return (what, "ms", *_spread(times_ms), f"< {ASKED_MEDIAN_MS}, < {ASKED_WORST_MS}", effort.judged(met))


def _times_ms(signalled: SignalledRun) -> list[float]:
    return [(op_us - at_us) / 1e3 for _, at_us, _, op_us in signalled.recoveries(signal.SIGKILL)]


def _part(run: Callable[[], SignalledRun], part: str) -> Row:
    """One part of it. When it is noticed that somebody left is in the record, when it left is not."""
    found = run().recoveries(signal.SIGKILL)
    times_ms = [
        (recovery.at_us + recovery.detect_us - at_us if part == "detect" else recovery.parts_us[part]) / 1e3
        for _, at_us, recovery, _ in found
    ]
    return (f"of it: {part}", "ms", *_spread(times_ms), "none", UNJUDGED)


def _hangs(effort: Effort, run: Callable[[], SignalledRun]) -> Row:
    sent = [signal_sent for signal_sent in run().sent if signal_sent.kind is signal.SIGSTOP]
    times_ms = [(signal_sent.gone_us - signal_sent.sent_us) / 1e3 for signal_sent in sent]
    met = len(times_ms) == effort.num_hangs and max(times_ms) <= LEASE_MS
    return ("SIGSTOP until it is fenced", "ms", *_spread(times_ms), f"≤ {LEASE_MS}", effort.judged(met))


def _redone(effort: Effort, run: Callable[[], SignalledRun]) -> Row:
    counts = [float(recovery.redone_ops) for _, _, recovery, _ in run().recoveries(signal.SIGKILL)]
    plan = TWELVE.plan()
    most = plan.num_ops + sum(warm_ups(plan).values())
    met = len(counts) == effort.num_kills and max(counts) <= most
    return ("done again", "ops", *_spread(counts), f"≤ {most}", _judged(met))


def _spread(numbers: Sequence[float]) -> tuple[str, str, str]:
    """How many, the median, the worst."""
    return (str(len(numbers)), f"{median(numbers):.0f}", f"{max(numbers):.0f}") if numbers else ("0", "–", "–")


SAVE_EVERY, PATIENCE_S = 20, 60
SURVIVOR = "W0_0"


@dataclass(frozen=True, slots=True)
class Sample:
    """What is held while everybody is there: the number of processes; and of those that live through the whole run."""

    num_processes: int
    holdings: dict[str, Holdings]


@dataclass(frozen=True, slots=True)
class Soak:
    """A long run with signals; the steps of its last checkpoint; the number of different weights over that and a run
    without failures."""

    signalled: SignalledRun
    num_steps: int
    num_weights: int
    samples: tuple[Sample, ...]


def soak(effort: Effort) -> list[Section]:
    run = cache(partial(_soak, effort))
    about = (
        f"{_shown(TWELVE)}, exact mode, a checkpoint every {SAVE_EVERY} steps, in one run: {effort.num_soak_kills} kills by "
        f"SIGKILL from outside, one in about every {_soak_rhythm(effort).cycle_s:.1f} s at a random moment, whatever the run is "
        f"doing; the victim is started again up to a cycle later. Everybody but {SURVIVOR} may be hit. Left and joined are "
        "workers. When all are back, and after the next checkpoint, the run is ended; the number of different `weights_sha256` "
        "is over that checkpoint and a run without failures of as many steps. The target is that all kills were made, and 1."
    )
    header: Row = ("kills", "left", "joined", "minutes", "steps", "median ms", "worst ms", "ended", "different weights", "met")
    one = Section("soak", "Kills and re-joins for long", about, header, (Case("run", partial(_soaked, effort, run)),))
    about = (
        "What the processes of that run hold: medians over the first and the last quarter of its samples, each taken before a "
        f"kill with everybody there. The longest-living worker is {SURVIVOR}. Targets: at most {MORE_ALLOWED} more processes, "
        f"open files, sockets and threads, and at most {RSS_ALLOWED - 1:.0%} more memory."
    )
    cases = [Case("processes", partial(_growth, effort, run, "the job", "processes", lambda sample: sample.num_processes))]
    for who in ("launcher", "coordinator", SURVIVOR):
        for what in ("files", "sockets", "threads", "MiB"):
            cases.append(Case(f"{who}: {what}", partial(_growth, effort, run, who, what, partial(_held, who, what))))
    header = ("who", "what", "samples", "first quarter", "last quarter", "target", "met")
    return [one, Section("growth", "What grows in that run", about, header, tuple(cases))]


def _soak_rhythm(effort: Effort) -> Rhythm:
    cycle_s = effort.soak_s / effort.num_soak_kills
    return Rhythm(cycle_s, earliest_s=0, latest_s=0.6 * cycle_s, back_s=0.7 * cycle_s)


def _soak(effort: Effort) -> Soak:
    if not Path("/proc/self/fd").is_dir():
        raise SystemExit("the table soak reads what processes hold from /proc, which this system has not: leave it out")
    limit_s = 2 * effort.soak_s + RUN_LIMIT_S
    victims = [name for name in names(TWELVE) if name != SURVIVOR]
    signals = _soak_rhythm(effort).signals(victims, [signal.SIGKILL] * effort.num_soak_kills)
    samples = list[Sample]()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        ready, options = partial(_sampled, samples), replace(EXACT, checkpoint=CheckpointOptions(SAVE_EVERY))
        over = partial(_is_saved, (signals[-1].back_s or 0.0) + PATIENCE_S)
        signalled = run_with_signals(TWELVE, signals, limit_s, ready, over, folder, options)
        if signalled.problem:
            return Soak(signalled, 0, 0, tuple(samples))
        num_steps, weights_sha256 = saved_weights(TWELVE, folder)
    expected = run_without_failures(TWELVE, num_steps, STAGGERED, None, limit_s)
    return Soak(signalled, num_steps, len({weights_sha256, expected.weights_sha256}), tuple(samples))


def _sampled(samples: list[Sample], log: RunLog) -> bool:
    """Send the signal whatever the run is doing, but take a sample first if all workers are live."""
    if _all_there(log):
        pids = {"launcher": os.getpid(), "coordinator": log.coordinators[-1], SURVIVOR: log.pids[SURVIVOR]}
        samples.append(Sample(num_processes(), {who: Holdings.of(pid) for who, pid in pids.items()}))
    return True


def _is_saved(latest_s: float, log: RunLog) -> bool:
    """Whether there is a checkpoint since everybody is back, or since the last change if somebody has not come by then."""
    return (_all_there(log) or log.now_s > latest_s) and log.num_saved > log.recoveries[-1].iteration


def _soaked(effort: Effort, run: Callable[[], Soak]) -> Row:
    soaked = run()
    signalled, log = soaked.signalled, soaked.signalled.log
    num_kills = len(signalled.sent)
    met = num_kills == effort.num_soak_kills and log.num_left >= num_kills and soaked.num_weights == 1
    minutes = f"{(log.last_step_us - log.begin_us) / 60e6:.1f}"
    counts = (str(num_kills), str(log.num_left), str(log.num_joined), minutes, str(soaked.num_steps))
    times = _spread(_times_ms(signalled))[1:]
    return (*counts, *times, signalled.problem or "as asked", str(soaked.num_weights), _judged(met))


def _held(who: str, what: str, sample: Sample) -> float:
    held = sample.holdings[who]
    return {"files": held.num_files, "sockets": held.num_sockets, "threads": held.num_threads, "MiB": held.rss_bytes / MIB}[what]


def _growth(effort: Effort, run: Callable[[], Soak], who: str, what: str, number: Callable[[Sample], float]) -> Row:
    numbers = [number(sample) for sample in run().samples]
    if not numbers:
        return (who, what, "0", "–", "–", "–", effort.judged(False))
    quarter = max(1, len(numbers) // 4)
    first, last = median(numbers[:quarter]), median(numbers[-quarter:])
    most = first * RSS_ALLOWED if what == "MiB" else first + MORE_ALLOWED
    return (who, what, str(len(numbers)), f"{first:.0f}", f"{last:.0f}", f"≤ {most:.0f}", effort.judged(last <= most))


SECTIONS = {"exact": exact, "elastic": elastic, "latency": latency, "soak": soak}


def _shown(sizes: Sizes) -> str:
    return f"{_shape(sizes)}, width {sizes.width}, {sizes.layers} layers, {sizes.context} bytes"


def _shape(sizes: Sizes) -> str:
    return f"{sizes.pipelines} × {sizes.stages} workers, {sizes.microbatches} micro-batches"


def _few(counts: set[int]) -> str:
    """One number if all are the same."""
    return " or ".join(map(str, sorted(counts))) or "–"


def _judged(met: bool) -> str:
    return YES if met else NO


def _sections(name: str, is_quick: bool) -> list[Section]:
    return SECTIONS[name](QUICK if is_quick else WHOLE)


SCRIPT = Script(
    "recovery",
    "Measure what failures cost, and show that they change nothing.",
    tuple(SECTIONS),
    quick="few runs, kills and minutes",
    libraries=("torch", "numpy"),
    width=170,
)


if __name__ == "__main__":
    sys.exit(SCRIPT.run(_sections))
