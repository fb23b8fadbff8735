"""What `recycle simulate --seeds N` prints: means over seeds with 90 % intervals, as text and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from recycle.core.units import format_duration
from recycle.report.record.metrics import Metrics
from recycle.report.record.tables import aligned, seed_table
from recycle.sim.campaign.fault_free_rates import FaultFreeRates
from recycle.sim.campaign.seed_results import seed_shares

SeedRuns = Mapping[str, Sequence[Metrics]]
"""The metrics of every system, for each seed."""


def seed_text(runs: SeedRuns, rates: FaultFreeRates) -> list[str]:
    """The table of means, under what its intervals are."""
    first = next(iter(runs.values()))
    failures = [run.num_failures for run in first]
    shares = {name: list(seed_shares(name, [run.throughput for run in own], rates).values()) for name, own in runs.items()}
    time, counts = format_duration(first[0].total_us), f"{min(failures)} to {max(failures)} failures"
    return [
        f"means of {len(first)} seeds, {time} each, with {counts}",
        "± is half of the 90 % interval of the mean (Student's t over seeds)",
        "",
        aligned(seed_table(runs, shares)),
    ]


def seed_json(runs: SeedRuns, rates: FaultFreeRates) -> dict[str, Any]:
    """For each system the means with their intervals, and the numbers of every seed."""
    found = {}
    for name, own in runs.items():
        shares = seed_shares(name, [run.throughput for run in own], rates)
        means = {key: None if interval is None else interval.to_json() for key, interval in shares.items()}
        found[name] = {**means, "own_fault_free": round(rates.own[name], 6), "runs": [run.to_json() for run in own]}
    return found
