"""`simulate` and `run_cases`: training systems over failure traces, in parallel, with a cache of their records.

The record of a case is cached in a file whose name is a digest of everything that the record depends on.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from recycle.core.errors import FileProblem
from recycle.core.events.record import Event, Spell
from recycle.core.events.record_file import read_record, write_record
from recycle.core.events.trace import Trace, live_counts
from recycle.core.release import source_digest
from recycle.host.parallel_map import parallel_map
from recycle.sim.campaign.placement import membership_changes
from recycle.sim.campaign.spares import spare_names, with_spares
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.iteration_times import IterationTimes
from recycle.sim.job import SimulatedJob
from recycle.sim.shared_layer_choice import expected_dead
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS, SystemContext, parse_systems

# The iteration times of the systems that make plans for a number of dead workers.
TIMINGS_OF: dict[str, Callable[[SystemContext], IterationTimes]] = {
    "recycle": lambda context: context.cut_timings,
    "recycle-rerouting": lambda context: context.timings,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One system, made for one context, and one trace."""

    system: str
    context: SystemContext
    trace: Trace

    @property
    def path(self) -> Path | None:
        """The cache file of the record; None without a cache."""
        folder = self.context.folder
        if folder is None:
            return None
        job, constants = asdict(self.context.job), asdict(self.context.constants)
        shared = self.context.shared_layers, self.context.num_dead
        given = [source_digest(), self.system, job, constants, shared, repr(self.trace)]
        text = json.dumps(given, sort_keys=True)
        return folder / f"simulation-{hashlib.sha256(text.encode()).hexdigest()[:24]}.jsonl"


def simulate(
    job: SimulatedJob,
    trace: Trace,
    systems: str = "all",
    constants: Constants | None = None,
    folder: Path | None = None,
    shared_layers: int | None = None,
    spares: int = 0,
) -> dict[str, list[Event]]:
    """Simulate training systems over one failure trace.

    Args:
        job: The model, the GPUs and the shape, from `simulated_job`.
        trace: The nodes that leave and join, and when.
        systems: Names of systems, separated by commas, or `all`; `recycle simulate --help` lists them.
        constants: Pauses and checkpoint costs of all systems; the default depends on the size of the model.
        folder: Where plans and records are cached; nothing is cached without it.
        shared_layers: How many layers neighbouring stages of ReCycle share; by default the best of 0 to 2 by plans for as many
            dead workers as the trace has.
        spares: Workers beside those of the trace that wait, and take the places of failed ones when they are ready.

    Returns:
        The record of each system, by name: its events from the start to the end of the trace. `recycle.measure` sums one up.

    Raises:
        UserError: A system is unknown or named twice, or the trace has a worker that the cluster does not have.

    Example:
        >>> import recycle
        >>> job = recycle.simulated_job("layers=4,hidden=512,heads=8,sequence=512", "a100-80", 3, 2, 4)
        >>> nodes = "".join(f"0,add,node{number}\\n" for number in range(6))
        >>> trace = recycle.Trace.parse(nodes + "600000,remove,node3\\n# end 3600000")
        >>> records = recycle.simulate(job, trace, "recycle,ideal")
        >>> runs = {name: recycle.measure(record) for name, record in records.items()}
        >>> 0 < runs["recycle"].throughput < runs["ideal"].throughput
        True
    """
    constants = constants or Constants.for_model(job.model.num_parameters)
    names = parse_systems(systems)
    trace = with_spares(trace, job.num_nodes, spare_names(spares))
    num_dead = expected_dead([trace], job.num_nodes)
    context = SystemContext(job, constants, folder, shared_layers=shared_layers, num_dead=num_dead)
    return dict(zip(names, run_cases([Case(name, context, trace) for name in names]), strict=True))


def run_cases(cases: Sequence[Case], tick: Callable[[int], None] = lambda done: None) -> list[list[Event]]:
    """Return the record of every case, from the cache or by simulation; `tick` is called with the number of records so far."""
    for case in cases:
        list(membership_changes(case.trace, case.context.job.shape, 0))  # refuses workers that the cluster does not have
    known = {number: record for number, case in enumerate(cases) if (record := _cached(case)) is not None}
    missing = [number for number in range(len(cases)) if number not in known]
    _prepare([cases[number] for number in missing])
    tick(len(known))
    # The simulation of a trace takes less time than the start of a process.
    num_processes = None if len(missing) > 50 else 1
    records = parallel_map(
        _simulate_case, [cases[number] for number in missing], lambda done: tick(len(known) + done), num_processes
    )
    known |= dict(zip(missing, records, strict=True))
    return [known[number] for number in range(len(cases))]


def _prepare(cases: Sequence[Case]) -> None:
    """Make the plans of ReCycle in parallel; a simulation alone would make them one after another."""
    for case in cases:
        if case.system in TIMINGS_OF and case.context.constants.recycle.moves:
            num_nodes = case.context.job.num_nodes
            num_stages = case.context.job.shape.num_stages
            # With fewer nodes than stages the job waits, and needs no plan.
            fewest = min((count for _, count in live_counts(case.trace) if count >= num_stages), default=num_nodes)
            most_failures = max(0, num_nodes - fewest)
            TIMINGS_OF[case.system](case.context).prepare(range(most_failures + 1))


def _simulate_case(case: Case) -> list[Event]:
    mtbf_us = case.trace.end_us // max(1, case.trace.num_outages)
    system = SYSTEMS[case.system](replace(case.context, mtbf_us=mtbf_us))
    constants = case.context.constants
    record = simulate_trace(system, case.trace, case.context.job.shape, constants.ready_us, constants.hang_us_of(case.system))
    if case.path:
        write_record(case.path, record)
    return record


def _cached(case: Case) -> list[Event] | None:
    if case.path is None or not case.path.exists():
        return None
    try:
        record = list(read_record(case.path))
        # A file that was cut between two lines can be read, but its record does not reach the end of the trace.
        covered_us = sum(event.length_us for event in record if isinstance(event, Spell))
    except (FileProblem, TypeError):
        return None  # a damaged file is replaced
    return record if covered_us == case.trace.end_us else None
