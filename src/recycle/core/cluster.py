"""Worker, Shape and Cluster: D pipelines of S stages, their workers, and which of them are dead."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from recycle.core.errors import UserError

_MOST_CHAIN_STAGES = 100_000_000
_WORKER = re.compile(r"W(\d+)_(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Worker:
    """The unit that fails: it holds stage `stage` of pipeline `pipeline`. Its text form is `W1_2`.

    Example:
        >>> Worker.parse("W1_2")
        Worker(pipeline=1, stage=2)
    """

    pipeline: int
    stage: int

    def __str__(self) -> str:
        return f"W{self.pipeline}_{self.stage}"

    @staticmethod
    def parse(text: str) -> "Worker":
        match = _WORKER.fullmatch(text.strip())
        if not match:
            raise UserError(f"{text!r} is not a worker: write W<pipeline>_<stage>, such as W1_2")
        return Worker(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a training job.

    Args:
        num_pipelines: D, the data-parallel pipelines.
        num_stages: S, the stages of each pipeline.
        num_microbatches: M, the micro-batches of each pipeline in an iteration.

    Raises:
        UserError: A number is below 1, or their product is too large to plan.

    Example:
        >>> Shape(3, 4, 6).num_workers
        12
    """

    num_pipelines: int
    num_stages: int
    num_microbatches: int

    def __post_init__(self) -> None:
        for name in ("pipelines", "stages", "microbatches"):
            value = getattr(self, f"num_{name}")
            if not isinstance(value, int) or value < 1:
                raise UserError(f"the number of {name} is {value!r}, but it must be a whole number of at least 1")
        if self.num_workers * self.num_microbatches > _MOST_CHAIN_STAGES:
            raise UserError(
                f"{self.num_pipelines} pipelines of {self.num_stages} stages with {self.num_microbatches} micro-batches are more "
                f"than can be planned: their product must be at most {_MOST_CHAIN_STAGES}"
            )

    @property
    def num_workers(self) -> int:
        return self.num_pipelines * self.num_stages

    @property
    def num_chains(self) -> int:
        """The micro-batches of all pipelines; each runs through every stage as one chain of ops."""
        return self.num_pipelines * self.num_microbatches

    @property
    def ranges(self) -> str:
        """The numbers of the pipelines and stages, as errors name them."""
        return f"pipelines are 0 to {self.num_pipelines - 1}, stages 0 to {self.num_stages - 1}"

    def __contains__(self, worker: Worker) -> bool:
        return 0 <= worker.pipeline < self.num_pipelines and 0 <= worker.stage < self.num_stages

    def workers(self) -> Iterable[Worker]:
        return (Worker(p, s) for p in range(self.num_pipelines) for s in range(self.num_stages))


@dataclass(frozen=True, slots=True)
class Cluster:
    """A shape and its dead workers.

    Raises:
        UserError: A dead worker is not in the shape, or a stage has no live worker.

    Example:
        >>> Cluster(Shape(3, 4, 6), frozenset({Worker(1, 2)})).live_pipelines(2)
        [0, 2]
    """

    shape: Shape
    failed: frozenset[Worker] = frozenset()

    def __post_init__(self) -> None:
        for worker in sorted(self.failed):
            if worker not in self.shape:
                raise UserError(f"{worker} is not a worker of this cluster: {self.shape.ranges}")
        pipelines = self.shape.num_pipelines
        for stage, num in enumerate(self.num_failed):
            if num == pipelines:
                raise UserError(
                    f"stage {stage} has no live worker: all {pipelines} of its peers failed, so its parameters are gone; "
                    f"restart from a checkpoint or leave one of W0_{stage} to W{pipelines - 1}_{stage} alive"
                )

    @staticmethod
    def of(shape: Shape, failed: Iterable[Worker]) -> "Cluster":
        """Make a cluster from a list of failures, refusing duplicates."""
        seen: set[Worker] = set()
        for worker in failed:
            if worker in seen:
                raise UserError(f"{worker} is named as failed twice: name each failed worker once")
            seen.add(worker)
        return Cluster(shape, frozenset(seen))

    @property
    def num_failed(self) -> tuple[int, ...]:
        """Dead workers at each stage."""
        counts = [0] * self.shape.num_stages
        for worker in self.failed:
            counts[worker.stage] += 1
        return tuple(counts)

    def is_live(self, worker: Worker) -> bool:
        return worker not in self.failed

    def live_pipelines(self, stage: int) -> list[int]:
        """The pipelines whose worker of `stage` is alive: the peers that share the stage's micro-batches."""
        return [p for p in range(self.shape.num_pipelines) if Worker(p, stage) not in self.failed]

    def num_live(self, stage: int) -> int:
        return self.shape.num_pipelines - self.num_failed[stage]

    def live_workers(self) -> list[Worker]:
        return [worker for worker in self.shape.workers() if worker not in self.failed]
