"""What a coordinator is told of its job, and what it says of it to whoever started it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from recycle.control.net.handshake import Door
from recycle.core.errors import UserError
from recycle.core.events.failure_script import Injection
from recycle.core.events.record import Event
from recycle.core.plans.plan_source import Answer, PlanSource
from recycle.core.profile import StageProfile
from recycle.runtime.coordinator.ledger.run_folder import Plot
from recycle.runtime.coordinator.ledger.run_ledger import Trained
from recycle.runtime.job import Job

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class Brief:
    """All that a coordinator needs to know of a job. Without a source of plans, the first death ends it."""

    job: str
    token: str
    lease_s: float
    initial: Answer
    source: PlanSource | None
    num_steps: int
    num_samples: int
    profiles: Sequence[StageProfile]
    fingerprint: Mapping[str, Any]
    begin_us: int
    journal: Path
    plot: Plot | None = None
    deaths: Path | None = None
    injections: Sequence[Injection] = ()
    """When the coordinator kills itself, for a test."""
    about: Mapping[str, Any] = field(default_factory=dict)


def brief_of(job: Job, door: Door, source: PlanSource | None, lease_s: float, plot: Plot | None, **more: Any) -> Brief:
    """What a coordinator is told of a job that begins with its plan."""
    seats = {row.worker: row.worker for row in job.plan.rows}
    return Brief(
        job=door.job,
        token=door.token,
        lease_s=lease_s,
        initial=Answer(job.plan, seats, "the plan that the run was started with"),
        source=source,
        num_steps=job.settings.num_steps,
        num_samples=job.samples_per_step,
        profiles=job.profiles(),
        fingerprint=job.fingerprint(),
        plot=plot,
        **more,
    )


@dataclass(frozen=True, slots=True)
class Happened:
    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class Formed:
    """All workers of the first epoch are there."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Training cannot go on until somebody joins."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone, and nobody can take its work over."""

    pid: int
    text: str


@dataclass(frozen=True, slots=True)
class Failed:
    problem: UserError


@dataclass(frozen=True, slots=True)
class Done:
    trained: Trained


class Mouth(Protocol):
    """Whom the coordinator tells: a pipe to its launcher, or a function of its own process."""

    def send(self, said: Any, /) -> None: ...


Said = Happened | Formed | Waiting | Lost | Failed | Done
