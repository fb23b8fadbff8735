"""The throughput table of the paper: 32 GPUs with a failure every 6 h, 2 h and 30 min, from one set of assumptions.

Only the fault-free throughput of each model is taken from the paper. Nothing is fitted to a single cell: every assumption holds
for all models and intervals of a system.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recycle.core.cluster import Shape
from recycle.core.events.record import Spell
from recycle.core.events.trace import Trace
from recycle.host.parallel_map import parallel_map
from recycle.sim import failure_traces
from recycle.sim.campaign.fault_free_rates import FaultFreeRates, fault_free_rates
from recycle.sim.campaign.mean_interval import MeanInterval, mean_interval
from recycle.sim.campaign.trace_simulation import simulate_trace
from recycle.sim.iteration_times import IterationTimes, one_f_one_b_time
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import Members, System
from recycle.sim.reproduce.experiment_result import BarPanel, ExperimentResult, ResultTable
from recycle.sim.reproduce.published_numbers import INTERVALS_H, TABLE, PublishedRow
from recycle.sim.reproduce.share_tables import rate_facts
from recycle.sim.reproduce.table_readings import (
    DEFAULT,
    FEW_SEEDS,
    READINGS,
    REPRODUCED,
    Cells,
    Found,
    TableReading,
    reading_table,
    table_findings,
)
from recycle.sim.systems.bamboo import Bamboo
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.oobleck.policy import Oobleck
from recycle.sim.systems.recycle import Recycle
from recycle.sim.systems.registry import SystemContext

GPU = "a100-80"
NUM_MICROBATCHES = 128
RUN_HOURS = 6
NUM_SEEDS = 20
SYSTEMS = ("bamboo", "oobleck", "recycle")
# Oobleck's pauses by others than the paper's table: those of its authors' simulator, and what TrainMover's authors measured.
OTHER_PAUSES_S = {
    "oobleck with its authors' own pauses of 3 to 10 s": None,
    "oobleck with pauses of 57 s, as TrainMover measured": 57.0,
}
_OTHERS = {name: name for name in OTHER_PAUSES_S} | {f"recycle, {REPRODUCED}": REPRODUCED, f"recycle, {DEFAULT}": DEFAULT}
# Two numbers for Oobleck's nine cells: a reconfiguration takes a fixed time, and one that grows with the model's state.
OOBLECK_FIXED_S, OOBLECK_BYTES_PER_S = 220.0, 0.30e9

ASSUMPTIONS = (
    f"32 workers as 16 x 2, 8 x 4 and 4 x 8; {NUM_MICROBATCHES} micro-batches in a step for every model, shared by its pipelines",
    "stages differ only in their number of layers: embedding and head are left out",
    f"a run lasts {RUN_HOURS} h; the first worker fails after one interval, the next after another, and none returns",
    "so in the 6 h column the one failure comes with the end, and costs nothing",
    f"who fails is random: means over {NUM_SEEDS} seeds, the same traces for every system; ± is half of the 90 % interval",
    "of own: of the same system with nobody dead, so that fault handling alone counts; of best: of anybody's best schedule",
    "ReCycle runs 1F1B while nobody is dead; dead workers stay where they fell: nobody changes stage",
    "ReCycle's recovery takes the default constants (docs/simulator.md), and the iteration in flight is done again",
    "Oobleck's fault-free job is as fast as the published fault-free one, whatever layout it chooses",
    f"Oobleck reconfigures in {OOBLECK_FIXED_S:g} s plus 18 bytes a parameter at {OOBLECK_BYTES_PER_S / 1e9:g} GB/s",
    "those two numbers are fitted to its nine cells together; shorter ones are in the second table",
    "Bamboo pauses with the default constants, trains in fp32 without flash attention, and is 1.5 times as deep",
)


def run_throughput_table(
    folder: Path | None, tick: Callable[[int], None] = lambda done: None, readings: Mapping[str, TableReading] = READINGS
) -> ExperimentResult:
    """Return our throughput beside the published table; `tick` is called with the number of tasks so far."""
    shared: dict[object, list[str]] = {}
    for name, reading in readings.items():
        shared.setdefault(reading.planned, []).append(name)
    groups = [*([name] for name in (*SYSTEMS[:-1], *OTHER_PAUSES_S)), *shared.values()]
    tasks = [(names, row, folder) for row in TABLE for names in groups]
    found: dict[tuple[str, str], SimulatedRow] = {}
    for (names, row, _), cells in zip(tasks, parallel_map(_simulate_rows, tasks, tick), strict=True):
        found |= {(name, row.model): values for name, values in zip(names, cells, strict=True)}
    found |= {("recycle", row.model): found[REPRODUCED, row.model] for row in TABLE}
    return _result(found, list(readings), {row.model: fault_free(row, folder) for row in TABLE})


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """The throughput at each interval with its interval over seeds, and with nobody dead: nothing if it is out of memory."""

    means: tuple[MeanInterval, ...] = ()
    own: float = 0.0

    @property
    def cells(self) -> Cells:
        return tuple(one.mean for one in self.means) or None


def fault_free(row: PublishedRow, folder: Path | None) -> FaultFreeRates:
    """The fault-free rates of the model: of 1F1B, and of the best schedule of anybody."""
    job = calibrated_job(row, folder)
    return fault_free_rates(SystemContext(job, Constants.for_model(job.model.num_parameters), folder), ())


def _simulate_rows(given: tuple[list[str], PublishedRow, Path | None]) -> list[SimulatedRow]:
    """The mean throughput of each system or reading at each interval, in one process, so that they share their plans."""
    names, published, folder = given
    return [_simulate_row(name, published, folder) for name in names]


def _simulate_row(name: str, published: PublishedRow, folder: Path | None) -> SimulatedRow:
    reading = READINGS.get(name, READINGS[REPRODUCED])
    job = calibrated_job(published, folder, reading)
    system = make_system(name, job, published.fault_free, folder)
    if isinstance(system, Bamboo) and system.is_out_of_memory:
        return SimulatedRow()
    num_seeds = min(NUM_SEEDS, FEW_SEEDS) if reading.has_few_seeds else NUM_SEEDS
    return SimulatedRow(
        tuple(
            mean_interval([_throughput(system, job, trace) for trace in interval_traces(job, hours)[:num_seeds]])
            for hours in INTERVALS_H
        ),
        _own_rate(system, job),
    )


def _own_rate(system: System, job: SimulatedJob) -> float:
    """Samples a second while every worker is alive."""
    return system.begin(Members(job.shape, frozenset(job.shape.workers()))).steady_state.samples_per_s


def published_job(row: PublishedRow, reading: TableReading = READINGS[REPRODUCED]) -> SimulatedJob:
    """The job of a model without embedding and head: a vocabulary of one token."""
    num_pipelines, num_stages = round(row.num_pipelines / reading.depth_factor), round(row.num_stages * reading.depth_factor)
    shape = Shape(num_pipelines, num_stages, round(NUM_MICROBATCHES * reading.microbatch_factor) // num_pipelines)
    return SimulatedJob.of(f"{row.model},vocabulary=1", GPU, shape)


def calibrated_job(row: PublishedRow, folder: Path | None, reading: TableReading = READINGS[REPRODUCED]) -> SimulatedJob:
    """The model's job, scaled so that its fault-free 1F1B is as fast as published."""
    job = published_job(row, reading)
    period_us = one_f_one_b_time(job.problem(), folder).period_us
    return replace(job, scale=job.samples_per_step * 1e6 / row.fault_free / period_us)


