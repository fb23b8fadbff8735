"""Scale: the paper's large models on up to 1,536 GPUs with 1, 5 and 10 % dead workers, and a month on 16,384 GPUs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from recycle.core.cluster import Shape
from recycle.core.events.record import Event, Spell
from recycle.core.events.trace import Trace
from recycle.sim import failure_traces
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.campaign.fault_free_rates import FaultFreeRates, fault_free_rates
from recycle.sim.campaign.mean_interval import MeanInterval, mean_interval
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import Members, System
from recycle.sim.reproduce.experiment_result import BarPanel, ExperimentResult, ResultTable
from recycle.sim.reproduce.share_tables import REFERENCES, ShareTables, fault_free_table, rate_facts, share_of
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS, SystemContext

GPU = "a100-80"
TENSOR_PARALLEL = 8
SHARES = (0.01, 0.05, 0.10)
NUM_SEEDS = 20
STEADY = (
    "fault-scaled",
    "recycle",
    "recycle-rerouting",
    "resihp",
    "elaswave",
    "odyssey",
    "odyssey-rerouting",
    "oobleck",
    "oobleck-zb",
    "replica-drop",
    "replica-drop-zb",
)
# How much faster than ReCycle the papers of other systems measured theirs.
PUBLISHED_RATIOS = {
    "elaswave": "1.35 (96 NPUs)",
    "odyssey": "up to 1.355 (32 cards)",
    "resihp": "1.22 to 1.82 (256 A100, fail-stop)",
    "recycle": "",
}
# ResiHP where each dead worker has lost one of its GPUs only: no other system can use the others.
ONE_GPU_LOST = "resihp, 1 GPU lost"
COLUMNS = (*STEADY, ONE_GPU_LOST)
HEAD = ("cluster", "micro-batches", "shared layers", "dead")
COMPARED = ("odyssey-rerouting", "recycle-rerouting")


@dataclass(frozen=True, slots=True)
class ScaleCluster:
    """A model on so many GPUs, its global batch as in Megatron-LM's table, and two shapes: deep and wide."""

    model: str
    num_gpus: int
    batch: int
    shapes: tuple[tuple[int, int], tuple[int, int]]


CLUSTERS = (
    ScaleCluster("gpt-18.4b", 256, 1024, ((4, 8), (8, 4))),
    ScaleCluster("gpt-39.1b", 512, 1536, ((4, 16), (8, 8))),
    ScaleCluster("gpt-76.1b", 1024, 1792, ((4, 32), (16, 8))),
    ScaleCluster("gpt-145.6b", 1536, 2304, ((3, 64), (24, 8))),
)
MICROBATCH = 4

# 419 unplanned interruptions in 54 days on 16,384 GPUs, in the Llama 3 report: one worker of 8 GPUs in 264 days.
MONTH_MODEL, MONTH_GPU, MONTH_SHAPE, MONTH_DAYS = "gpt-145.6b", "h100", Shape(128, 16, 32), 30
INTERRUPTIONS, INTERRUPTED_DAYS, INTERRUPTED_GPUS = 419, 54, 16_384
MONTH_REJOIN_H = 24

_DAY_US = 86_400_000_000


