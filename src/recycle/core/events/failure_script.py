"""Script and Injection: failures to inject into a run, each with its target, its step, and its place in the step.

Tests, the command line and the demo write the same scripts, and the target of an injection carries it out on itself. A trace
gives failures by the clock; a script gives them by what is computed, so that it hits the same op in every run. The text form of
an injection is its place; steps count from 1:

    W1_2@5             in step 5, before the middle op of the worker's row
    W1_2@5:first       before the first op of its row; `last` likewise
    W1_2@5:2F0@1       before that op
    W0_1@8:reduce+3s   inside the gradient reduction of step 8, for three seconds
    W1_2@5-20:x0.6     from step 5 to step 20, all ops of the worker at 0.6 of its speed; W1_2@5:x0.6 to the end
    W1_1-W1_2@5+20ms   from step 5 on, every message between two workers takes 20 ms longer; W1_1-W1_2@5-20+20ms to step 20
    coordinator@6      the coordinator, when step 6 begins
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from reprlib import repr as shortened
from typing import Any

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.op import Op
from recycle.core.units import parse_duration_us

MIDDLE, FIRST, LAST, REDUCE, STEP, CHECKPOINT, RECOVERY = "", "first", "last", "reduce", "step", "checkpoint", "recovery"
TRANSFER = "transfer"
_WORDS = (MIDDLE, FIRST, LAST, REDUCE, STEP, CHECKPOINT, RECOVERY, TRANSFER)
_COORDINATOR = "coordinator"
_PLACE = re.compile(r"([^@]+)@(\d+)(?:-(\d+))?(?::([^+]+))?(?:\+(.+))?", re.ASCII)
_SPEED = re.compile(r"x(\d*\.?\d+)", re.ASCII)
_LONGEST_TEXT = 100
# Python writes floats in this range without an exponent, which the text form has not.
_SHORTEST_S, _LONGEST_S = 0.001, 86400.0
_LOWEST_SPEED = 0.01
# A worker that waits for a message for longer is taken for one that hangs.
_LONGEST_DELAY_S = 1.0


class Action(StrEnum):
    """What happens: SIGKILL, SIGSTOP, ops or messages that take longer, an exit with an error, a flipped bit, a new process."""

    KILL = "kill"
    HANG = "hang"
    SLOW = "slow"
    SLOW_LINK = "slow-link"
    FAIL = "fail"
    CORRUPT = "corrupt"
    REJOIN = "rejoin"


@dataclass(frozen=True, slots=True)
class Injection:
    """An event that happens once, when `target` first reaches `at` in `iteration`; the target None is the coordinator.

    A slow worker is an exception if it has a `speed`: from `iteration` on, up to and with the iteration `until` if that is not
    -1, all its ops take 1 / `speed` of their time. So is a slow link, that of the target with the worker `other`: as long, all
    messages between the two take `seconds` longer.

    `at` is one of the words of this module or an op as it prints itself:

    - MIDDLE, FIRST, LAST or an op: before that op of the target's row.
    - REDUCE: inside the gradient reduction.
    - STEP: right after the target's own optimizer step, before that of other workers.
    - CHECKPOINT: while the target's checkpoint is being written.
    - RECOVERY: in the recovery that follows the first failure of this iteration, while the target regroups.
    - TRANSFER: when the target is about to send or receive the state of a stage, the first time in this iteration or later.

    The coordinator has no row: it is killed when the iteration begins, or in a recovery. A worker rejoins before the iteration
    begins. A corruption flips one bit of the target's weights after its optimizer step. `seconds` is how long the target hangs
    (0: for ever), or by how much an op is slow.
    """

    action: Action
    target: Worker | None
    iteration: int
    at: str = MIDDLE
    seconds: float = 0.0
    speed: float = 0.0
    until: int = -1
    other: Worker | None = None

    def __post_init__(self) -> None:
        if self.iteration < 0:
            raise UserError(f"{self._text} is in step {self.step}, but steps count from 1: name a later one")
        if self.target is None:
            self._check_coordinator()
        elif self.at not in _WORDS:
            object.__setattr__(self, "at", str(self._read_op(self.target)))
        if self.action is Action.REJOIN and self.at != MIDDLE:
            raise UserError(
                f"{self._text} names a place in a step, but a worker comes back before one begins: leave {self.at} out"
            )
        if self.action is Action.CORRUPT and self.at not in (MIDDLE, STEP):
            raise UserError(f"{self._text} names a place in a step, but weights are corrupted after it: leave {self.at} out")
        if self.action is Action.SLOW_LINK or self.other is not None:
            self._check_link()
        elif self.speed or self.until >= 0:
            self._check_speed()
        else:
            self._check_seconds()

    @property
    def step(self) -> int:
        """The step as users count."""
        return self.iteration + 1

    @property
    def op(self) -> Op | None:
        """The op before which the injection happens, if it names one."""
        return None if self.at in _WORDS else Op.parse(self.at)

    @property
    def is_end(self) -> bool:
        """Whether the target surely dies: a worker that hangs for ever is fenced; one that wakes up, or is slow, may be."""
        return self.action in (Action.KILL, Action.FAIL) or (self.action is Action.HANG and self.seconds == 0)

    @property
    def _text(self) -> str:
        return f"{self.action} {self}"

    def __str__(self) -> str:
        name = _COORDINATOR if self.target is None else str(self.target)
        name += f"-{self.other}" if self.other is not None else ""
        place = f":{self.at}" if self.at else ""
        length = f"+{repr(self.seconds).removesuffix('.0')}s" if self.seconds else ""
        until = f"-{self.until + 1}" if self.until >= 0 else ""
        speed = f":x{self.speed:g}" if self.speed else ""
        return f"{name}@{self.step}{until}{speed}{place}{length}"

    @staticmethod
    def parse(action: Action, text: str) -> "Injection":
        """Read a place such as `W1_2@5:2F0@1`, `W0_1@8:reduce+3s`, `W1_2@5-20:x0.6` or, of a link, `W1_1-W1_2@5+20ms`.

        An op of the worker's own pipeline may be `2F0`.
        """
        match = _PLACE.fullmatch(text.strip())
        if not match or len(text) > _LONGEST_TEXT or not text.strip().isprintable():
            raise UserError(
                f"{action} {shortened(text)} names no place in a run: write WORKER@STEP, WORKER@STEP:PLACE or "
                "WORKER@STEP:PLACE+SECONDS, such as W1_2@5, W1_2@5:2F0@1 or W1_2@5:reduce+3s"
            )
        target, step, until, at, length = match.groups()
        seconds = parse_duration_us(length) / 1e6 if length else 0.0
        if length and not seconds:
            raise UserError(
                f"{action} {text.strip()} lasts no time at all: give at least {_SHORTEST_S:g} s, or leave +{length} out"
            )
        speed = float(found[1]) if (found := _SPEED.fullmatch(at or "")) else 0.0
        if found and not speed:
            raise UserError(f"{action} {text.strip()} stops the worker: write hang, or a speed from {_LOWEST_SPEED:g} on")
        at = MIDDLE if found else at or MIDDLE
        last = int(until) - 1 if until else -1
        target, _, other = target.partition("-") if action is Action.SLOW_LINK else (target, "", "")
        end = _read_target(action, other) if other else None
        return Injection(action, _read_target(action, target), int(step) - 1, at, seconds, speed, last, end)

    def _check_coordinator(self) -> None:
        if self.action is not Action.KILL:
            raise UserError(f"{self._text} is not possible: the coordinator can only be killed, and starts again by itself")
        if self.at not in (MIDDLE, RECOVERY):
            raise UserError(
                f"{self._text} names a place in a worker's row, which the coordinator has not: write {_COORDINATOR}@{self.step} "
                f"or {_COORDINATOR}@{self.step}:{RECOVERY}"
            )

    def _read_op(self, target: Worker) -> Op:
        try:
            op = Op.parse(self.at, target.pipeline)
        except ValueError:  # also more digits than Python reads
            raise UserError(
                f"{self.action} {target}@{self.step} names the place {shortened(self.at)}: write one of {', '.join(_WORDS[1:])}, "
                f"or an op such as {target.stage}F0@{target.pipeline}"
            ) from None
        if op.stage != target.stage:
            raise UserError(f"{self._text} names an op of stage {op.stage}, but {target} runs those of stage {target.stage} only")
        return op

    def _check_speed(self) -> None:
        if self.action is not Action.SLOW or self.at != MIDDLE or self.seconds or not self.speed:
            raise UserError(
                f"{self._text} mixes two forms: only slow has a speed, and with it no place and no time: write "
                f"slow {self.target or 'W1_2'}@{self.step}:x0.6"
            )
        if not _LOWEST_SPEED <= self.speed < 1:  # also true of NaN
            raise UserError(f"{self._text} has the speed {self.speed:g}: give one from {_LOWEST_SPEED:g} to below 1")
        self._check_until()
        object.__setattr__(self, "speed", round(self.speed, 3))

    def _check_until(self) -> None:
        if self.until != -1 and self.until < self.iteration:
            raise UserError(f"{self._text} ends before it begins: name the first step and then the last, such as @5-20")

    def _check_link(self) -> None:
        target, other, write = self.target, self.other, f"write {Action.SLOW_LINK} W1_1-W1_2@{self.step}+20ms"
        if self.action is not Action.SLOW_LINK or target is None or other is None or abs(target.stage - other.stage) != 1:
            raise UserError(f"{self._text} names no link: one is between two workers of neighbouring stages: {write}")
        if self.at != MIDDLE or self.speed or not self.seconds:
            raise UserError(f"{self._text} does not say by how much longer messages take: give a time and nothing else: {write}")
        if not _SHORTEST_S <= self.seconds <= _LONGEST_DELAY_S:  # also true of NaN
            longest = f"{_SHORTEST_S:g} s to {_LONGEST_DELAY_S:g} s"
            raise UserError(f"{self._text} lets messages take {self.seconds:g} s longer: give a time from {longest}")
        self._check_until()
        object.__setattr__(self, "seconds", round(self.seconds, 6))

    @property
    def is_slowness(self) -> bool:
        """Whether the target or its link is slow for a while, of which nobody dies."""
        return self.speed > 0 or self.other is not None

    def is_slow_in(self, iteration: int) -> bool:
        """Whether the target has the injection's speed, or its link the delay, in this iteration."""
        return self.is_slowness and self.iteration <= iteration and (self.until == -1 or iteration <= self.until)

    def _check_seconds(self) -> None:
        if self.seconds == 0:
            if self.action is Action.SLOW:
                raise UserError(f"{self._text} does not say by how much: add a time or a speed, such as {self}+3s or :x0.6")
            return
        if self.action not in (Action.HANG, Action.SLOW):
            raise UserError(f"{self._text} gives a time, but only hang and slow have one: leave it out")
        if not _SHORTEST_S <= self.seconds <= _LONGEST_S:  # also true of NaN
            raise UserError(f"{self._text} lasts {self.seconds:g} s: give a time from {_SHORTEST_S:g} s to {_LONGEST_S:g} s")
        object.__setattr__(self, "seconds", round(self.seconds, 6))