def make_system(name: str, job: SimulatedJob, fault_free: float, folder: Path | None) -> System:
    """The system, or the reading of ReCycle, of this name, under the assumptions above."""
    constants = Constants.for_model(job.model.num_parameters)
    if name == "bamboo":
        return Bamboo(job, constants.bamboo.rebalance_us, constants.bamboo.fatal_us)
    if name == "oobleck":
        pause_s = OOBLECK_FIXED_S + job.state_bytes / OOBLECK_BYTES_PER_S
        return _as_fast_as(fault_free, Oobleck(job, round(pause_s * 1e6)))
    if name in OTHER_PAUSES_S:
        pause = OTHER_PAUSES_S[name]
        return _as_fast_as(fault_free, Oobleck(job, round(pause * 1e6) if pause else constants.oobleck.reconfigure_us))
    reading = READINGS[name]
    timings = IterationTimes(job.problem(reading.techniques), folder)
    base = None if reading.plans_fault_free else one_f_one_b_time(job.problem(), folder)
    return Recycle(job, timings, replace(constants.recycle, moves=reading.moves), fault_free=base)


def _as_fast_as(fault_free: float, system: Oobleck) -> Oobleck:
    """The same system, scaled to `fault_free` samples a second while no worker is dead."""
    own = _own_rate(system, system.job)
    return replace(system, job=replace(system.job, scale=system.job.scale * own / fault_free))


