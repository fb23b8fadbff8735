"""SystemChoice: a system in a shape, one of the answers that there could be; `all_choices` lists every one that fits.

A worker's GPUs are in one server, so that its tensor-parallel degree is a power of two up to the GPUs of a server. Stages may
have unequal numbers of layers. GPUs that the shape leaves over are spares: how many there are is part of the choice. The samples
of a micro-batch are given with the model, because the estimated times of ops do not know that larger ones run better.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.sim.advise.question import ClusterQuestion
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import System
from recycle.sim.shared_layer_choice import MOST_SHARED
from recycle.sim.systems.registry import SYSTEMS, SystemContext
from recycle.sim.systems.slow_steps import WaitsForSlowest

# Not to be chosen: two baselines that nobody can run, restarts with spares that cost nothing, ReCycle as others estimate it, a
# system that is timed by a bound and not by a schedule, and ReCycle without cuts, which is `recycle` with no shared layer.
NOT_TO_CHOOSE = (
    "ideal",
    "fault-scaled",
    "checkpoint-restart-spare",
    "checkpoint-restart-spare-zb",
    "odyssey-rerouting",
    "resihp",
    "recycle-rerouting",
)
# Systems whose names begin so cut the model by themselves. For the first two only the number of workers and the batch matter;
# the last one may keep the shape.
CUTS_BY_ITSELF = ("oobleck", "varuna", "odyssey")
_FREE_OF_SHAPE = ("oobleck", "varuna")
# These run the ops of the job in its shape, so that the bound of its period is theirs, too.
BOUND_TO_SHAPE = ("recycle", "replica-drop", "checkpoint-restart")
ELASTIC = "recycle"
# A plan with cuts takes seconds for so many micro-batches times stages, and far longer for more: there ReCycle re-routes only.
MOST_CUT_STEPS = 20_000
_ZERO_BUBBLE = "-zb"


@dataclass(frozen=True, slots=True)
class SystemChoice:
    """A system, its shape, the tensor-parallel degree of its workers, and the layers that neighbouring stages share."""

    system: str
    shape: Shape
    tensor_parallel: int
    shared_layers: int
    num_spare_servers: int

    @property
    def group(self) -> tuple[str, bool]:
        """The system, and whether it has spare servers: of each group the best choice is looked for."""
        return self.system, self.num_spare_servers > 0

    @property
    def key(self) -> str:
        shape = self.shape
        size = f"{shape.num_pipelines}x{shape.num_stages}x{shape.num_microbatches}"
        return f"{self.system} {size} t{self.tensor_parallel} k{self.shared_layers}"

    def is_same_layout(self, other: "SystemChoice") -> bool:
        """Whether the two differ in shared layers only, or, if the system lays its pipelines out by itself, in a few workers."""
        if (self.group, self.tensor_parallel) != (other.group, other.tensor_parallel):
            return False
        return self.shape == other.shape or self.system.startswith(_FREE_OF_SHAPE)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def is_planned(system: str) -> bool:
    """Whether a fault-free step of the system is a plan with split backward passes, which takes up to seconds to make."""
    return system == ELASTIC or system.endswith(_ZERO_BUBBLE)


def job_of(question: ClusterQuestion, choice: SystemChoice) -> SimulatedJob:
    degrees = {"tensor_parallel": choice.tensor_parallel, "context_parallel": question.context_parallel}
    return SimulatedJob(question.model, question.planned_gpu, choice.shape, **degrees)


def workers_per_server(question: ClusterQuestion, tensor_parallel: int) -> int:
    return question.gpus_per_server // (tensor_parallel * question.context_parallel)


def spare_workers(question: ClusterQuestion, choice: SystemChoice) -> int:
    return question.num_servers * workers_per_server(question, choice.tensor_parallel) - choice.shape.num_workers


def system_of(question: ClusterQuestion, choice: SystemChoice, folder: Path | None) -> System:
    """The system, which knows how often servers fail. No worker is slow here, so that no system has to wait for one."""
    job, mtbf_us = job_of(question, choice), question.cluster_mtbf_us
    system = SYSTEMS[choice.system](SystemContext(job, question.constants, folder, mtbf_us, choice.shared_layers))
    return system.system if isinstance(system, WaitsForSlowest) else system


def all_choices(question: ClusterQuestion) -> Iterator[SystemChoice]:
    """Yield every choice that fits: each system in each shape, ReCycle with each number of shared layers."""
    seen = set()
    for shape, tensor_parallel, idle_servers in shapes_that_fit(question):
        for system in question.systems:
            if system.startswith(_FREE_OF_SHAPE):
                size = system, tensor_parallel, shape.num_workers, shape.num_chains
                if size in seen:
                    continue
                seen.add(size)
            for shared in range(most_shared(question, shape, tensor_parallel) + 1 if system == ELASTIC else 1):
                yield SystemChoice(system, shape, tensor_parallel, shared, idle_servers)


def shapes_that_fit(question: ClusterQuestion) -> Iterator[tuple[Shape, int, int]]:
    """Yield each shape that fits in the memory, its tensor-parallel degree, and its idle servers."""
    # More servers are never away at a time, so that more spares are never used.
    most_spare = max(question.dead_shares)
    for degree in question.tensor_parallel_degrees:
        each = workers_per_server(question, degree)
        for num_stages in range(1, min(question.model.num_layers, question.num_servers * each) + 1):
            if _fits(question, num_stages, degree):
                for shape, spare in _widths(question, num_stages, question.num_servers * each, most_spare * each):
                    yield shape, degree, spare // each


def _widths(question: ClusterQuestion, num_stages: int, num_workers: int, most_spare: int) -> Iterator[tuple[Shape, int]]:
    """Yield the shapes of so many stages, from the most pipelines down, with the workers that each leaves over.

    The last one is the first that has at least `most_spare` spares.
    """
    most = num_workers // num_stages
    fewest = max(1, min(most, (num_workers - most_spare) // num_stages))
    for num_pipelines in range(most, fewest - 1, -1):
        microbatches = round(question.batch / (num_pipelines * question.model.microbatch))
        samples = microbatches * num_pipelines * question.model.microbatch
        if microbatches and abs(samples - question.batch) <= question.batch_tolerance * question.batch:
            yield Shape(num_pipelines, num_stages, microbatches), num_workers - num_pipelines * num_stages


@lru_cache(maxsize=4096)
def _problem_fits(job: SimulatedJob, shared_layers: int) -> bool:
    try:
        job.problem(shared_layers=shared_layers)
    except UserError:
        return False
    return True


def _fits(question: ClusterQuestion, num_stages: int, tensor_parallel: int, shared_layers: int = 0) -> bool:
    """Whether some schedule fits; memory does not depend on the number of pipelines."""
    degrees = {"tensor_parallel": tensor_parallel, "context_parallel": question.context_parallel}
    return _problem_fits(SimulatedJob(question.model, question.planned_gpu, Shape(1, num_stages, 1), **degrees), shared_layers)


def most_shared(question: ClusterQuestion, shape: Shape, tensor_parallel: int) -> int:
    """The most layers, up to `MOST_SHARED`, that neighbouring stages can share in the memory that there is; 0 for large jobs."""
    if shape.num_stages == 1 or shape.num_chains * shape.num_stages > MOST_CUT_STEPS:
        return 0
    found = [shared for shared in range(1, MOST_SHARED + 1) if _fits(question, shape.num_stages, tensor_parallel, shared)]
    return max(found, default=0)
