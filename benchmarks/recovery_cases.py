"""The runs of the recovery benchmark: their jobs, the log of a run, and scripts of failures with a check that they happened."""

import multiprocessing
import signal
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import sleep

from runtime_cases import ALL, EXACT, Sizes
from torch import Tensor

import recycle
from recycle.core.cluster import Worker
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.record import Changed, Event, OpRan, Recovered, Saved, Spell, Stepped
from recycle.models.text import Text
from recycle.planner.live_planner import Planner
from recycle.runtime.checkpoint.resume import load
from recycle.runtime.compute.state_digests import stage_digest, whole_digest
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.execute.spans import now_us
from recycle.runtime.launch.local_launcher import Watch, launch
from recycle.runtime.options import CheckpointOptions, FailureOptions, TrainOptions

STAGGERED, SYNCHRONOUS = ALL, "adaptive,decoupled"
# A worker is back well before the end if so many iterations are left.
MARGIN = 3


class RunEnded(Exception):
    """Nothing more is to be learned from a run: it ends before its last step."""


class TimeLimitExceeded(Exception):
    """A run did not come to its end in time."""


def names(sizes: Sizes) -> list[str]:
    """Those of all workers."""
    return [f"W{pipeline}_{stage}" for pipeline in range(sizes.pipelines) for stage in range(sizes.stages)]


def train(
    sizes: Sizes,
    num_steps: int,
    limit_s: float,
    techniques: str = STAGGERED,
    pace_s: float = 0.0,
    watch: Watch = lambda event: None,
    out: Path | None = None,
    options: TrainOptions = EXACT,
) -> Trained:
    """Train with real processes, surviving deaths; a sample takes at least `pace_s`. Raises TimeLimitExceeded after `limit_s`."""
    plan, data = sizes.plan(techniques=techniques), Paced(sizes.context, pace_s)
    options = replace(options, failures=replace(options.failures, plan_source=Planner(plan.problem)))
    with _limited(limit_s):
        return launch(sizes.job(plan, num_steps, options, dataset=data, out=out), watch)


class Paced:
    """Text of which every sample takes a while, so that even on a fast machine a worker is back before the steps are done."""

    def __init__(self, context: int, pace_s: float) -> None:
        self._text, self._pace_s = Text(context), pace_s

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if self._pace_s:
            sleep(self._pace_s)
        return self._text[number]


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raise TimeLimitExceeded in the main thread if it is still inside after so long: a stuck run has no events."""

    def give_up(*_: object) -> None:
        raise TimeLimitExceeded(f"it did not end within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class RunLog:
    """The facts of a run so far, and the ids of its processes. Events come in the launcher's thread.

    `scales` are those of the steps so far; `first_ops_us` the starts of the first ops after each of the `recoveries`,
    0 if there was none yet. `zero_us` is when the run began by the machine's clock, or a little later: no event comes before
    it happens.
    """

    def __init__(self) -> None:
        self.recoveries: list[Recovered] = []
        self.first_ops_us: list[int] = []
        self._planned_us: list[int] = []
        self.scales: dict[int, float | None] = {}
        self.begin_us = self.last_step_us = 0
        self.zero_us = now_us()
        self.num_live = self.num_left = self.num_joined = self.num_saved = 0
        self.pids: dict[str, int] = {}
        self.coordinators: list[int] = []
        self.has_begun, self.is_over, self.is_enough = threading.Event(), threading.Event(), threading.Event()

    @property
    def now_s(self) -> float:
        """Seconds since the run's first op."""
        return (now_us() - self.zero_us - self.begin_us) / 1e6

    @property
    def num_clipped(self) -> int:
        return sum(scale is not None and scale < 1 for scale in self.scales.values())

    def observe(self, event: Event) -> None:
        if self.is_enough.is_set():
            raise RunEnded
        match event:
            case OpRan(start_us=start_us):
                self._place(start_us)
            case Spell(cause="start"):
                self.begin_us = event.end_us
            case Changed(joins=joins):
                self.num_joined += joins
                self.num_left += not joins
            case Recovered():
                self.recoveries.append(event)
                self.first_ops_us.append(0)
                self._planned_us.append(event.at_us + event.detect_us + event.abort_us + event.plan_us)
                self.num_live = event.num_live
                self._update_pids()
            case Saved():
                self.num_saved = event.num_steps
            case Stepped():
                self.scales[event.iteration] = event.scale
                self.last_step_us = event.at_us
                self._update_pids()
        if self.pids and (at_us := getattr(event, "at_us", None)) is not None:
            self._set_clock(now_us() - at_us)

    def _place(self, start_us: int) -> None:
        """An op belongs to the last epoch that was planned before it; whatever ran until then had been stopped."""
        number = bisect_right(self._planned_us, start_us) - 1
        if number >= 0:
            self.first_ops_us[number] = min(start_us, self.first_ops_us[number] or start_us)

    def _update_pids(self) -> None:
        """Update the ids of processes. Only the launcher's thread does it, because it also reaps dead children."""
        pids = {child.name: child.pid for child in multiprocessing.active_children() if child.pid is not None}
        coordinator = pids.pop("coordinator", None)
        if coordinator is not None and coordinator not in self.coordinators:
            self.coordinators.append(coordinator)
        self.pids = pids

    def _set_clock(self, zero_us: int) -> None:
        if self.has_begun.is_set():
            self.zero_us = min(self.zero_us, zero_us)
        else:
            self.zero_us, self.num_live = zero_us, len(self.pids)
            self.has_begun.set()


