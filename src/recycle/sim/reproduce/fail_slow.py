"""Fail-slow: slow workers on the clusters of `scale`, and a day at published rates with slow workers, slow links and drift."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recycle.core.cluster import Shape
from recycle.core.events.record import Spell
from recycle.core.events.trace import Slowdown, Trace
from recycle.sim import failure_traces
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.campaign.placement import membership_changes
from recycle.sim.policy import Members
from recycle.sim.reproduce.experiment_result import BarPanel, ExperimentResult, ResultTable
from recycle.sim.reproduce.scale import CLUSTERS, GPU, MICROBATCH, TENSOR_PARALLEL, mean_rate, scale_context
from recycle.sim.systems.registry import SYSTEMS, SystemContext

SPEED = 0.6
SHARES = (0.01, 0.05)
NUM_DRAWS = 3
COMPARED = ("fault-scaled", "recycle", "recycle-rerouting", "resihp", "elaswave", "odyssey", "oobleck", "replica-drop")
# The clusters of the day, by their numbers in `CLUSTERS` and among the shapes there.
DAYS = ((0, 0), (3, 1))
HOURS = 24
DRIFT_EVERY_US, DRIFT_SLOWEST = 3_600_000_000, 0.9
KINDS = ("slow workers", "slow links", "drift")

ASSUMPTIONS = (
    f"clusters as in `recycle reproduce scale`: {GPU} GPUs, {TENSOR_PARALLEL} a worker; nobody is dead",
    f"first table: so many workers compute at {SPEED:.0%}, rounded up, {NUM_DRAWS} draws; all systems have had time to react",
    "recycle plans with the speeds, resihp repartitions whole layers (its bound, not a plan); all others wait for the slowest",
    f"the day: {HOURS} h; each worker is slow once in 50 h for 10 min at 60 %, its link once in 10 h for 24 min at 50 %",
    "published are 2 % and 40 % of jobs: taken as jobs of one and of four nodes for an hour; the speeds are assumptions",
    f"drift: every hour each worker has a new speed, from {DRIFT_SLOWEST:.0%} to 100 %",
    "recycle and resihp notice after ten iterations, and need time for new plans, groups and copies",
)


def run_fail_slow(folder: Path | None) -> ExperimentResult:
    """Return the steady throughput with slow workers, and that of a day with each kind of slowness."""
    facts: dict[str, Any] = {}
    rows = [["cluster", "slow", *COMPARED]]
    panels = []
    for cluster in CLUSTERS:
        for num_pipelines, num_stages in cluster.shapes:
            shape = Shape(num_pipelines, num_stages, cluster.batch // num_pipelines // MICROBATCH)
            name = f"{cluster.model}, {num_pipelines} x {num_stages}"
            facts[name] = shares = _steady(_context(cluster.model, shape, folder))
            for number, share in enumerate(SHARES):
                rows.append([name, f"{share:.0%}", *(f"{shares[system][number]:.3f}" for system in COMPARED)])
            panels.append(BarPanel(name, [f"{share:.0%}" for share in SHARES], shares))
    days = [["cluster, a day with", *COMPARED]]
    for at, shape_at in DAYS:
        cluster = CLUSTERS[at]
        num_pipelines, num_stages = cluster.shapes[shape_at]
        shape = Shape(num_pipelines, num_stages, cluster.batch // num_pipelines // MICROBATCH)
        for kind in KINDS:
            name = f"{cluster.model}, {num_pipelines} x {num_stages}: {kind}"
            facts[name] = found = _day(_context(cluster.model, shape, folder), kind)
            days.append([name, *(f"{found[system]:.3f}" for system in COMPARED)])
    tables = (
        ResultTable(f"Steady throughput with workers at {SPEED:.0%}, as a share of fault-free 1F1B", rows),
        ResultTable("A day, as a share of fault-free 1F1B", days),
    )
    title = "Slow workers and links"
    return ExperimentResult("slow", title, ASSUMPTIONS, tables, panels, "share of fault-free 1F1B", "slow workers", facts)


def _context(model: str, shape: Shape, folder: Path | None) -> SystemContext:
    return scale_context(f"{model},microbatch={MICROBATCH}", GPU, shape, folder)


def _fault_free(context: SystemContext) -> float:
    return context.job.samples_per_step * 1e6 / context.baseline.period_us


def _steady(context: SystemContext) -> dict[str, list[float]]:
    """The throughput of each system with each share of slow workers, relative to fault-free 1F1B."""
    shape, fault_free = context.job.shape, _fault_free(context)
    draws = [slow_members(shape, -(-round(share * 1000) * shape.num_workers // 1000)) for share in SHARES]
    return {name: [round(mean_rate(SYSTEMS[name](context), each) / fault_free, 6) for each in draws] for name in COMPARED}


def slow_members(shape: Shape, num_slow: int) -> list[Members]:
    """Random draws of so many slow workers, the same for all systems."""
    nodes, draws = failure_traces.worker_names(shape.num_pipelines, shape.num_stages), []
    for seed in range(NUM_DRAWS):
        chosen = failure_traces.periodic_trace(nodes, 1000, 1000 * (num_slow + 1), seed).later
        slow = tuple(Slowdown(0, 2000, change.node, SPEED) for change in chosen)
        first = next(membership_changes(failure_traces.quiet_trace(nodes, 1000).with_slowdowns(slow), shape, 0))
        draws.append(first.members)
    return draws


def day_trace(nodes: Sequence[str], kind: str, seed: int = 1) -> Trace:
    """A day on which no node leaves, with slowness of one kind."""
    end_us = HOURS * 3_600_000_000
    if kind == "drift":
        slow = failure_traces.drift_spells(nodes, DRIFT_EVERY_US, DRIFT_SLOWEST, end_us, seed)
    elif kind == "slow links":
        slow = failure_traces.slow_spells(nodes, failure_traces.PUBLISHED_SLOW_LINKS, end_us, seed, is_link=True)
    else:
        slow = failure_traces.slow_spells(nodes, failure_traces.PUBLISHED_SLOW, end_us, seed)
    return failure_traces.quiet_trace(nodes, end_us).with_slowdowns(slow)


def _day(context: SystemContext, kind: str) -> dict[str, float]:
    """The throughput of each system over a day, relative to fault-free 1F1B."""
    shape = context.job.shape
    trace = day_trace(failure_traces.worker_names(shape.num_pipelines, shape.num_stages), kind)
    records = run_cases([Case(name, context, trace) for name in COMPARED])
    done = [sum(event.samples for event in record if isinstance(event, Spell)) for record in records]
    fault_free = _fault_free(context) * trace.end_us / 1e6
    return {name: round(samples / fault_free, 6) for name, samples in zip(COMPARED, done, strict=True)}
