"""ChoiceFacts: how a choice lays the job out, and what it needs of a GPU's memory while nobody is dead."""

from dataclasses import dataclass
from pathlib import Path

from recycle.sim.advise.choices import SystemChoice, job_of, spare_workers, system_of
from recycle.sim.advise.memory_needs import depths_of, memory_bytes
from recycle.sim.advise.question import ClusterQuestion
from recycle.sim.policy import Members, all_places


@dataclass(frozen=True, slots=True)
class ChoiceFacts:
    """The depths of the pipelines of a choice, the memory of the fullest GPU without failures, and the GPUs that are spare."""

    depths: tuple[int, ...]
    memory_bytes: int
    spare_gpus: int


def choice_facts(question: ClusterQuestion, choice: SystemChoice, folder: Path | None) -> ChoiceFacts:
    """The facts of a choice that runs."""
    job = job_of(question, choice)
    state = system_of(question, choice, folder).begin(Members(choice.shape, all_places(choice.shape))).state
    depths = depths_of(job, choice.system, state)
    gpus = spare_workers(question, choice) * choice.tensor_parallel * question.context_parallel
    return ChoiceFacts(depths, memory_bytes(question, choice, depths), gpus)
