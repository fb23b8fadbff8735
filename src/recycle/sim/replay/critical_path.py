"""The critical path of a replayed iteration: what its last step waited for, back to the op that waited for nothing in it.

Every leg starts when the one before it ends, so that their times add up to the length of the path: shortening anything
else would not end the iteration sooner. `wait` is time in which all was there, but the plan had the op start later.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from recycle.core.cluster import Worker
from recycle.core.op import Kind
from recycle.sim.replay.replay_result import OPTIMIZER, REDUCE, Replay

TRANSFER, WAIT = "transfer", "wait"
LEG_KINDS = (*(kind.value for kind in Kind), TRANSFER, REDUCE, OPTIMIZER, WAIT)


@dataclass(frozen=True, slots=True)
class Leg:
    """A piece of the path: an op, the way of its message, a stage's reduction or step, or a wait for the plan's clock."""

    kind: str
    what: str
    start_us: int
    end_us: int
    worker: Worker | None = None  # of an op


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The legs in order of time."""

    iteration: int
    legs: tuple[Leg, ...]

    @property
    def length_us(self) -> int:
        return self.legs[-1].end_us - self.legs[0].start_us

    @property
    def by_kind(self) -> dict[str, int]:
        """Time by kind of leg, for those that are there."""
        sums = dict.fromkeys(LEG_KINDS, 0)
        for leg in self.legs:
            sums[leg.kind] += leg.end_us - leg.start_us
        return {kind: time for kind, time in sums.items() if time}

    @property
    def workers(self) -> list[Worker]:
        """The workers that the path runs through, in the order in which it first reaches them."""
        return list(dict.fromkeys(leg.worker for leg in self.legs if leg.worker is not None))


def critical_path(played: Replay, iteration: int) -> CriticalPath:
    """Return the path that decided when `iteration` was complete."""
    legs = [*_finish(played, iteration), *_ops(played, iteration)]
    return CriticalPath(iteration, tuple(leg for leg in reversed(legs) if leg.end_us > leg.start_us))


def _last_stage(played: Replay, iteration: int) -> int:
    return int(played.step_ends_us[iteration].argmax())


def _finish(played: Replay, iteration: int) -> Iterator[Leg]:
    """The step that ended last, and the reduction that it waited for."""
    stage = _last_stage(played, iteration)
    step = iteration, stage
    reduction = iteration, int(played.step_causes[step])
    yield Leg(OPTIMIZER, f"step of stage {stage}", int(played.step_starts_us[step]), int(played.step_ends_us[step]))
    times = int(played.reduce_starts_us[reduction]), int(played.reduce_ends_us[reduction])
    yield Leg(REDUCE, f"reduction of stage {reduction[1]}", *times)


def _ops(played: Replay, iteration: int) -> Iterator[Leg]:
    """From the last gradient that the reduction waited for, back through what each op waited for."""
    program = played.program
    ready, starts, ends, causes = (
        column[iteration].tolist() for column in (played.ready_us, played.starts_us, played.ends_us, played.causes)
    )
    stage = int(played.step_causes[iteration, _last_stage(played, iteration)])
    op = int(played.reduce_causes[iteration, stage])
    while True:
        text, worker = str(program.op(op)), program.plan.rows[int(program.row_of[op])].worker
        yield Leg(text[len(str(worker.stage))], text, starts[op], ends[op], worker)
        if causes[op] < 0:
            return
        before = causes[op] - iteration * program.num_ops
        yield Leg(WAIT, f"{text} is due", ready[op], starts[op])
        yield Leg(TRANSFER, f"{program.op(before)} to {text}", ends[before], ready[op])
        op = before
