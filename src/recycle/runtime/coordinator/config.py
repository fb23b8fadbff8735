"""`CoordinatorConfig`, with which a coordinator process starts, and the notices that it sends to its launcher."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from recycle.control.net.tls import TlsFiles
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.failure_script import Injection
from recycle.core.events.record import Event
from recycle.core.plans.plan_source import PlanAssignment, PlanSource
from recycle.core.profile import Profile
from recycle.runtime.coordinator.ledger.trained import Trained
from recycle.runtime.options import CheckpointOptions, RunFolderOptions

JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """The part of a job that its coordinator needs. Without a source of plans, the first death ends the job.

    `folder` is the run folder, if there is one. `deaths` is the file into which injected kills write their time, `injections` say
    when the coordinator kills itself. `about` describes the job to every worker that joins. `stops_early` says that
    the job was asked to stop before this coordinator replaced another. If it `follows_speeds`, plans change with those of its
    workers. If it `moves_layers`, plans may give stages other layers. `patience` and `time_limit_s` say when the job ends early.
    """

    job: str
    token: str
    lease_s: float
    initial: PlanAssignment
    source: PlanSource | None
    num_steps: int
    num_samples: int
    memory_profile: Profile
    fingerprint: Mapping[str, Any]
    begin_us: int
    journal: Path
    folder: Path | None = None
    run_folder: RunFolderOptions = field(default_factory=RunFolderOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    patience: int = 0
    time_limit_s: float | None = None
    deaths: Path | None = None
    injections: Sequence[Injection] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    stops_early: bool = False
    follows_speeds: bool = True
    moves_layers: bool = False
    tls: TlsFiles | None = None


@dataclass(frozen=True, slots=True)
class EventsRecorded:
    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class FirstEpochFormed:
    """All workers of the first epoch have joined."""


@dataclass(frozen=True, slots=True)
class WaitingForWorkers:
    """Training cannot go on until a worker joins, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceWorker:
    """The worker at a place was given up because of its weights: another one must copy them from a peer."""

    place: Worker


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker died, and there is no source of plans without it."""

    pid: int
    text: str


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The job has failed and is over; unless `is_over`, only this coordinator has, and another one may go on with the job."""

    problem: UserError
    is_over: bool = True


@dataclass(frozen=True, slots=True)
class JobDone:
    trained: Trained


class EventSink(Protocol):
    """The receiver of the coordinator's notices: a pipe to its launcher, or an object of its own process."""

    def send(self, notice: Any, /) -> None: ...


Notice = EventsRecorded | FirstEpochFormed | WaitingForWorkers | ReplaceWorker | WorkerLost | JobFailed | JobDone
