"""The campaign: systems through traces, all of them through the same ones, side by side, each answer kept.

A case is answered once: its record lies in the cache under a name made from all that it depends on.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from recycle.core.errors import FileProblem
from recycle.core.events.record import Event, Spell, read_record, write_record
from recycle.core.events.trace import Trace, live_counts
from recycle.core.release import source_digest
from recycle.host.parallel_map import parallel_map
from recycle.sim.campaign.placement import events
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.job import SimulatedJob
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS, SystemContext, parse_systems


@dataclass(frozen=True, slots=True)
class Case:
    """One system in one setting through one trace."""

    system: str
    setting: SystemContext
    trace: Trace

    @property
    def path(self) -> Path | None:
        """Where the answer is kept; None if nothing is."""
        folder = self.setting.folder
        if folder is None:
            return None
        job, constants = asdict(self.setting.job), asdict(self.setting.constants)
        text = json.dumps([source_digest(), self.system, job, constants, repr(self.trace)], sort_keys=True)
        return folder / f"course-{hashlib.sha256(text.encode()).hexdigest()[:24]}.jsonl"


def simulate(
    job: SimulatedJob, trace: Trace, systems: str = "all", constants: Constants | None = None, folder: Path | None = None
) -> dict[str, list[Event]]:
    """Return the record of every system through `trace`; plans and answers are kept in `folder`, if there is one."""
    setting = SystemContext(job, constants or Constants.for_model(job.model.num_parameters), folder)
    names = parse_systems(systems)
    return dict(zip(names, run([Case(name, setting, trace) for name in names]), strict=True))


def run(cases: Sequence[Case], tick: Callable[[int], None] = lambda done: None) -> list[list[Event]]:
    """Return the record of every case; those that are not kept yet are run in parallel."""
    for case in cases:
        deque(events(case.trace, case.setting.job.shape, 0), maxlen=0)  # refuses nodes that the cluster cannot have
    known = {number: record for number, case in enumerate(cases) if (record := _kept(case)) is not None}
    missing = [number for number in range(len(cases)) if number not in known]
    _prepare([cases[number] for number in missing])
    tick(len(known))
    # Following a trace takes a fraction of a second; starting a process takes more than that.
    num_processes = None if len(missing) > 50 else 1
    records = parallel_map(_run_one, [cases[number] for number in missing], lambda done: tick(len(known) + done), num_processes)
    known |= dict(zip(missing, records, strict=True))
    return [known[number] for number in range(len(cases))]


def _prepare(cases: Sequence[Case]) -> None:
    """Plan in parallel what ReCycle will ask for; one after another would use one core."""
    for case in cases:
        if case.system == "recycle" and case.setting.constants.recycle.moves:
            num_nodes = case.setting.job.num_nodes
            fewest = min(count for _, count in live_counts(case.trace))
            num_stages = case.setting.job.shape.num_stages
            most_failures = min(num_nodes - min(fewest, num_nodes), num_nodes - num_stages)
            case.setting.timings.prepare(most_failures)


def _run_one(case: Case) -> list[Event]:
    mtbf_us = case.trace.end_us // max(1, case.trace.num_outages)
    system = SYSTEMS[case.system](replace(case.setting, mtbf_us=mtbf_us))
    record = simulate_trace(system, case.trace, case.setting.job.shape, case.setting.constants.ready_us)
    if case.path:
        write_record(case.path, record)
    return record


def _kept(case: Case) -> list[Event] | None:
    if case.path is None or not case.path.exists():
        return None
    try:
        record = list(read_record(case.path))
        # A record that was cut between two lines can be read, but it does not reach the end.
        covered_us = sum(event.length_us for event in record if isinstance(event, Spell))
    except (FileProblem, TypeError):
        return None  # a broken file is made again
    return record if covered_us == case.trace.end_us else None