def saved_weights(sizes: Sizes, folder: Path) -> tuple[int, str]:
    """The steps of the newest checkpoint of a run, and what its `weights_sha256` would be if it had ended there."""
    stages = sizes.gpt()
    num_steps = load(stages, folder)
    return num_steps, whole_digest(
        {Worker(0, number): stage_digest(module, is_by_layer=True) for number, module in enumerate(stages)}
    )


@dataclass(frozen=True, slots=True)
class Failure:
    """A script of lines such as `kill W1_2@4:reduce`, and the run that it happens in."""

    name: str
    lines: tuple[str, ...]
    num_steps: int = 8
    pace_s: float = 0.0
    checkpoint_every: int = 0

    @property
    def script(self) -> Script:
        return Script.from_json(list(self.lines))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The weights of a run; how many of its steps were clipped; how often it recovered; what did not go as the script says."""

    weights_sha256: str
    num_clipped: int
    num_recoveries: int
    problem: str


@cache
def run_without_failures(sizes: Sizes, num_steps: int, techniques: str, max_norm: float | None, limit_s: float) -> Trained:
    """The same run without any failure."""
    return train(sizes, num_steps, limit_s, techniques, options=replace(EXACT, max_norm=max_norm))


def run_with_failures(sizes: Sizes, failure: Failure, techniques: str, max_norm: float | None, limit_s: float) -> Outcome:
    """Train while a script is played, and say what came of it."""
    log, every = RunLog(), failure.checkpoint_every
    with tempfile.TemporaryDirectory() if every else nullcontext() as folder:
        out, checkpoint = Path(folder) / "run" if folder else None, CheckpointOptions(every)
        failures = FailureOptions(script=failure.script)
        options = replace(EXACT, max_norm=max_norm, checkpoint=checkpoint, failures=failures)
        try:
            trained = train(sizes, failure.num_steps, limit_s, techniques, failure.pace_s, log.observe, out, options)
        except (recycle.UserError, TimeLimitExceeded) as problem:
            return Outcome("", log.num_clipped, len(log.recoveries), str(problem).splitlines()[0])
    return Outcome(trained.weights_sha256, log.num_clipped, len(log.recoveries), describe_deviation(failure, log))


def describe_deviation(failure: Failure, log: RunLog) -> str:
    """What of the script did not happen as it says; nothing if all of it did."""
    if sorted(log.scales) != list(range(failure.num_steps)):
        return f"{len(log.scales)} of {failure.num_steps} steps are in the record"
    num_coordinators, used = 1, set[tuple[int, str]]()
    for injection in failure.script.injections:
        text = f"{injection.action} {injection}"
        if injection.target is None:
            num_coordinators += 1
            if len(log.coordinators) < num_coordinators:
                return f"{text}: no coordinator came after it"
            continue
        found = _recovery_from(injection, log.recoveries, used, was_lost=len(log.coordinators) > 1)
        if found is None:
            return f"{text}: not seen"
        if injection.action is Action.REJOIN and found.iteration > failure.num_steps - MARGIN:
            return f"{text}: only in step {found.iteration + 1}"
        if injection.seconds and log.last_step_us < found.at_us + injection.seconds * 1e6:
            return f"{text}: the run was over before"
    return ""


def _recovery_from(
    injection: Injection, recoveries: Sequence[Recovered], used: set[tuple[int, str]], was_lost: bool
) -> Recovered | None:
    """The recovery that an injection led to. Whoever left or joined counts for one injection only."""
    joins, has_moved = injection.action is Action.REJOIN, False
    for recovery in recoveries:
        # Whoever dies at a step may have been ahead of others, or behind; who comes back loads first.
        is_then = injection.iteration <= recovery.iteration and (joins or recovery.iteration <= injection.iteration + 2)
        if recovery.joins == joins and is_then and _fits(injection.action, recovery.cause, was_lost):
            for worker in recovery.workers:
                # Once somebody has moved, a process may have another place than the one that it is named for.
                if (recovery.epoch, worker) not in used and (has_moved or worker == str(injection.target)):
                    used.add((recovery.epoch, worker))
                    return recovery
        has_moved = has_moved or bool(recovery.moves)
    return None


def _fits(action: Action, cause: str, was_lost: bool) -> bool:
    """Whether such a failure is noticed like this. A coordinator that takes over from another knows the dead by their silence."""
    is_silence = "silent" in cause
    match action:
        case Action.KILL:
            return "closed" in cause or (was_lost and is_silence)
        case Action.HANG:
            return is_silence
    return True
