"""Where plans come from while a job runs: whoever is dead, a source says what is played, and who plays which row.

A source is asked with the seats that nobody sits on. It may answer with a plan whose dead are elsewhere: then live workers change
seats. Among peers of a stage that costs nothing, for they hold the same state; to another stage it takes a copy of that stage's.
The planner is one source; `FixedPlans` and `PlanFolder` are sources for machines that have no planning libraries.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import FileProblem, ForeignPlan, UserError
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check

Move = tuple[Worker, Worker]  # from, to
_PLAN_FILE = re.compile(r"plan-(none|W\d+_\d+(?:\+W\d+_\d+)*)\.json")


@dataclass(frozen=True, slots=True)
class PlanAssignment:
    """What to play, who plays it, and one sentence why. `seats` says for each row of the plan where its player sits now."""

    plan: Plan
    seats: Mapping[Worker, Worker]
    reason: str

    def __post_init__(self) -> None:
        assert set(self.seats) == set(self.plan.problem.cluster.live_workers()), "every live row has a player, and no other"
        assert len(set(self.seats.values())) == len(self.seats), "nobody plays two rows"

    @property
    def moves(self) -> tuple[Move, ...]:
        """Who changes seats, as (from, to)."""
        return tuple((now, seat) for seat, now in sorted(self.seats.items()) if now != seat)

    @property
    def copies(self) -> tuple[Move, ...]:
        """Those of the moves that need the state of another stage."""
        return tuple((now, seat) for now, seat in self.moves if now.stage != seat.stage)


class PlanSource(Protocol):
    """Anything that knows what to play."""

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        """Say what is played when these seats are empty; raises `NoWorkerLeft` if those who live cannot hold every stage."""
        ...


class NoWorkerLeft(UserError):
    """Fewer live workers than stages: the job waits until one comes back. `stages` are those that nobody holds."""

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
    """How many workers live at each stage, maybe none; raises `NoWorkerLeft` if they cannot hold every stage, even by moving."""
    live = [shape.num_pipelines] * shape.num_stages
    for worker in sorted(failed):
        if not (worker.pipeline < shape.num_pipelines and worker.stage < shape.num_stages):
            raise UserError(
                f"{worker} is not a worker of this cluster: pipelines are 0 to {shape.num_pipelines - 1}, "
                f"stages 0 to {shape.num_stages - 1}"
            )
        live[worker.stage] -= 1
    if sum(live) < shape.num_stages:
        raise NoWorkerLeft([stage for stage, num in enumerate(live) if num == 0], sum(live), shape.num_stages)
    return live


def seats_for(planned: Cluster, failed: frozenset[Worker]) -> dict[Worker, Worker]:
    """Give each live row a live player with the fewest changes of stage: its own, else a peer to spare, else anybody to spare.

    `failed` may be all workers of a stage, but it is as many as the plan has dead.
    """
    assert len(planned.failed) == len(failed), f"a plan for {len(planned.failed)} dead cannot be played with {len(failed)} dead"
    spare = sorted(planned.failed - failed)
    empty = sorted(failed - planned.failed)
    seats = {row: row for row in planned.live_workers() if row not in failed}
    for row in empty:
        peer = next((worker for worker in spare if worker.stage == row.stage), None)
        if peer is not None:
            seats[row] = peer
            spare.remove(peer)
    return seats | dict(zip((row for row in empty if row not in seats), spare, strict=True))


@dataclass(frozen=True, slots=True)
class FixedPlans:
    """Plans that are there already, by who is dead. A plan may have its dead elsewhere, if it has as many."""

    plans: Mapping[frozenset[Worker], Plan]

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        if (known := next(iter(self.plans.values()), None)) is not None:
            num_live_at(known.problem.shape, failed)
        if failed not in self.plans:
            raise UserError(f"there is no plan for {names_of(failed)} dead: give one, or let a planner make it")
        return _fixed(self.plans[failed], failed, f"the plan for {names_of(failed)} dead")


@dataclass(frozen=True, slots=True)
class PlanFolder:
    """A folder of plan files, each named by who is dead: `plan-none.json`, `plan-W1_2.json`, `plan-W0_0+W1_2.json`."""

    folder: Path

    def path(self, failed: frozenset[Worker]) -> Path:
        """Where the plan for these dead belongs. It is found under its names in another order, too."""
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
        return _fixed(plan, failed, f"the plan {files[failed]}")

    def _files(self) -> dict[frozenset[Worker], Path]:
        """The plan files by who is dead. Read every time, so that a plan can be added while a job waits for it."""
        files: dict[frozenset[Worker], Path] = {}
        for path in sorted(self.folder.glob("plan-*.json"), reverse=True):
            if match := _PLAN_FILE.fullmatch(path.name):
                names = match[1].split("+") if match[1] != "none" else []
                files[frozenset(map(Worker.parse, names))] = path
        return files


def names_of(workers: Collection[Worker], joint: str = ", ") -> str:
    """Their names in order, or `none`."""
    return joint.join(map(str, sorted(workers))) or "none"


def _fixed(plan: Plan, failed: frozenset[Worker], what: str) -> PlanAssignment:
    planned = plan.problem.cluster
    if len(planned.failed) != len(failed):
        raise ForeignPlan(f"{what} has {names_of(planned.failed)} dead, which are not as many: plan again")
    where = "nobody moves" if planned.failed == failed else f"its dead are {names_of(planned.failed)}, so that others move"
    return PlanAssignment(plan, seats_for(planned, failed), f"{what}; {where}")
