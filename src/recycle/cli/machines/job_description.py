"""The description of a job that the coordinator sends to every worker, and the worker spec that a machine makes from it."""

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.cli.machines.endpoint_flags import is_loopback
from recycle.cli.training.job_from_config import TrainingJobFactory
from recycle.cli.training.train_config import TrainConfig, parse_config, with_file
from recycle.control.net.file_transfer import FileTransfer
from recycle.control.net.handshake import Endpoint
from recycle.core.errors import UserError
from recycle.core.events.record_file import JOB
from recycle.core.plans.plan import Plan

if TYPE_CHECKING:
    from recycle.runtime.job import Job
    from recycle.runtime.worker.worker_spec import WorkerSpec


def describe_job(
    name: str, factory: TrainingJobFactory, job: "Job", serves_machines: bool = False, sends_files: bool = False
) -> dict[str, Any]:
    """The description of a job that the coordinator sends to every worker; `spec_from_description` reads it.

    If it `sends_files`, workers send checkpoints to whoever leads, also if they see the run folder of the present leader.
    """
    from recycle.runtime.checkpoint.files import plain
    from recycle.runtime.compute.state_digests import digest
    from recycle.runtime.movable_layers import movable_layer_specs

    assert job.run_folder is not None
    between = [spec.to_json() for spec in movable_layer_specs(job)]
    return {
        "job": name,
        "config": factory.config.to_toml(),
        "plan": job.first_plan.dumps(),
        "out": str(job.run_folder.resolve()),
        "boundaries": [[stage, spec.to_json()] for stage, spec in job.boundaries().items()],
        "layer_specs": between,
        "serves_machines": serves_machines,
        "sends_files": sends_files,
        "versions": _versions(),
        "code": dict(factory.code),
        "fingerprint": plain(job.fingerprint()),
        "weights": [digest(stage) for stage in job.stages],
    }


def _versions() -> dict[str, str]:
    """The versions on which results depend: machines of one job must have the same."""
    import torch

    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
    }


def spec_from_description(endpoint: Endpoint, folder: Path, file: Path | None, interface: str, about: Any) -> "WorkerSpec":
    """The worker spec of the job that a coordinator describes; without its run folder, `folder` holds files to be sent.

    `file` is this machine's job file. Raises if this machine would train something else, with the difference.
    """
    from recycle.runtime.boundary.boundary_spec import BoundarySpec
    from recycle.runtime.checkpoint.compatibility import differing
    from recycle.runtime.checkpoint.files import plain
    from recycle.runtime.compute.state_digests import digest
    from recycle.runtime.launch.configure import worker_spec

    if about["serves_machines"] and is_loopback(endpoint.host) and not interface:
        raise UserError(
            f"workers of other machines reach this one by the address at which it joins, and not at {endpoint.host}: "
            "name the coordinator by an address of this machine's network, or the network by --interface"
        )
    out = Path(about["out"])
    sees_run = not about["sends_files"] and read_job(out).get("job") == about["job"]
    _refuse_difference(differing(about["versions"], _versions()), "give all machines the same Python and packages")
    factory = TrainingJobFactory(_own_config(parse_config(about["config"]), file))
    _refuse_difference(differing(about["code"], dict(factory.code)), "copy it from the coordinator's machine")
    job = factory.job(Plan.parse(about["plan"]), out if sees_run else folder)
    _refuse_difference(differing(about["fingerprint"], plain(job.fingerprint())), "give all machines the same packages and data")
    for number, (expected, stage) in enumerate(zip(about["weights"], job.stages, strict=True)):
        found = {f"first weights of stage {number}": digest(stage)}
        _refuse_difference(differing(dict.fromkeys(found, expected), found), "seed them, with torch.manual_seed for instance")
    boundaries = {int(stage): BoundarySpec.parse(form) for stage, form in about["boundaries"]}
    between = [BoundarySpec.parse(form) for form in about["layer_specs"]]
    files = None if sees_run else FileTransfer(endpoint)
    return worker_spec(job, boundaries=boundaries, file_transfer=files, layer_specs=between)


def _own_config(config: TrainConfig, file: Path | None) -> TrainConfig:
    """The configuration of the job with the job file of this machine, if the job has one."""
    if not config.job.file:
        if file is not None:
            raise UserError(f"the coordinator trains the built-in GPT, and not {file}: leave the file out")
        return config
    if file is None:
        name = Path(config.job.file).name
        raise UserError(f"what is trained is in {name} on the coordinator's machine: name this machine's copy after the address")
    return with_file(config, file)


def _refuse_difference(differences: Iterable[tuple[str, Any, Any]], advice: str) -> None:
    for name, expected, found in differences:
        raise UserError(
            f"this machine would train something else: the job's {name} is {expected}, and here it is {found}; {advice}"
        )


def read_job(out: Path) -> dict[str, Any]:
    """The job file of a run folder; empty if this machine does not see it."""
    try:
        found = json.loads((out / JOB).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
