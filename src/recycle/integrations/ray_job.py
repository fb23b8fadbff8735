"""The job of a Ray cluster: what it needs, by the file that its coordinator wrote, and the files that its machines get."""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record_file import JOB

if TYPE_CHECKING:
    from recycle.runtime.job import Job

_PICKLED, _PICKLE = "pickled_job.py", ".pickle"
_PICKLED_FILE = '''\
"""The job that a program gave to recycle.integrations.ray.train: the file of the same name beside this one has it."""

import hashlib
from pathlib import Path

from ray import cloudpickle

content = Path(__file__).with_suffix("{suffix}").read_bytes()
if hashlib.sha256(content).hexdigest() != "{digest}":
    raise ValueError("the pickled job was changed after this file was written")


def job():
    return cloudpickle.loads(content)
'''


def find_job_file(job: "Job | Path | str", out: Path) -> Path:
    """Return the path of a job file. A `Job` is pickled into a folder beside the run folder, with a job file that loads it."""
    if isinstance(job, str | Path):
        path = Path(job).resolve()
        if not path.is_file():
            raise FileProblem(f"there is no job file {job}: name a Python file with a function job")
        return path
    from ray import cloudpickle

    path = out.with_name(f"{out.name}-job") / _PICKLED
    path.parent.mkdir(parents=True, exist_ok=True)
    content = cloudpickle.dumps(job)
    path.with_suffix(_PICKLE).write_bytes(content)
    path.write_text(_PICKLED_FILE.format(suffix=_PICKLE, digest=hashlib.sha256(content).hexdigest()), encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True)
class CoordinatedJob:
    """A job that a coordinator has begun: its file, the modules beside it that it imports, its device, and its places."""

    file: Path
    code: tuple[str, ...]
    device: str
    num_places: int

    @staticmethod
    def read(out: Path) -> "CoordinatedJob":
        """The job in a run folder; raises UserError if it has no job file."""
        found = json.loads((out / JOB).read_text(encoding="utf-8"))
        config = tomllib.loads(found["config"])
        file = config.get("job", {}).get("file", "")
        if not file:
            raise UserError(f"the run in {out} trains the built-in GPT, and Ray runs job files only: write one")
        return CoordinatedJob(Path(file), tuple(found["code"]), found["device"], found["workers"])

    @property
    def gpus(self) -> str | None:
        """The GPUs that agents use, as the flag of `recycle agent`: all that Ray lets them see, or none."""
        return None if self.device == "cuda" else "none"

    def needs(self, num_cpus: float) -> dict[str, float]:
        """The resources that Ray reserves for each worker."""
        return {"CPU": num_cpus, "GPU": 1.0} if self.device == "cuda" else {"CPU": num_cpus}

    def refuse_too_few(self, num_workers: int) -> None:
        if num_workers < self.num_places:
            raise UserError(
                f"the job has {self.num_places} places, and begins when each of them has a worker, but {num_workers} workers are "
                f"asked for: ask for {self.num_places}, or make the job smaller with --pipelines"
            )

    def read_files(self) -> Mapping[str, bytes]:
        """The contents of all files that a machine needs, by their paths from the folder of the job file."""
        names = [*self.code, *([self.file.with_suffix(_PICKLE).name] if self.file.name == _PICKLED else [])]
        try:
            return {name: (self.file.parent / name).read_bytes() for name in names}
        except OSError as problem:
            raise FileProblem(f"cannot read {problem.filename}: {problem.strerror or problem}") from None
