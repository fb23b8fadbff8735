"""ClusterQuestion: what `recycle advise` is asked, and the failures that every choice is simulated with.

Servers fail, not workers: a server of `gpus_per_server` GPUs leaves as a whole, and is back after its repair. A server has its
own stream of random numbers, so that the same servers fail at the same times whatever the shape, the system or the number of
spares: differences between choices are not differences of luck. With a failure model, too: whatever fails, a GPU or a process,
takes its server along, and a rack takes all its servers.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from recycle.core.errors import UserError
from recycle.core.events.trace import Change, Trace, live_counts
from recycle.core.release import source_digest
from recycle.planner.profiles.catalog import GpuSpec, ModelSpec
from recycle.sim import failure_traces
from recycle.sim.campaign.spares import spare_names, with_spares
from recycle.sim.failure_model import FailureModel
from recycle.sim.measured_model import MeasuredDevice, MeasuredModel
from recycle.sim.systems.constants import Constants

DAY_US = 86_400_000_000
MOST_GPUS = 131_072
# A screening simulates so many expected failures for each seed, and at least so many repair times, so that its length depends
# neither on the size of the cluster nor on how rare failures are.
SCREENED_FAILURES, SCREENED_REPAIRS, NUM_SCREENING_SEEDS = 60, 5, 2
_LONGEST_SCREENING_US = 3650 * DAY_US
# The fields of a system's constants that are pauses of a recovery; checkpoints and limits are not.
_PAUSES = frozenset(
    {"detect_us", "abort_us", "regroup_us", "plan_us", "restart_us", "reconfigure_us", "rebalance_us", "fatal_us"}
)


@dataclass(frozen=True)
class ClusterQuestion:
    """A model, the GPUs that there are, and how they fail.

    Args:
        model, gpu: What is trained on what; the model has the samples of a micro-batch.
        num_gpus: All GPUs, those of spare servers among them.
        batch: Samples of a step. A shape may be off by `batch_tolerance`, a share of it, so that pipelines have equal numbers of
            micro-batches.
        mtbf_us: How long a server runs until it fails, in the mean.
        repair_us: How long a failed server is away.
        failures: If given, failures are drawn from this model, and the two times before are its means.
        days, num_seeds: How long is simulated, and how often with other failures.
        context_parallel: Groups of a worker's GPUs that divide every sequence.
        memory_reserve: The share of a GPU's memory that no choice may plan with: the CUDA context, buffers of communication and
            fragmentation take it, which estimates do not know.
    """

    model: ModelSpec | MeasuredModel
    gpu: GpuSpec | MeasuredDevice
    num_gpus: int
    batch: int
    mtbf_us: int
    repair_us: int
    constants: Constants
    systems: tuple[str, ...]
    gpus_per_server: int = 8
    days: float = 30.0
    num_seeds: int = 10
    batch_tolerance: float = 0.02
    context_parallel: int = 1
    memory_reserve: float = 0.0
    failures: FailureModel | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.gpus_per_server <= 1024:
            raise UserError(f"a server has {self.gpus_per_server} GPUs, but it must have between 1 and 1024")
        if not 1 <= self.num_gpus <= MOST_GPUS or self.num_gpus % self.gpus_per_server:
            raise UserError(
                f"there are {self.num_gpus} GPUs in servers of {self.gpus_per_server}, but it must be a multiple of that, "
                f"at most {MOST_GPUS}: give --gpus or --gpus-per-server otherwise"
            )
        if not 1 <= self.batch <= 10**7:
            raise UserError(f"the batch is {self.batch} samples, but it must be between 1 and 10 million")
        if not 1 <= self.num_seeds <= 1000:
            raise UserError(f"the number of seeds is {self.num_seeds}, but it must be between 1 and 1000")
        if not 0 < self.days <= 3650:
            raise UserError(f"the number of days is {self.days}, but it must be above 0 and at most 3650")
        if not 0 <= self.batch_tolerance < 1:
            raise UserError(f"the tolerance of the batch is {self.batch_tolerance}, but it must be from 0 to below 1")
        if not 0 <= self.memory_reserve < 1:
            raise UserError(f"the reserve of memory is {self.memory_reserve}, but it must be a share from 0 to below 1")
        if not 1 <= self.context_parallel <= self.gpus_per_server:
            raise UserError(
                f"the context-parallel degree is {self.context_parallel}, but a worker's GPUs are in one server of "
                f"{self.gpus_per_server}"
            )
        if isinstance(self.model, MeasuredModel) and self.context_parallel > 1:
            raise UserError(f"the context-parallel degree is {self.context_parallel}, but a measured worker is one device")

    @property
    def tensor_parallel_degrees(self) -> tuple[int, ...]:
        """The numbers of GPUs that a worker may have, all in one server; a measured worker is a device."""
        most = 1 if isinstance(self.model, MeasuredModel) else self.gpus_per_server // self.context_parallel
        powers = (1 << exponent for exponent in range(most.bit_length()))
        return tuple(degree for degree in powers if self.gpus_per_server % (degree * self.context_parallel) == 0)

    @property
    def unit(self) -> str:
        """What throughput counts: tokens, or samples if a measured model does not know their tokens."""
        return "tokens" if self.model.sequence else "samples"

    @property
    def units_per_sample(self) -> int:
        return self.model.sequence or 1

    @property
    def planned_gpu(self) -> GpuSpec | MeasuredDevice:
        """The GPU with the memory that a choice may plan with."""
        return replace(self.gpu, memory_bytes=int(self.gpu.memory_bytes * (1 - self.memory_reserve)))

    @property
    def num_servers(self) -> int:
        return self.num_gpus // self.gpus_per_server

    @property
    def seeds(self) -> range:
        return range(1, self.num_seeds + 1)

    @property
    def end_us(self) -> int:
        return round(self.days * DAY_US)

    @property
    def cluster_mtbf_us(self) -> int:
        """The mean time between two failures anywhere."""
        return max(1, self.mtbf_us // self.num_servers)

    @property
    def failures_per_day(self) -> float:
        return DAY_US * self.num_servers / (self.mtbf_us + self.repair_us)

    def screening(self) -> "ClusterQuestion":
        """The same question over about `SCREENED_FAILURES` failures a seed, for few seeds."""
        days = screened_days(self.num_servers, self.mtbf_us, self.repair_us)
        return replace(self, days=days, num_seeds=min(self.num_seeds, NUM_SCREENING_SEEDS))

    def no_longer_than(self, other: "ClusterQuestion") -> "ClusterQuestion":
        """The same, neither longer than `other` nor with more failures expected, but for some repairs and two seeds at least.

        Where a seed has more failures than in `other`, because some repairs take so long, the first seeds are enough.
        """
        as_many_us = other.end_us * other.failures_per_day / self.failures_per_day
        end_us = max(min(other.end_us, as_many_us), SCREENED_REPAIRS * self.repair_us)
        num_seeds = round(other.num_seeds * min(1.0, as_many_us / end_us))
        return replace(self, days=end_us / DAY_US, num_seeds=min(other.num_seeds, max(NUM_SCREENING_SEEDS, num_seeds)))

    def with_failures(self, factor: float) -> "ClusterQuestion":
        """The same, but servers fail `factor` times as often."""
        failures = self.failures and self.failures.times(factor)
        return replace(self, mtbf_us=round(self.mtbf_us / factor), failures=failures)

    def with_repairs(self, factor: float) -> "ClusterQuestion":
        """The same, but repairs take `factor` times as long."""
        failures = self.failures and self.failures.repairs_times(factor)
        return replace(self, repair_us=round(self.repair_us * factor), failures=failures)

    def with_pauses(self, system: str, factor: float) -> "ClusterQuestion":
        """The same, but every pause of a recovery of `system` is `factor` times as long."""
        name = constants_of(system, self.constants)
        if name is None:
            return self
        costs = getattr(self.constants, name)
        longer = {field: round(getattr(costs, field) * factor) for field in pause_fields(costs)}
        return replace(self, constants=replace(self.constants, **{name: replace(costs, **longer)}))

    def pause_us(self, system: str) -> int:
        """The pauses of a failure of `system` that are constants."""
        name = constants_of(system, self.constants)
        costs = getattr(self.constants, name) if name else None
        named = pause_fields(costs) if costs else []
        # A restart, or a rendezvous after a fatal loss, is the exception of a system that has other pauses.
        usual = [field for field in named if field not in ("restart_us", "fatal_us")] or named
        return sum(getattr(costs, field) for field in usual)

    @cached_property
    def digest(self) -> str:
        """A digest of all that an answer depends on, the sources among it."""
        given = [source_digest(), to_plain(self)]
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:24]

    @cached_property
    def dead_shares(self) -> Mapping[int, float]:
        """The share of the time, over all seeds, in which so many servers are away."""
        times: Counter[int] = Counter()
        for seed in self.seeds:
            trace = self.trace(1, self.num_servers, seed)
            counts = [*live_counts(trace)]
            ends = [at_us for at_us, _ in counts[1:]] + [trace.end_us]
            for (at_us, num_live), end_us in zip(counts, ends, strict=True):
                times[self.num_servers - num_live] += end_us - at_us
        total = sum(times.values())
        return {dead: time / total for dead, time in sorted(times.items())}

    def trace(self, num_pipelines: int, num_stages: int, seed: int, workers_per_server: int = 1) -> Trace:
        """The failures for a shape: its workers fill the servers in order, the rest of all servers are spares, and fail, too."""
        names = failure_traces.worker_names(num_pipelines, num_stages)
        num_spares = self.num_servers * workers_per_server - len(names)
        assert num_spares >= 0, f"{len(names)} workers do not fit on {self.num_servers} servers of {workers_per_server}"
        spares = spare_names(num_spares)
        nodes = (*names, *spares)
        if self.failures is None:
            trace = failure_traces.rack_trace(nodes, workers_per_server, self.mtbf_us, self.end_us, seed, self.repair_us)
        else:
            servers = _server_trace(self.failures, self.num_servers, self.gpus_per_server, self.end_us, seed)
            trace = _trace_of_workers(servers, nodes, workers_per_server)
        return with_spares(trace, len(names), spares)


@lru_cache(maxsize=64)
def _server_trace(model: FailureModel, num_servers: int, gpus_per_server: int, end_us: int, seed: int) -> Trace:
    """The servers that leave and return; kept, because shapes share their failures."""
    return failure_traces.model_trace(model, failure_traces.node_names(num_servers), gpus_per_server, end_us, seed)


def _trace_of_workers(servers: Trace, nodes: tuple[str, ...], workers_per_server: int) -> Trace:
    """The trace of the workers, which fill the servers in order."""
    names = servers.initial
    held = {server: nodes[at * workers_per_server : (at + 1) * workers_per_server] for at, server in enumerate(names)}
    changes = (replace(change, node=node) for change in servers.later for node in held[change.node])
    return Trace((*(Change(0, True, node) for node in nodes), *changes), servers.end_us)


def screened_days(num_servers: int, mtbf_us: int, repair_us: int) -> float:
    """The days in which so many servers are expected to have `SCREENED_FAILURES` failures, and some repairs at least."""
    enough_us = SCREENED_FAILURES * (mtbf_us + repair_us) // num_servers
    return min(_LONGEST_SCREENING_US, max(enough_us, SCREENED_REPAIRS * repair_us)) / DAY_US


def to_plain(question: ClusterQuestion) -> dict[str, Any]:
    """The question as values of JSON."""
    return json.loads(json.dumps(asdict(question), default=lambda scope: scope.value))  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def constants_of(system: str, constants: Constants) -> str | None:
    """The name of the table of constants of a system: the longest that its own name begins with."""
    names = [item.name for item in fields(constants) if item.name != "ready_us"]
    found = [name for name in names if system.replace("-", "_").startswith(name)]
    return max(found, key=len, default=None)


def pause_fields(costs: Any) -> list[str]:
    return [item.name for item in fields(costs) if item.name in _PAUSES]
