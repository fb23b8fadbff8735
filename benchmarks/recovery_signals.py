"""Failures by signals from outside, at random moments, to the processes of a run; and what those that live on hold.

Signals are sent by a thread of the process that launched the run. The launcher starts who was killed again: by a trace, at a
given time, or at once, if no signal says when.
"""

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals

from recovery_cases import RunEnded, RunLog, TimeLimitExceeded, names, train
from runtime_cases import EXACT, SEED, Sizes

import recycle
from recycle.core.events.record import Recovered
from recycle.core.events.trace import Change, Trace
from recycle.runtime.execute.spans import now_us
from recycle.runtime.options import TrainOptions

# A run with signals never comes to its last step: it is ended when enough is known.
ENDLESS = 10**6
_PROC = Path("/proc")
_SOON_S, _GLANCE_S = 0.5, 0.005


@dataclass(frozen=True, slots=True)
class PlannedSignal:
    """A signal to a process, and when that is started again, in seconds since the run's first op; None: when it is dead."""

    at_s: float
    victim: str
    back_s: float | None
    kind: Signals = SIGKILL


@dataclass(frozen=True, slots=True)
class Rhythm:
    """One signal in every cycle: between which of its seconds, and in which of them its victim is started again."""

    cycle_s: float
    earliest_s: float
    latest_s: float
    back_s: float

    def signals(self, victims: Sequence[str], kinds: Sequence[Signals]) -> list[PlannedSignal]:
        """Random moments and victims, the same in every run. None of the last two victims, which may still be loading."""
        chance, signals = random.Random(SEED), list[PlannedSignal]()
        for number, kind in enumerate(kinds):
            recent = [planned.victim for planned in signals[-2:]]
            victim = chance.choice([name for name in victims if name not in recent])
            moment_s = chance.uniform(self.earliest_s, self.latest_s)
            begin_s = number * self.cycle_s
            signals.append(PlannedSignal(begin_s + moment_s, victim, begin_s + self.back_s, kind))
        return signals


def _trace(sizes: Sizes, signals: Sequence[PlannedSignal]) -> Trace | None:
    """The launcher's part: it starts who was killed. A trace adds nobody whom it has not removed, dead as it is by then."""
    changes = [Change(0, True, name) for name in names(sizes)]
    for planned in signals:
        if planned.back_s is None:
            return None
        back_us = round(planned.back_s * 1e6)
        changes += [Change(back_us, False, planned.victim), Change(back_us + 1, True, planned.victim)]
    return Trace(tuple(changes), changes[-1].at_us)


@dataclass(frozen=True, slots=True)
class SentSignal:
    """A signal that was sent, and when; and when its process was gone. Both by the machine's clock."""

    kind: Signals
    sent_us: int
    gone_us: int


@dataclass(frozen=True, slots=True)
class SignalledRun:
    """A run with signals, the log of its events, and the problem by which it ended before it was to end."""

    sent: tuple[SentSignal, ...]
    log: RunLog
    problem: str

    def recoveries(self, kind: Signals) -> Iterator[tuple[SentSignal, int, Recovered, int]]:
        """Every such signal that led to a recovery: when it was sent in the time of the record, and the first op after it."""
        followed = [pair for pair in zip(self.log.recoveries, self.log.first_ops_us, strict=True) if not pair[0].joins]
        for signal_sent in self.sent:
            at_us = signal_sent.sent_us - self.log.zero_us
            found = next(((recovery, op_us) for recovery, op_us in followed if recovery.end_us > at_us and op_us), None)
            if signal_sent.kind is kind and found is not None:
                yield signal_sent, at_us, *found


Condition = Callable[[RunLog], bool]
"""Whether something may go on, by the log of a run."""


def run_with_signals(
    sizes: Sizes,
    signals: Sequence[PlannedSignal],
    limit_s: float,
    ready: Condition,
    over: Condition,
    out: Path | None = None,
    options: TrainOptions = EXACT,
) -> SignalledRun:
    """Train while signals are sent; end it when it is `over` after the last.

    Each signal is sent when the run is `ready`, or shortly before its victim is started again.
    """
    log, problem = RunLog(), ""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(_send_all, log, signals, ready, over)
        try:
            failures = replace(options.failures, trace=_trace(sizes, signals))
            train(sizes, ENDLESS, limit_s, watch=log.observe, out=out, options=replace(options, failures=failures))
        except RunEnded:
            pass
        except (recycle.UserError, TimeLimitExceeded) as reason:
            problem = str(reason).splitlines()[0]
        finally:
            log.is_over.set()
        return SignalledRun(tuple(sending.result()), log, problem)


def _send_all(log: RunLog, signals: Sequence[PlannedSignal], ready: Condition, over: Condition) -> list[SentSignal]:
    """The thread's work. The run ends with it, also if something goes wrong here."""
    sent = list[SentSignal]()
    try:
        while not log.has_begun.wait(_SOON_S) and not log.is_over.is_set():
            pass
        for planned in signals:
            log.is_over.wait(max(0.0, planned.at_s - log.now_s))
            latest_s = math.inf if planned.back_s is None else planned.back_s - _SOON_S
            while not ready(log) and log.now_s < latest_s and not log.is_over.wait(_GLANCE_S):
                pass
            if log.is_over.is_set():
                break
            sent += _send(log, planned)
        log.is_over.wait(max(0.0, (signals[-1].back_s or 0.0) - log.now_s))
        while not over(log) and not log.is_over.wait(_SOON_S):
            pass
        return sent
    finally:
        log.is_enough.set()


def _send(log: RunLog, planned: PlannedSignal) -> Iterator[SentSignal]:
    """Send the signal, if its process is there, and watch a process that was stopped until it has been killed."""
    pid = log.pids.get(planned.victim)
    if pid is None or not _is_there(pid):
        return
    sent_us = now_us()
    os.kill(pid, planned.kind)
    while planned.kind is SIGSTOP and _is_there(pid) and not log.is_over.wait(_GLANCE_S):
        pass
    yield SentSignal(planned.kind, sent_us, now_us())


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds of the system."""

    num_files: int
    num_sockets: int
    num_threads: int
    rss_bytes: int

    @staticmethod
    def of(pid: int) -> "Holdings":
        folder = _PROC / str(pid)
        files = [_target(link) for link in (folder / "fd").iterdir()]
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        rss_bytes = int(status["VmRSS"].split()[0]) * 1024
        return Holdings(len(files), sum(file.startswith("socket:") for file in files), int(status["Threads"]), rss_bytes)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed meanwhile
        return ""


def num_processes() -> int:
    """How many processes descend from this one."""
    parents: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            try:
                # The name comes first, in brackets, and may hold anything.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # gone meanwhile
                continue
            parents[int(folder.name)] = int(fields[1])
    found, before = {os.getpid()}, 0
    while len(found) > before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return len(found) - 1
