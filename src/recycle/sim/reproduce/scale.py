"""Scale: the paper's large models on up to 1,536 GPUs with 1, 5 and 10 % dead workers, and a month on 16,384 GPUs."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from recycle.core.cluster import Shape
from recycle.core.events.record import Spell
from recycle.sim import failure_traces
from recycle.sim.campaign.campaign import Case, run_cases
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import Members
from recycle.sim.reproduce.experiment_result import BarPanel, ExperimentResult, ResultTable
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS, SystemContext

GPU = "a100-80"
TENSOR_PARALLEL = 8
SHARES = (0.01, 0.05, 0.10)
NUM_SEEDS = 20
STEADY = ("fault-scaled", "recycle", "oobleck", "replica-drop")


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
    facts: dict[str, object] = {}
    rows, panels = [], []
    for cluster in CLUSTERS:
        for num_pipelines, num_stages in cluster.shapes:
            shape = Shape(num_pipelines, num_stages, cluster.batch // num_pipelines // MICROBATCH)
            shares = _steady(cluster.model, shape, folder)
            name = f"{cluster.model}, {cluster.num_gpus} GPUs, {num_pipelines} x {num_stages}"
            facts[name] = shares
            for number, share in enumerate(SHARES):
                values = [f"{shares[system][number]:.3f}" for system in STEADY]
                rows.append([name, str(shape.num_microbatches), f"{share:.0%}", *values])
            panels.append(
                BarPanel(f"{cluster.model}, {num_pipelines} x {num_stages}", [f"{share:.0%}" for share in SHARES], shares)
            )
    month = _month(folder)
    facts["month"] = month
    tables = (
        ResultTable("Steady throughput, as a share of fault-free 1F1B", [["cluster", "micro-batches", "dead", *STEADY], *rows]),
        ResultTable(
            f"{MONTH_DAYS} days on 16,384 GPUs at the failure rate of the Llama 3 run",
            [["system", "of fault-free 1F1B"], *([name, f"{value:.4f}"] for name, value in month.items())],
        ),
    )
    return ExperimentResult(
        "scale", "At scale", _ASSUMPTIONS, tables, panels, "share of fault-free 1F1B", "share of workers that is dead", facts
    )


_ASSUMPTIONS = (
    f"{GPU} GPUs, tensor-parallel degree {TENSOR_PARALLEL}: a worker is a server of {TENSOR_PARALLEL} GPUs and fails as a unit",
    "shapes are ours: one deep, as the paper's 64 stages suggest, and one wide, with the same workers",
    f"global batches are those of Megatron-LM for the same models and GPU counts, in micro-batches of {MICROBATCH} samples",
    "steady state: no pause is counted; the number of dead workers is rounded up",
    f"replica-drop: which pipelines are hit is random, the mean of {NUM_SEEDS} draws; all others depend on the number alone",
    f"the month: {MONTH_MODEL} on {MONTH_GPU}, 128 x 16 workers of 8 GPUs, pauses with the default constants",
    f"every worker fails by itself ({INTERRUPTIONS} interruptions in {INTERRUPTED_DAYS} days on {INTERRUPTED_GPUS:,} GPUs)",
    f"a failed worker is back after {MONTH_REJOIN_H} h",
)


def _context(model: str, gpu: str, shape: Shape, folder: Path | None) -> SystemContext:
    job = SimulatedJob.of(model, gpu, shape, TENSOR_PARALLEL)
    return SystemContext(job, Constants.for_model(job.model.num_parameters), folder)


def _steady(model: str, shape: Shape, folder: Path | None) -> dict[str, list[float]]:
    """The throughput of each system at each share of dead workers, relative to fault-free 1F1B."""
    context = _context(f"{model},microbatch={MICROBATCH}", GPU, shape, folder)
    fault_free = context.job.samples_per_step * 1e6 / context.baseline.period_us
    counts = [-(-round(share * 1000) * shape.num_workers // 1000) for share in SHARES]
    context.timings.prepare(max(counts))
    return {name: [round(_mean_rate(context, name, count) / fault_free, 6) for count in counts] for name in STEADY}


def _mean_rate(context: SystemContext, name: str, num_dead: int) -> float:
    system = SYSTEMS[name](context)
    draws = _draws(context.job.shape, num_dead, NUM_SEEDS)
    return mean(system.begin(members).steady_state.samples_per_s for members in draws)


def _draws(shape: Shape, num_dead: int, num_seeds: int) -> list[Members]:
    nodes = failure_traces.worker_names(shape.num_pipelines, shape.num_stages)
    draws = []
    for seed in range(num_seeds):
        trace = failure_traces.periodic_trace(nodes, 1000, 1000 * (num_dead + 1), seed)
        gone = {change.node for change in trace.later}
        draws.append(Members(shape, frozenset(worker for worker in shape.workers() if str(worker) not in gone)))
    return draws


def _month(folder: Path | None) -> dict[str, float]:
    """The throughput of each system over the month, as a share of fault-free 1F1B."""
    context = _context(MONTH_MODEL, MONTH_GPU, MONTH_SHAPE, folder)
    num_workers = INTERRUPTED_GPUS // TENSOR_PARALLEL
    mtbf_us = INTERRUPTED_DAYS * _DAY_US * num_workers // INTERRUPTIONS
    nodes = failure_traces.worker_names(MONTH_SHAPE.num_pipelines, MONTH_SHAPE.num_stages)
    trace = failure_traces.poisson_trace(nodes, mtbf_us, MONTH_DAYS * _DAY_US, 1, MONTH_REJOIN_H * 3_600_000_000)
    fault_free = context.job.samples_per_step * 1e6 / context.baseline.period_us
    records = run_cases([Case(name, context, trace) for name in SYSTEMS])
    seconds = trace.end_us / 1e6
    done = (sum(event.samples for event in record if isinstance(event, Spell)) for record in records)
    return {name: round(samples / seconds / fault_free, 6) for name, samples in zip(SYSTEMS, done, strict=True)}
