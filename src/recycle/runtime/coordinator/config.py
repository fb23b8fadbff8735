"""What a coordinator is told of its job, and what it says of it to whoever started it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from recycle.control.net.handshake import Endpoint
from recycle.core.errors import UserError
from recycle.core.events.failure_script import Injection
from recycle.core.events.record import Event
from recycle.core.plans.plan_source import PlanAssignment, PlanSource
from recycle.core.profile import StageProfile
from recycle.runtime.coordinator.ledger.run_folder import RunFolderOptions
from recycle.runtime.coordinator.ledger.run_ledger import Trained
from recycle.runtime.job import Job

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """All that a coordinator needs to know of a job. Without a source of plans, the first death ends it."""

    job: str
    token: str
    lease_s: float
    initial: PlanAssignment
    source: PlanSource | None
    num_steps: int
    num_samples: int
    profiles: Sequence[StageProfile]
    fingerprint: Mapping[str, Any]
    begin_us: int
    journal: Path
    plot: RunFolderOptions | None = None
    deaths: Path | None = None
    injections: Sequence[Injection] = ()
    """When the coordinator kills itself, for a test."""
    about: Mapping[str, Any] = field(default_factory=dict)


def coordinator_config(
    job: Job, door: Endpoint, source: PlanSource | None, lease_s: float, plot: RunFolderOptions | None, **more: Any
) -> CoordinatorConfig:
    """What a coordinator is told of a job that begins with its plan."""
    seats = {row.worker: row.worker for row in job.plan.rows}
    return CoordinatorConfig(
        job=door.job,
        token=door.token,
        lease_s=lease_s,
        initial=PlanAssignment(job.plan, seats, "the plan that the run was started with"),
        source=source,
        num_steps=job.settings.num_steps,
        num_samples=job.samples_per_step,
        profiles=job.profiles(),
        fingerprint=job.fingerprint(),
        plot=plot,
        **more,
    )


@dataclass(frozen=True, slots=True)
class EventsRecorded:
    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class FirstEpochFormed:
    """All workers of the first epoch are there."""


@dataclass(frozen=True, slots=True)
class WaitingForWorkers:
    """Training cannot go on until somebody joins."""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone, and nobody can take its work over."""

    pid: int
    text: str


@dataclass(frozen=True, slots=True)
class JobFailed:
    problem: UserError


@dataclass(frozen=True, slots=True)
class JobDone:
    trained: Trained


class EventSink(Protocol):
    """Whom the coordinator tells: a pipe to its launcher, or a function of its own process."""

    def send(self, said: Any, /) -> None: ...


Notice = EventsRecorded | FirstEpochFormed | WaitingForWorkers | WorkerLost | JobFailed | JobDone