@dataclass(frozen=True, slots=True)
class Script:
    """All injections of a run, in order of the iterations. `of` makes one that is possible in a given run."""

    injections: tuple[Injection, ...] = ()

    @staticmethod
    def of(injections: Iterable[Injection], shape: Shape, num_steps: int, dead: Iterable[Worker] = ()) -> "Script":
        """Return the script of a run of `num_steps` that begins without `dead`; refuse injections that cannot happen in it."""
        script = Script(tuple(sorted(injections, key=lambda injection: injection.iteration)))
        for injection in script.injections:
            _refuse_elsewhere(injection, shape, num_steps)
            if script.injections.count(injection) > 1:
                raise UserError(f"{injection.action} {injection} is given twice: give it once")
            if injection.at == RECOVERY and not any(_causes_recovery(other, injection) for other in script.injections):
                raise UserError(
                    f"{injection.action} {injection} waits for a recovery, but nobody else fails in step {injection.step}: "
                    "add a kill, hang, slow or fail of that step"
                )
            if injection.at == TRANSFER and not any(_causes_transfer(other, injection) for other in script.injections):
                raise UserError(
                    f"{injection.action} {injection} waits for a copy of a stage's state, but nobody rejoins by step "
                    f"{injection.step}: add a rejoin"
                )
        _refuse_impossible(script.injections, dead)
        return script

    def for_worker(self, worker: Worker, since: int = 0) -> tuple[Injection, ...]:
        """The injections that a process at the place `worker` carries out from iteration `since` on: all but its rejoins."""
        later = (one for one in self.injections if one.iteration >= since or one.is_slow_in(since))
        mine = (one for one in later if worker in (one.target, one.other))
        return tuple(one for one in mine if one.action is not Action.REJOIN)

    def targets(self) -> frozenset[Worker]:
        """The workers to which something happens that may end them: one that is only slow, or has a slow link, goes on."""
        return frozenset(one.target for one in self.injections if one.target is not None and not one.is_slowness)

    def for_coordinator(self) -> tuple[Injection, ...]:
        return tuple(one for one in self.injections if one.target is None)

    def rejoins(self) -> tuple[Injection, ...]:
        return tuple(one for one in self.injections if one.action is Action.REJOIN)

    def to_json(self) -> list[str]:
        """Return a line for each injection, such as `kill W1_2@5`."""
        return [f"{one.action} {one}" for one in self.injections]

    @staticmethod
    def from_json(data: Any) -> "Script":
        if not isinstance(data, list):
            raise UserError(f"a failure script is a list of lines such as 'kill W1_2@5', not {shortened(data)}")
        return Script(tuple(map(_read_line, data)))


