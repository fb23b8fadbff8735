"""Fail-slow: slow workers on the clusters of `scale`, and a day at published rates with slow workers, slow links and drift."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recycle.core.cluster import Shape
from recycle.core.events.trace import Slowdown, Trace
from recycle.sim import failure_traces
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.campaign.fault_free_rates import FaultFreeRates, fault_free_rates
from recycle.sim.campaign.mean_interval import MeanInterval, mean_interval
from recycle.sim.campaign.placement import membership_changes
from recycle.sim.policy import Members
from recycle.sim.reproduce.experiment_result import BarPanel, ExperimentResult
from recycle.sim.reproduce.scale import (
    CLUSTERS,
    GPU,
    MICROBATCH,
    TENSOR_PARALLEL,
    ScaleCluster,
    interval_facts,
    mean_rate,
    scale_context,
    trace_rate,
)
from recycle.sim.reproduce.share_tables import ShareTables, fault_free_table, rate_facts
from recycle.sim.systems.registry import SYSTEMS, SystemContext

SPEED = 0.6
SHARES = (0.01, 0.05)
NUM_DRAWS = 3
COMPARED = (
    "fault-scaled",
    "recycle",
    "recycle-rerouting",
    "resihp",
    "elaswave",
    "odyssey",
    "oobleck",
    "oobleck-zb",
    "replica-drop",
    "replica-drop-zb",
)
# The clusters of the day, by their numbers in `CLUSTERS` and among the shapes there.
DAYS = ((0, 0), (3, 1))
HOURS = 24
DRIFT_EVERY_US, DRIFT_SLOWEST = 3_600_000_000, 0.9
KINDS = ("slow workers", "slow links", "drift")

ASSUMPTIONS = (
    f"clusters as in `recycle reproduce scale`: {GPU} GPUs, {TENSOR_PARALLEL} a worker; nobody is dead",
    f"first table: so many workers compute at {SPEED:.0%}, rounded up, {NUM_DRAWS} draws; all systems have had time to react",
    "± is half of the 90 % interval of the mean (Student's t over the draws), where it is not below 0.0005; a day is one draw",
    "recycle plans with the speeds, resihp repartitions whole layers (its bound, not a plan); all others wait for the slowest",
    "of own: of the system itself with nobody slow or dead; of best: of the best schedule of anybody; -zb: with zero bubble",
    f"the day: {HOURS} h; each worker is slow once in 50 h for 10 min at 60 %, its link once in 10 h for 24 min at 50 %",
    "published are 2 % and 40 % of jobs: taken as jobs of one and of four nodes for an hour; the speeds are assumptions",
    f"drift: every hour each worker has a new speed, from {DRIFT_SLOWEST:.0%} to 100 %",
    "recycle and resihp notice after ten iterations, and need time for new plans, groups and copies",
)


def run_fail_slow(folder: Path | None) -> ExperimentResult:
    """Return the steady throughput with slow workers, and that of a day with each kind of slowness."""
    facts: dict[str, Any] = {}
    rates: dict[str, FaultFreeRates] = {}
    intervals: dict[str, Any] = {}
    steady, days = ShareTables(["cluster", "slow"], COMPARED), ShareTables(["cluster, a day with"], COMPARED)
    panels = []
    for cluster in CLUSTERS:
        for num_pipelines, num_stages in cluster.shapes:
            name = f"{cluster.model}, {num_pipelines} x {num_stages}"
            context = _context(cluster.model, _shape(cluster, num_pipelines, num_stages), folder)
            rates[name] = found = fault_free_rates(context, COMPARED)
            throughputs = _steady(context)
            facts[name] = {system: [round(one.mean / found.one_f_one_b, 6) for one in own] for system, own in throughputs.items()}
            intervals[name] = interval_facts(throughputs, found)
            for number, share in enumerate(SHARES):
                steady.add([name, f"{share:.0%}"], {system: own[number] for system, own in throughputs.items()}, found)
            panels.append(BarPanel(name, [f"{share:.0%}" for share in SHARES], facts[name]))
    for at, shape_at in DAYS:
        cluster = CLUSTERS[at]
        num_pipelines, num_stages = cluster.shapes[shape_at]
        context = _context(cluster.model, _shape(cluster, num_pipelines, num_stages), folder)
        found = rates[f"{cluster.model}, {num_pipelines} x {num_stages}"]
        for kind in KINDS:
            name = f"{cluster.model}, {num_pipelines} x {num_stages}: {kind}"
            day = _day(context, kind)
            facts[name] = {system: round(rate / found.one_f_one_b, 6) for system, rate in day.items()}
            days.add([name], {system: mean_interval([rate]) for system, rate in day.items()}, found)
    facts["intervals"] = intervals
    facts["fault-free"] = {name: rate_facts(found) for name, found in rates.items()}
    tables = (
        fault_free_table(rates, COMPARED, "cluster"),
        *steady.tables(f"Steady throughput with workers at {SPEED:.0%}"),
        *days.tables("A day"),
    )
    title = "Slow workers and links"
    return ExperimentResult("slow", title, ASSUMPTIONS, tables, panels, "share of fault-free 1F1B", "slow workers", facts)


def _shape(cluster: ScaleCluster, num_pipelines: int, num_stages: int) -> Shape:
    return Shape(num_pipelines, num_stages, cluster.batch // num_pipelines // MICROBATCH)


def _context(model: str, shape: Shape, folder: Path | None) -> SystemContext:
    return scale_context(f"{model},microbatch={MICROBATCH}", GPU, shape, folder)


def _steady(context: SystemContext) -> dict[str, list[MeanInterval]]:
    """The throughput of each system with each share of slow workers."""
    shape = context.job.shape
    draws = [slow_members(shape, -(-round(share * 1000) * shape.num_workers // 1000)) for share in SHARES]
    return {name: [mean_rate(SYSTEMS[name](context), each) for each in draws] for name in COMPARED}


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
    """The throughput of each system over a day."""
    shape = context.job.shape
    trace = day_trace(failure_traces.worker_names(shape.num_pipelines, shape.num_stages), kind)
    records = run_cases([Case(name, context, trace) for name in COMPARED])
    return {name: trace_rate(record, trace) for name, record in zip(COMPARED, records, strict=True)}
