"""Scale: the paper's large models at up to 1,536 GPUs with 1, 5 and 10 % of the workers dead, and a month on 16,384 GPUs."""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from recycle.core.cluster import Shape
from recycle.core.record import Spell
from recycle.sim import failures
from recycle.sim.campaign import Case, run
from recycle.sim.constants import Constants
from recycle.sim.job import Job
from recycle.sim.lineup import SYSTEMS, Setting
from recycle.sim.policy import Members
from recycle.sim.reproduce.result import Bars, Result, Table

GPU = "a100-80"
TENSOR_PARALLEL = 8
SHARES = (0.01, 0.05, 0.10)
NUM_SEEDS = 20
STEADY = ("fault-scaled", "recycle", "oobleck", "replica-drop")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A model on so many GPUs, in a shape; the global batches are those of Megatron-LM's table for the same models."""

    model: str
    num_gpus: int
    shape: Shape


CLUSTERS = (
    Cluster("gpt-18.4b", 256, Shape(4, 8, 1024 // 4)),
    Cluster("gpt-39.1b", 512, Shape(4, 16, 1536 // 4)),
    Cluster("gpt-76.1b", 1024, Shape(8, 16, 1792 // 8)),
    Cluster("gpt-145.6b", 1536, Shape(12, 16, 2304 // 12)),
)

# 419 unplanned interruptions in 54 days on 16,384 GPUs, in the Llama 3 report: one worker of 8 GPUs in 264 days.
MONTH_MODEL, MONTH_GPU, MONTH_SHAPE, MONTH_DAYS = "gpt-145.6b", "h100", Shape(128, 16, 32), 30
INTERRUPTIONS, INTERRUPTED_DAYS, INTERRUPTED_GPUS = 419, 54, 16_384
MONTH_REJOIN_H = 24

_DAY_US = 86_400_000_000


def scale(folder: Path | None) -> Result:
    """Return the steady throughput of every cluster and share, and the month."""
    facts: dict[str, object] = {}
    rows, panels = [], []
    for cluster in CLUSTERS:
        shares = _steady(cluster, folder)
        facts[cluster.model] = shares
        shape = f"{cluster.shape.num_pipelines} x {cluster.shape.num_stages}"
        for number, share in enumerate(SHARES):
            values = [f"{shares[name][number]:.3f}" for name in STEADY]
            rows.append([f"{cluster.model}, {cluster.num_gpus} GPUs, {shape}", f"{share:.0%}", *values])
        panels.append(Bars(f"{cluster.model}, {cluster.num_gpus} GPUs", [f"{share:.0%}" for share in SHARES], shares))
    month = _month(folder)
    facts["month"] = month
    tables = (
        Table("Steady throughput, as a share of fault-free 1F1B", [["cluster", "dead", *STEADY], *rows]),
        Table(
            f"{MONTH_DAYS} days on 16,384 GPUs at the failure rate of the Llama 3 run",
            [["system", "of fault-free 1F1B"], *([name, f"{value:.4f}"] for name, value in month.items())],
        ),
    )
    return Result("scale", "At scale", _ASSUMPTIONS, tables, panels, "share of fault-free 1F1B", facts)


_ASSUMPTIONS = (
    f"{GPU} GPUs, tensor-parallel degree {TENSOR_PARALLEL}: a worker is a server of {TENSOR_PARALLEL} GPUs and fails as a unit",
    "shapes are ours: the paper does not say them; global batches are those of Megatron-LM for the same models and GPU counts",
    "steady state: no pause is counted; the number of dead workers is rounded up",
    f"replica-drop: which pipelines are hit is random, the mean of {NUM_SEEDS} draws; all others depend on the number alone",
    f"the month: {MONTH_MODEL} on {MONTH_GPU}, 128 x 16 workers of 8 GPUs, pauses with the default constants",
    f"every worker fails by itself ({INTERRUPTIONS} interruptions in {INTERRUPTED_DAYS} days on {INTERRUPTED_GPUS:,} GPUs)",
    f"a failed worker is back after {MONTH_REJOIN_H} h",
)


def _setting(model: str, gpu: str, shape: Shape, folder: Path | None) -> Setting:
    job = Job.of(model, gpu, shape, TENSOR_PARALLEL)
    return Setting(job, Constants.for_model(job.model.num_parameters), folder)


def _steady(cluster: Cluster, folder: Path | None) -> dict[str, list[float]]:
    """The throughput of each system at each share of dead workers, over fault-free 1F1B's."""
    setting = _setting(cluster.model, GPU, cluster.shape, folder)
    fault_free = setting.job.samples_per_step * 1e6 / setting.baseline.period_us
    counts = [-(-round(share * 1000) * cluster.shape.num_workers // 1000) for share in SHARES]
    setting.timings.prepare(max(counts))
    return {name: [round(_mean_rate(setting, name, count) / fault_free, 6) for count in counts] for name in STEADY}


def _mean_rate(setting: Setting, name: str, num_dead: int) -> float:
    system = SYSTEMS[name](setting)
    rates = [system.begin(members).regime.samples_per_s for members in _draws(setting.job.shape, num_dead, NUM_SEEDS)]
    return mean(rates)


def _draws(shape: Shape, num_dead: int, num_seeds: int) -> list[Members]:
    """Clusters with so many dead workers at random."""
    nodes = failures.worker_names(shape.num_pipelines, shape.num_stages)
    made = []
    for seed in range(num_seeds):
        trace = failures.every(nodes, 1000, 1000 * (num_dead + 1), seed)
        gone = {change.node for change in trace.later}
        made.append(Members(shape, frozenset(worker for worker in shape.workers() if str(worker) not in gone)))
    return made


def _month(folder: Path | None) -> dict[str, float]:
    """The throughput of each system over the month, as a share of fault-free 1F1B."""
    setting = _setting(MONTH_MODEL, MONTH_GPU, MONTH_SHAPE, folder)
    num_workers = INTERRUPTED_GPUS // TENSOR_PARALLEL
    mtbf_us = INTERRUPTED_DAYS * _DAY_US * num_workers // INTERRUPTIONS
    nodes = failures.worker_names(MONTH_SHAPE.num_pipelines, MONTH_SHAPE.num_stages)
    trace = failures.poisson(nodes, mtbf_us, MONTH_DAYS * _DAY_US, 1, MONTH_REJOIN_H * 3_600_000_000)
    fault_free = setting.job.samples_per_step * 1e6 / setting.baseline.period_us
    records = run([Case(name, setting, trace) for name in SYSTEMS])
    seconds = trace.end_us / 1e6
    done = (sum(event.samples for event in record if isinstance(event, Spell)) for record in records)
    return {name: round(samples / seconds / fault_free, 6) for name, samples in zip(SYSTEMS, done, strict=True)}
