"""Failures by signals from outside, at random moments, to the processes of a run; and what those that live on hold.

Signals are sent by a thread of the process that launched the run. Who was killed comes back by a trace: the launcher starts it.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals

from recovery_cases import Diary, Enough, Overdue, names, train
from runtime_cases import EXACT, SEED, Sizes

import recycle
from recycle.core.events.record import Recovered
from recycle.core.events.trace import Change, Trace
from recycle.runtime.execute.executor import now_us
from recycle.runtime.options import TrainOptions

# A run that is struck never comes to its last step: it is ended when enough is known.
ENDLESS = 10**6
_PROC = Path("/proc")
_SOON_S, _GLANCE_S = 0.5, 0.005


@dataclass(frozen=True, slots=True)
class Strike:
    """A signal to a process, and when that is started again, in seconds since the run's first op."""

    at_s: float
    victim: str
    back_s: float
    kind: Signals = SIGKILL


@dataclass(frozen=True, slots=True)
class Rhythm:
    """One strike in every cycle: between which of its seconds, and in which of them its victim is started again."""

    cycle_s: float
    earliest_s: float
    latest_s: float
    back_s: float

    def strikes(self, victims: Sequence[str], kinds: Sequence[Signals]) -> list[Strike]:
        """Random moments and victims, the same in every run. None of the last two victims, which may still be loading."""
        chance, strikes = random.Random(SEED), list[Strike]()
        for number, kind in enumerate(kinds):
            recent = [strike.victim for strike in strikes[-2:]]
            victim = chance.choice([name for name in victims if name not in recent])
            moment_s = chance.uniform(self.earliest_s, self.latest_s)
            begin_s = number * self.cycle_s
            strikes.append(Strike(begin_s + moment_s, victim, begin_s + self.back_s, kind))
        return strikes


def _trace(sizes: Sizes, strikes: Sequence[Strike]) -> Trace:
    """The launcher's part: it starts who was killed. A trace adds nobody whom it has not removed, dead as it is by then."""
    changes = [Change(0, True, name) for name in names(sizes)]
    for strike in strikes:
        back_us = round(strike.back_s * 1e6)
        changes += [Change(back_us, False, strike.victim), Change(back_us + 1, True, strike.victim)]
    return Trace(tuple(changes), changes[-1].at_us)


@dataclass(frozen=True, slots=True)
class Blow:
    """A signal that was sent, and when; and when its process was gone. Both by the machine's clock."""

    kind: Signals
    sent_us: int
    gone_us: int


@dataclass(frozen=True, slots=True)
class Struck:
    """A run that was struck, what was heard of it, and the problem by which it ended before it was to end."""

    blows: tuple[Blow, ...]
    diary: Diary
    problem: str

    def recoveries(self, kind: Signals) -> Iterator[tuple[Blow, int, Recovered, int]]:
        """Every such signal that led to a recovery: when it was sent in the time of the record, and the first op after it."""
        followed = [pair for pair in zip(self.diary.recoveries, self.diary.first_ops_us, strict=True) if not pair[0].joins]
        for blow in self.blows:
            at_us = blow.sent_us - self.diary.zero_us
            found = next(((recovery, op_us) for recovery, op_us in followed if recovery.end_us > at_us and op_us), None)
            if blow.kind is kind and found is not None:
                yield blow, at_us, *found


Moment = Callable[[Diary], bool]
"""Whether something may go on, as far as a diary tells."""


def strike_all(
    sizes: Sizes,
    strikes: Sequence[Strike],
    limit_s: float,
    ready: Moment,
    over: Moment,
    out: Path | None = None,
    options: TrainOptions = EXACT,
) -> Struck:
    """Train while signals are sent: each when the run is `ready`, if that is soon; end it when it is `over` after the last."""
    diary, problem = Diary(), ""
    with ThreadPoolExecutor(1) as pool:
        striking = pool.submit(_strike_all, diary, strikes, ready, over)
        try:
            failures = replace(options.failures, trace=_trace(sizes, strikes))
            train(sizes, ENDLESS, limit_s, watch=diary.hear, out=out, options=replace(options, failures=failures))
        except Enough:
            pass
        except (recycle.UserError, Overdue) as reason:
            problem = str(reason).splitlines()[0]
        finally:
            diary.is_over.set()
        return Struck(tuple(striking.result()), diary, problem)


def _strike_all(diary: Diary, strikes: Sequence[Strike], ready: Moment, over: Moment) -> list[Blow]:
    """The thread's work. The run ends with it, also if something goes wrong here."""
    blows = list[Blow]()
    try:
        while not diary.has_begun.wait(_SOON_S) and not diary.is_over.is_set():
            pass
        for strike in strikes:
            diary.is_over.wait(max(0.0, strike.at_s - diary.now_s))
            while not ready(diary) and diary.now_s < strike.back_s - _SOON_S and not diary.is_over.wait(_GLANCE_S):
                pass
            if diary.is_over.is_set():
                break
            blows += _strike(diary, strike)
        diary.is_over.wait(max(0.0, strikes[-1].back_s - diary.now_s))
        while not over(diary) and not diary.is_over.wait(_SOON_S):
            pass
        return blows
    finally:
        diary.is_enough.set()


def _strike(diary: Diary, strike: Strike) -> Iterator[Blow]:
    """Send the signal, if its process is there, and watch a process that was stopped until it has been killed."""
    pid = diary.pids.get(strike.victim)
    if pid is None or not _is_there(pid):
        return
    sent_us = now_us()
    os.kill(pid, strike.kind)
    while strike.kind is SIGSTOP and _is_there(pid) and not diary.is_over.wait(_GLANCE_S):
        pass
    yield Blow(strike.kind, sent_us, now_us())


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