def _read_line(line: Any) -> Injection:
    action, _, place = line.partition(" ") if isinstance(line, str) else ("", "", "")
    if action not in list(Action):
        raise UserError(
            f"{shortened(line)} is no line of a failure script: write one of {', '.join(Action)}, and where, "
            "such as 'kill W1_2@5'"
        )
    return Injection.parse(Action(action), place)


def _read_target(action: Action, text: str) -> Worker | None:
    if text == _COORDINATOR:
        return None
    try:
        return Worker.parse(text)
    except UserError:
        raise UserError(
            f"{action} {shortened(text)} is aimed at no worker: write W<pipeline>_<stage>, such as W1_2, or {_COORDINATOR}"
        ) from None


def _refuse_elsewhere(injection: Injection, shape: Shape, num_steps: int) -> None:
    text, target, op = f"{injection.action} {injection}", injection.target, injection.op
    pipelines, microbatches = shape.num_pipelines, shape.num_microbatches
    for worker in (target, injection.other):
        if worker is not None and worker not in shape:
            raise UserError(f"{text} is aimed at {worker}, which is not a worker of this cluster: {shape.ranges}")
    if injection.step > num_steps:
        raise UserError(f"{text} is in step {injection.step}, but the run ends with step {num_steps}: name an earlier one")
    if op is not None and not (op.microbatch.pipeline < pipelines and op.microbatch.index < microbatches):
        raise UserError(
            f"{text} names an op of no micro-batch of this run: they are 0 to {microbatches - 1} of the pipelines 0 to "
            f"{pipelines - 1}"
        )


