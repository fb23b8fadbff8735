"""The critical path of a replayed iteration: from its last step back through the longest wait of each op.

Every segment starts when the one before it ends, so that their times add up to the length of the path: shortening anything
else would not end the iteration sooner. `wait` is the time in which an op was ready, but the plan has it start later.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from recycle.core.cluster import Worker
from recycle.core.events.op_columns import OPTIMIZER, REDUCE
from recycle.core.op import Kind
from recycle.sim.replay.replay_result import ReplayResult

TRANSFER, WAIT = "transfer", "wait"
SEGMENT_KINDS = (*(kind.value for kind in Kind), TRANSFER, REDUCE, OPTIMIZER, WAIT)


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A segment of the path: an op, a message, the reduction or step of a stage, or a wait for the planned start of an op."""

    kind: str
    label: str
    start_us: int
    end_us: int
    worker: Worker | None = None  # only of an op


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The segments in order of time."""

    iteration: int
    segments: tuple[PathSegment, ...]

    @property
    def length_us(self) -> int:
        return self.segments[-1].end_us - self.segments[0].start_us

    @property
    def by_kind(self) -> dict[str, int]:
        """Time by kind of segment; kinds without time are left out."""
        sums = dict.fromkeys(SEGMENT_KINDS, 0)
        for segment in self.segments:
            sums[segment.kind] += segment.end_us - segment.start_us
        return {kind: time for kind, time in sums.items() if time}

    @property
    def workers(self) -> list[Worker]:
        """The workers that the path runs through, in the order in which it first reaches them."""
        return list(dict.fromkeys(segment.worker for segment in self.segments if segment.worker is not None))


def critical_path(result: ReplayResult, iteration: int) -> CriticalPath:
    """Return the path that determined when `iteration` was complete."""
    segments = [segment for segment in _segments_backwards(result, iteration) if segment.end_us > segment.start_us]
    return CriticalPath(iteration, tuple(reversed(segments)))


def _segments_backwards(result: ReplayResult, iteration: int) -> Iterator[PathSegment]:
    """Yield the step that ended last, the reduction that it waited for, and the ops before it, along the cause of each."""
    graph = result.graph
    stage = int(result.step_ends_us[iteration].argmax())
    step = iteration, stage
    yield PathSegment(OPTIMIZER, f"step of stage {stage}", int(result.step_starts_us[step]), int(result.step_ends_us[step]))
    reduction = iteration, int(result.step_causes[step])
    times = int(result.reduce_starts_us[reduction]), int(result.reduce_ends_us[reduction])
    yield PathSegment(REDUCE, f"reduction of stage {reduction[1]}", *times)
    ready, starts, ends, causes = (
        column[iteration].tolist() for column in (result.ready_us, result.starts_us, result.ends_us, result.causes)
    )
    op = int(result.reduce_causes[reduction])
    while True:
        text, worker = str(graph.op(op)), graph.plan.rows[int(graph.row_of[op])].worker
        yield PathSegment(text[len(str(worker.stage))], text, starts[op], ends[op], worker)
        if causes[op] < 0:
            return
        before = causes[op] - iteration * graph.num_ops
        yield PathSegment(WAIT, f"{text} is due", ready[op], starts[op])
        yield PathSegment(TRANSFER, f"{graph.op(before)} to {text}", ends[before], ready[op])
        op = before
