"""PlanSource, the protocol that supplies plans to a running job, and PlanFolder, a source that reads plan files.

A source is asked with the set of dead workers. It may return a plan whose dead workers are others, as many as there are: then
live workers change place. A change between peers of a stage costs nothing, because peers hold the same state; a change to
another stage needs a copy of that stage's state. `planner.live_planner.Planner` is the source that plans; `PlanFolder` serves
machines without the planning libraries.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import FileProblem, ForeignPlan, UserError
from recycle.core.plans.packed_plan import pack_plan
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import row_programs
from recycle.core.plans.rules import check
from recycle.core.plans.steady_period import Speeds

_PLAN_FILE = re.compile(r"plan-(none|W\d+_\d+(?:\+W\d+_\d+)*)\.json")


@dataclass(frozen=True, slots=True)
class PlanTexts:
    """A plan as JSON and packed, and the program of each of its rows as JSON."""

    plan: str
    packed: str
    programs: Mapping[Worker, str]


@dataclass(frozen=True, slots=True)
class PlanAssignment:
    """A plan, the live worker that runs each of its rows, and one sentence why.

    `places` maps each row of the plan, which is the worker's new place, to the place that the worker has now. `written` has the
    texts of the plan, if they were made before they are needed.
    """

    plan: Plan
    places: Mapping[Worker, Worker]
    reason: str
    written: PlanTexts | None = None

    def __post_init__(self) -> None:
        assert set(self.places) == set(self.plan.problem.cluster.live_workers()), "every live row has a worker, and no other has"
        assert len(set(self.places.values())) == len(self.places), "no worker runs two rows"

    def texts(self) -> PlanTexts:
        """The texts of the plan; for thousands of workers it takes seconds to make them."""
        if self.written is not None:
            return self.written
        programs = {worker: program.dumps() for worker, program in row_programs(self.plan).items()}
        return PlanTexts(self.plan.dumps(), pack_plan(self.plan), programs)

    def with_texts(self) -> "PlanAssignment":
        return replace(self, written=self.texts())

    @property
    def moves(self) -> tuple[tuple[Worker, Worker], ...]:
        """The changes of place, as (from, to)."""
        return tuple((now, place) for place, now in sorted(self.places.items()) if now != place)

    @property
    def copies(self) -> tuple[tuple[Worker, Worker], ...]:
        """The moves that need the state of another stage."""
        return tuple((now, place) for now, place in self.moves if now.stage != place.stage)


class PlanSource(Protocol):
    """Supplies a plan for any set of dead workers."""

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        """Return the plan for the case that the places `failed` are empty.

        Raises `NoWorkerLeft` if the live workers cannot hold every stage.
        """


@runtime_checkable
class SpeedAwareSource(PlanSource, Protocol):
    """A source that can plan for workers of different speeds."""

    def at_speeds(self, speeds: Speeds) -> PlanSource:
        """Return the source of plans for these speeds of workers at their present places; the speed of all others is 1."""


class RunLayers(NamedTuple):
    """The layers that the stages of a running job have, and its mean time between failures, if it is known.

    `counts` has the number of layers that are each stage's own; it is empty if layers cannot move.
    """

    counts: tuple[int, ...]
    mean_time_us: int | None = None


@runtime_checkable
class LayerMovingSource(PlanSource, Protocol):
    """A source that can plan with other layers for the stages, where it pays to transfer their state."""

    def at_layers(self, layers: RunLayers) -> PlanSource:
        """Return the source of plans for a job whose stages have these layers now, and may have others in an answer."""


class NoWorkerLeft(UserError):
    """Fewer live workers than stages: the job waits until one comes back. `stages` are those without a live worker."""

    def __init__(self, stages: Sequence[int], num_live: int, num_stages: int) -> None:
        self.stages, self.num_live, self.num_stages = tuple(stages), num_live, num_stages
        names = f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
        live = "1 live worker" if num_live == 1 else f"{num_live} live workers"
        super().__init__(
            f"no worker is left for {names}: {live} cannot hold {num_stages} stages; start {num_stages - num_live} more, "
            "and training goes on"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return NoWorkerLeft, (self.stages, self.num_live, self.num_stages)


def num_live_at(shape: Shape, failed: Collection[Worker]) -> list[int]:
    """Return the number of live workers at each stage, 0 included; raises `NoWorkerLeft` if there are fewer than stages."""
    live = [shape.num_pipelines] * shape.num_stages
    for worker in sorted(failed):
        if worker not in shape:
            raise UserError(f"{worker} is not a worker of this cluster: {shape.ranges}")
        live[worker.stage] -= 1
    if sum(live) < shape.num_stages:
        raise NoWorkerLeft([stage for stage, num in enumerate(live) if num == 0], sum(live), shape.num_stages)
    return live


def places_for(planned: Cluster, failed: frozenset[Worker]) -> dict[Worker, Worker]:
    """Give each live row of a plan a live worker with the fewest changes of stage: its own, else a spare peer, else any spare.

    `failed` may be all workers of a stage, but it is as many as the plan has dead.
    """
    assert len(planned.failed) == len(failed), f"a plan for {len(planned.failed)} dead cannot be run with {len(failed)} dead"
    spare = sorted(planned.failed - failed)
    empty = sorted(failed - planned.failed)
    places = {row: row for row in planned.live_workers() if row not in failed}
    for row in empty:
        peer = next((worker for worker in spare if worker.stage == row.stage), None)
        if peer is not None:
            places[row] = peer
            spare.remove(peer)
    return places | dict(zip((row for row in empty if row not in places), spare, strict=True))


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """A folder of plan files, each named by its dead workers: `plan-none.json`, `plan-W1_2.json`, `plan-W0_0+W1_2.json`."""

    folder: Path

    def path(self, failed: frozenset[Worker]) -> Path:
        """Return the file name for these dead workers. A file with the names in another order is found, too."""
        return self.folder / f"plan-{names_of(failed, '+')}.json"

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        files = self._files()
        if files and failed not in files:
            num_live_at(Plan.load(min(files.values())).problem.shape, failed)
        if failed not in files:
            raise FileProblem(
                f"{self.folder} has no plan for {names_of(failed)} dead: plan for that with --fail, and save it as "
                f"{self.path(failed).name}"
            )
        plan = Plan.load(files[failed])
        if violations := check(plan):
            raise FileProblem(f"{files[failed]} is not a legal plan: {violations[0]}; plan again")
        num_live_at(plan.problem.shape, failed)
        planned = plan.problem.cluster
        if len(planned.failed) != len(failed):
            raise ForeignPlan(f"the plan {files[failed]} has {names_of(planned.failed)} dead, which are not as many: plan again")
        where = "nobody moves" if planned.failed == failed else f"its dead are {names_of(planned.failed)}, so that others move"
        return PlanAssignment(plan, places_for(planned, failed), f"the plan {files[failed]}; {where}")

    def _files(self) -> dict[frozenset[Worker], Path]:
        """Return the plan files by dead workers. Read every time, so that a plan can be added while a job waits for it."""
        files: dict[frozenset[Worker], Path] = {}
        for path in sorted(self.folder.glob("plan-*.json"), reverse=True):
            if match := _PLAN_FILE.fullmatch(path.name):
                names = match[1].split("+") if match[1] != "none" else []
                files[frozenset(map(Worker.parse, names))] = path
        return files


def names_of(workers: Collection[Worker], joint: str = ", ") -> str:
    """Return the workers' names in order, or `none`."""
    return joint.join(map(str, sorted(workers))) or "none"