def _causes_recovery(cause: Injection, injection: Injection) -> bool:
    """Whether a recovery may follow `cause` in which `injection` happens; a lost coordinator causes none."""
    is_failure = cause.target is not None and cause.action is not Action.REJOIN and cause.at != RECOVERY
    return is_failure and not cause.is_slowness and cause.iteration == injection.iteration and cause.target != injection.target


def _causes_transfer(cause: Injection, injection: Injection) -> bool:
    """Whether a worker of the target's stage, or the target itself, rejoins early enough."""
    if cause.action is not Action.REJOIN or cause.target is None or injection.target is None:
        return False
    return cause.iteration <= injection.iteration and cause.target.stage == injection.target.stage


def _refuse_impossible(injections: Iterable[Injection], dead: Iterable[Worker]) -> None:
    """Raise if an injection targets a dead worker, or a live worker rejoins."""
    gone, doubtful = dict.fromkeys(dead, "from the start"), set[Worker]()
    for injection in sorted(injections, key=_within_iteration):
        text, worker, step = f"{injection.action} {injection}", injection.target, injection.step
        if worker is None:
            continue
        if injection.action is Action.REJOIN:
            if worker not in gone and worker not in doubtful:
                raise UserError(f"{text} is not possible, because {worker} is there already: let it fail in an earlier step")
            gone.pop(worker, None)
            doubtful.discard(worker)
        elif worker in gone:
            raise UserError(f"{text} is not possible, because {worker} is gone {gone[worker]}: let it rejoin by step {step}")
        elif injection.is_end:
            gone[worker] = f"since {text}"
        else:
            doubtful.add(worker)


def _within_iteration(injection: Injection) -> tuple[int, int]:
    """The order within an iteration: rejoins before it begins, then injections that a worker may survive, then the others."""
    return injection.iteration, 0 if injection.action is Action.REJOIN else 2 if injection.is_end else 1


NOTHING = Script(())
"""The script without injections."""