def interval_traces(job: SimulatedJob, hours: float) -> list[Trace]:
    nodes = failure_traces.worker_names(job.shape.num_pipelines, job.shape.num_stages)
    end_us = RUN_HOURS * 3_600_000_000
    return [failure_traces.periodic_trace(nodes, round(hours * 3.6e9), end_us, seed) for seed in range(NUM_SEEDS)]


def _throughput(system: System, job: SimulatedJob, trace: Trace) -> float:
    record = simulate_trace(system, trace, job.shape)
    return sum(event.samples for event in record if isinstance(event, Spell)) * 1e6 / trace.end_us


def _result(
    simulated: Mapping[tuple[str, str], SimulatedRow], readings: Sequence[str], rates: Mapping[str, FaultFreeRates]
) -> ExperimentResult:
    found: Found = {key: row.cells for key, row in simulated.items()}
    rows = [["samples/s", *(f"{hours:g} h: {what}" for hours in INTERVALS_H for what in ("published", "ours", "differs"))]]
    panels: list[BarPanel] = []
    facts: dict[str, object] = {}
    for row in TABLE:
        series: dict[str, list[float | None]] = {}
        for system in SYSTEMS:
            published, ours = row.cells[system], found[system, row.model]
            rows.append([f"{row.model}, {system}", *_cells(published, simulated[system, row.model])])
            series[f"{system}, published"] = _or_none(published)
            series[f"{system}, ours"] = _or_none(ours)
            facts[f"{row.model}/{system}"] = {
                "published": published,
                "ours": ours and [round(value, 4) for value in ours],
                "intervals": [one.to_json() for one in simulated[system, row.model].means],
                "own": round(simulated[system, row.model].own, 6),
            }
        panels.append(BarPanel(f"{row.model} (fault-free {row.fault_free:g})", [f"{hours:g} h" for hours in INTERVALS_H], series))
    tables = (
        ResultTable("Samples a second, by the time between two failures", rows),
        ResultTable("Under other assumptions: samples a second", _other_rows(simulated)),
        ResultTable(
            "Ours as a share of the system's own throughput without failures, and of the best fault-free schedule "
            f"({', '.join(f'{model}: {one.best_schedule}' for model, one in rates.items())})",
            _share_rows(simulated, rates),
        ),
        reading_table(found, TABLE, readings),
    )
    facts["fault-free"] = {model: rate_facts(one) for model, one in rates.items()}
    others = (*OTHER_PAUSES_S, *readings)
    facts["others"] = {f"{row.model}/{name}": found[name, row.model] for row in TABLE for name in others}
    title, groups = "The published table, made again", "time between two failures"
    findings = table_findings(found, TABLE, list(OTHER_PAUSES_S))
    return ExperimentResult("table", title, ASSUMPTIONS, tables, panels, "samples / s", groups, facts, findings)


def _other_rows(found: Mapping[tuple[str, str], SimulatedRow]) -> list[list[str]]:
    head = ["model, system", *(f"{hours:g} h" for hours in INTERVALS_H)]
    shown = [(row.model, text, name) for row in TABLE for text, name in _OTHERS.items() if (name, row.model) in found]
    return [head, *([f"{model}, {text}", *(one.text(2) for one in found[name, model].means)] for model, text, name in shown)]


def _share_rows(found: Mapping[tuple[str, str], SimulatedRow], rates: Mapping[str, FaultFreeRates]) -> list[list[str]]:
    """The rows of both tables before, as shares: fault handling alone, and both it and scheduling."""
    names = {system: system for system in SYSTEMS[:-1]} | _OTHERS
    rows = [["model, system", *(f"{hours:g} h: {which}" for hours in INTERVALS_H for which in ("of own", "of best"))]]
    for row in TABLE:
        for text, name in names.items():
            one = found.get((name, row.model), SimulatedRow())
            shares = [mean.over(rate).text(3) for mean in one.means for rate in (one.own, rates[row.model].best)]
            rows.append([f"{row.model}, {text}", *(shares or ["out of memory"] * 2 * len(INTERVALS_H))])
    return rows


def _cells(published: Cells, ours: SimulatedRow) -> list[str]:
    cells = []
    for number in range(len(INTERVALS_H)):
        theirs, here = _or_none(published)[number], ours.means[number] if ours.means else None
        cells += ["out of memory" if theirs is None else f"{theirs:.2f}", "out of memory" if here is None else here.text(2)]
        cells.append(f"{here.mean / theirs - 1:+.1%}" if here is not None and theirs is not None else "")
    return cells


def _or_none(values: Cells) -> list[float | None]:
    return list(values) if values else [None] * len(INTERVALS_H)