def run_scale(folder: Path | None) -> ExperimentResult:
    """Return the steady throughput of every cluster at every share of dead workers, and the throughput of the month."""
    steady = ShareTables(HEAD, COLUMNS, {ONE_GPU_LOST: "resihp"})
    rates: dict[str, FaultFreeRates] = {}
    cells: dict[str, dict[str, list[float]]] = {}
    intervals: dict[str, Any] = {}
    panels = []
    for cluster in CLUSTERS:
        for num_pipelines, num_stages in cluster.shapes:
            shape = Shape(num_pipelines, num_stages, cluster.batch // num_pipelines // MICROBATCH)
            num_shared, found, throughputs = _steady(cluster.model, shape, folder)
            name = f"{cluster.model}, {cluster.num_gpus} GPUs, {num_pipelines} x {num_stages}"
            rates[name] = found
            cells[name] = {system: [round(one.mean / found.one_f_one_b, 6) for one in own] for system, own in throughputs.items()}
            intervals[name] = interval_facts(throughputs, found)
            for number, share in enumerate(SHARES):
                labels = [name, str(shape.num_microbatches), str(num_shared), f"{share:.0%}"]
                steady.add(labels, {system: own[number] for system, own in throughputs.items()}, found)
            title = f"{cluster.model}, {num_pipelines} x {num_stages}"
            panels.append(BarPanel(title, [f"{share:.0%}" for share in SHARES], cells[name]))
    month, month_rates = _month(folder)
    facts: dict[str, Any] = {
        **cells,
        "intervals": intervals,
        "month": {name: round(rate / month_rates.one_f_one_b, 6) for name, rate in month.items()},
        "fault-free": {name: rate_facts(found) for name, found in {**rates, "month": month_rates}.items()},
    }
    tables = (
        fault_free_table(rates, STEADY, "cluster"),
        *steady.tables("Steady throughput"),
        ResultTable(
            "Throughput over that of ReCycle without cuts, in all cells of the table above", _ratio_rows([*cells.values()])
        ),
        ResultTable(
            f"{MONTH_DAYS} days on 16,384 GPUs at the failure rate of the Llama 3 run, as shares of fault-free throughput",
            [["system", *REFERENCES], *([name, *_shares(name, rate, month_rates)] for name, rate in month.items())],
        ),
    )
    return ExperimentResult(
        "scale", "At scale", _ASSUMPTIONS, tables, panels, "share of fault-free 1F1B", "share of workers that is dead", facts
    )


def _shares(system: str, throughput: float, rates: FaultFreeRates) -> list[str]:
    found = [share_of(which, system, throughput, rates) for which in REFERENCES]
    return ["–" if share is None else f"{share:.4f}" for share in found]


_ASSUMPTIONS = (
    f"{GPU} GPUs, tensor-parallel degree {TENSOR_PARALLEL}: a worker is a server of {TENSOR_PARALLEL} GPUs and fails as a unit",
    "shapes are ours: one deep, as the paper's 64 stages suggest, and one wide, with the same workers",
    f"global batches are those of Megatron-LM for the same models and GPU counts, in micro-batches of {MICROBATCH} samples",
    "of own: of the system itself with nobody dead, so that fault handling alone counts; of best: of anybody's best schedule",
    "systems that end in -zb have a zero-bubble schedule in place of 1F1B; best schedules of another shape count, too",
    "steady state: no pause is counted; the number of dead workers is rounded up",
    f"which workers are dead is random: means of {NUM_SEEDS} draws; for oobleck, fault-scaled and both recycle the number counts",
    "± is half of the 90 % interval of the mean (Student's t over draws), where it is not below 0.0005; the month is one draw",
    "recycle has elastic cuts with as many shared layers as pay, 0 to 2; recycle-rerouting has none",
    f"{ONE_GPU_LOST}: each dead worker has lost one of its {TENSOR_PARALLEL} GPUs, and goes on with half of them; others drop it",
    "odyssey-rerouting is ReCycle as Odyssey's paper estimates it, without split backward and staggered step",
    f"the month: {MONTH_MODEL} on {MONTH_GPU}, 128 x 16 workers of 8 GPUs, pauses with the default constants",
    f"every worker fails by itself ({INTERRUPTIONS} interruptions in {INTERRUPTED_DAYS} days on {INTERRUPTED_GPUS:,} GPUs)",
    f"a failed worker is back after {MONTH_REJOIN_H} h",
)


def _ratio_rows(cells: Sequence[Mapping[str, Sequence[float]]]) -> list[list[str]]:
    """For each system its published ratio to ReCycle, and the least, the median and the greatest of ours."""
    rows = [["system", "published, over ReCycle", *(f"ours, over {other}" for other in COMPARED)]]
    for system, published in PUBLISHED_RATIOS.items():
        row = [system, published]
        for other in COMPARED:
            pairs = [(one, two) for cell in cells for one, two in zip(cell[system], cell[other], strict=True)]
            ratios = [one / two for one, two in pairs if two]
            row.append(f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}" if ratios else "")
        rows.append(row)
    return rows


def scale_context(model: str, gpu: str, shape: Shape, folder: Path | None) -> SystemContext:
    job = SimulatedJob.of(model, gpu, shape, TENSOR_PARALLEL)
    return SystemContext(job, Constants.for_model(job.model.num_parameters), folder)


def _steady(model: str, shape: Shape, folder: Path | None) -> tuple[int, FaultFreeRates, dict[str, list[MeanInterval]]]:
    """The number of shared layers, the fault-free rates, and the throughput of each system at each share of dead workers."""
    context = scale_context(f"{model},microbatch={MICROBATCH}", GPU, shape, folder)
    counts = [-(-round(share * 1000) * shape.num_workers // 1000) for share in SHARES]
    context.timings.prepare(counts)
    context.cut_timings.prepare(counts)
    constants = context.constants
    partly = replace(context, constants=replace(constants, resihp=replace(constants.resihp, gpu_failures=True)))
    systems = {name: SYSTEMS[name](context) for name in STEADY} | {ONE_GPU_LOST: SYSTEMS["resihp"](partly)}
    draws = [_draws(shape, count, NUM_SEEDS) for count in counts]
    throughputs = {name: [mean_rate(system, each) for each in draws] for name, system in systems.items()}
    return context.num_shared, fault_free_rates(context, STEADY), throughputs


def mean_rate(system: System, draws: Sequence[Members]) -> MeanInterval:
    """The mean throughput of a system that has adapted to each of these members, with its interval."""
    return mean_interval([system.begin(members).steady_state.samples_per_s for members in draws])


def interval_facts(throughputs: Mapping[str, Sequence[MeanInterval]], rates: FaultFreeRates) -> dict[str, list[Any]]:
    """For scripts: mean and 90 % interval of every system and column, as shares of fault-free 1F1B."""
    base = rates.one_f_one_b
    return {name: [one.over(base).to_json() for one in own] for name, own in throughputs.items()}


def _draws(shape: Shape, num_dead: int, num_seeds: int) -> list[Members]:
    nodes = failure_traces.worker_names(shape.num_pipelines, shape.num_stages)
    draws = []
    for seed in range(num_seeds):
        trace = failure_traces.periodic_trace(nodes, 1000, 1000 * (num_dead + 1), seed)
        gone = {change.node for change in trace.later}
        draws.append(Members(shape, frozenset(worker for worker in shape.workers() if str(worker) not in gone)))
    return draws


def _month(folder: Path | None) -> tuple[dict[str, float], FaultFreeRates]:
    """The throughput of each system over the month, and the fault-free rates."""
    context = scale_context(MONTH_MODEL, MONTH_GPU, MONTH_SHAPE, folder)
    num_workers = INTERRUPTED_GPUS // TENSOR_PARALLEL
    mtbf_us = INTERRUPTED_DAYS * _DAY_US * num_workers // INTERRUPTIONS
    nodes = failure_traces.worker_names(MONTH_SHAPE.num_pipelines, MONTH_SHAPE.num_stages)
    trace = failure_traces.poisson_trace(nodes, mtbf_us, MONTH_DAYS * _DAY_US, 1, MONTH_REJOIN_H * 3_600_000_000)
    records = run_cases([Case(name, context, trace) for name in SYSTEMS])
    rates = [trace_rate(record, trace) for record in records]
    return dict(zip(SYSTEMS, rates, strict=True)), fault_free_rates(context, SYSTEMS)


def trace_rate(record: Sequence[Event], trace: Trace) -> float:
    """Samples a second over a whole trace."""
    return sum(event.samples for event in record if isinstance(event, Spell)) * 1e6 / trace.end_us
