"""`recycle coordinator` and `recycle worker`: a job on several machines, with a worker for every place of the plan."""

import argparse
import json
import os
import platform
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.cli.training.job_from_config import TrainingJobFactory
from recycle.cli.training.plan_choice import choose_source
from recycle.cli.training.train import describe_run, prepare, refuse_unsaved, watching
from recycle.cli.training.train_config import TrainConfig, add_config_arguments, parse_config, read_config, with_file
from recycle.control.net.file_transfer import FileTransfer
from recycle.control.net.handshake import Endpoint
from recycle.control.net.server import listen
from recycle.control.net.wire import new_name, new_token
from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem, Stopped, UserError, WorkerFailed
from recycle.core.events.record import Event
from recycle.core.events.record_file import SUMMARY
from recycle.core.files import write_text
from recycle.core.plans.plan import Plan
from recycle.host.scratch import scratch

if TYPE_CHECKING:
    from recycle.runtime.job import Job
    from recycle.runtime.worker.worker_spec import WorkerSpec

_COORDINATOR = """\
Coordinate a job whose workers are started elsewhere, each with 'recycle worker'. It waits until every place of the plan has its
worker; from then on workers may die and come back at any time. If the coordinator itself is killed, workers go on training:
start it again with the same arguments, and it continues its job."""
_COORDINATOR_EXAMPLES = """\
examples:
  on one machine
    recycle coordinator train.py --listen 10.0.0.1:29400 --token-file token --out runs/a
  with copies of train.py and of the token that it wrote (a secret), on every machine, once for each worker
    recycle worker 10.0.0.1:29400 train.py --token-file token

Without --listen only this machine is listened to. Machines need not share a disk: a worker that sees the folder of the run writes
its checkpoints there, and any other sends them to the coordinator, and gets them back from it when they are needed."""
_WORKER = """\
Take part in a job that 'recycle coordinator' runs; the coordinator describes the job to every worker. A worker that is started
while the job runs takes a free place at the next step, and copies its stage's state from a peer."""
_WORKER_EXAMPLES = """\
examples:
  recycle worker 10.0.0.1:29400 train.py --token-file token
  recycle worker 10.0.0.1:29400 train.py --token-file token --place W1_2"""
_JOB = "job.json"
_DEFAULT = "127.0.0.1:29400"
_ALL_ADDRESSES = ("0.0.0.0", "::")


def add_coordinator_parser(subparsers: Subparsers) -> None:
    summary, usage = "coordinate a job on several machines", "recycle coordinator [FILE] [options]"
    parser = add_command(subparsers, "coordinator", run_coordinator, summary, _COORDINATOR, _COORDINATOR_EXAMPLES, usage)
    add_config_arguments(parser)
    parser.add_argument("--listen", default=_DEFAULT, metavar="HOST:PORT", help=f"where workers connect to ({_DEFAULT})")
    about = "the job's secret; made if there is no such file"
    parser.add_argument("--token-file", type=Path, required=True, metavar="FILE", help=about)
    parser.add_argument("--out", type=output_path, required=True, metavar="FOLDER", help="record the run there, with checkpoints")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def add_worker_parser(subparsers: Subparsers) -> None:
    summary = "take part in a job on several machines"
    parser = add_command(subparsers, "worker", run_worker, summary, _WORKER, _WORKER_EXAMPLES)
    parser.add_argument("address", metavar="HOST:PORT", help="where the coordinator listens")
    about = "the job file, if the coordinator was given one; the same on every machine"
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=about)
    about = "the job's secret, as the coordinator wrote it"
    parser.add_argument("--token-file", type=Path, required=True, metavar="FILE", help=about)
    parser.add_argument("--place", "--seat", default="", metavar="W1_2", help="the preferred place; any free one if left out")


def run_coordinator(args: argparse.Namespace) -> None:
    config = read_config(args)
    host, port = _address(args.listen)
    token = _token(args.token_file, makes_one=True)
    factory, plan = prepare(config)
    config = factory.config
    from recycle.runtime.coordinator.process import serve_job
    from recycle.runtime.execute.spans import now_us
    from recycle.runtime.launch.configure import coordinator_config

    job = factory.job(plan, args.out, plan_source=factory.plan_source or choose_source(plan, config.cluster))
    found = _find_job(args.out, config)
    name, begin_us = found or (new_name(), now_us())
    about = describe_job(name, factory, job, serves_machines=not _is_loopback(host))
    with listen(host, port) as listener, watching(config, plan, args.out, resume=False) as (watch, say):
        coordinator = coordinator_config(job, Endpoint(host, port, token, name), begin_us, args.out, about=about)
        if found is None:
            write_text(args.out / _JOB, json.dumps({"job": name, "begin_us": begin_us, "config": config.to_toml()}) + "\n")
        reached_at = socket.gethostname() if host in _ALL_ADDRESSES else host
        port = listener.getsockname()[1]
        file = f" {Path(config.job.file).name}" if config.job.file else ""
        say(f"{'found again' if found else 'waiting for'} {len(plan.rows)} workers: recycle worker {reached_at}:{port}{file}")
        sink = _NoticeSink(watch)
        serve_job(coordinator, listener, sink, () if found else None)
    facts = sink.summary()
    print(json.dumps(facts) if args.json else describe_run(facts, args.out))
    if facts["steps"] < config.training.steps:
        sentence = f"stopped after step {facts['steps']} of {config.training.steps}, and all workers with it"
        raise Stopped(f"{sentence}; go on on one machine with: recycle train --resume {args.out}", signal.SIGTERM)
    refuse_unsaved(facts, f"recycle train --resume {args.out}")


class _NoticeSink:
    """The receiver of the coordinator's notices: it passes events on to `watch`, and keeps the last other notice."""

    def __init__(self, watch: Callable[[Event], None]) -> None:
        self._watch = watch
        self._last: Any = None

    def send(self, notice: Any) -> None:
        from recycle.runtime.coordinator.config import EventsRecorded

        if not isinstance(notice, EventsRecorded):
            self._last = notice
            return
        for event in notice.events:
            self._watch(event)

    def summary(self) -> dict[str, Any]:
        """The summary of the job; raises if the job failed."""
        from recycle.runtime.coordinator.config import JobDone, JobFailed, WorkerLost

        match self._last:
            case JobDone(trained):
                return dict(trained.to_json())
            case JobFailed(problem):
                raise problem
            case WorkerLost(_, text):
                raise WorkerFailed(text)
        raise WorkerFailed("the coordinator ended before the job did")


def run_worker(args: argparse.Namespace) -> None:
    from recycle.runtime.launch.forkserver import configure_process

    host, port = _address(args.address)
    place = str(Worker.parse(args.place)) if args.place else ""
    endpoint = Endpoint(host, port, _token(args.token_file, makes_one=False))
    configure_process()
    import recycle.runtime.launch.preload  # noqa: F401  before the coordinator expects heartbeats
    from recycle.runtime.worker.worker import join_job

    with scratch() as folder:
        join_job(endpoint, place, partial(spec_from_description, endpoint, folder, args.file), say=_say)


def _say(sentence: str) -> None:
    print(f"worker, process {os.getpid()}: {sentence}", file=sys.stderr, flush=True)


def describe_job(name: str, factory: TrainingJobFactory, job: "Job", serves_machines: bool = False) -> dict[str, Any]:
    """The description of a job that the coordinator sends to every worker; `spec_from_description` reads it."""
    from recycle.runtime.checkpoint.files import plain
    from recycle.runtime.compute.weight_digest import digest

    assert job.run_folder is not None
    specs = [[stage, list(spec.shape), str(spec.dtype).removeprefix("torch.")] for stage, spec in job.tensor_specs().items()]
    return {
        "job": name,
        "config": factory.config.to_toml(),
        "plan": job.first_plan.dumps(),
        "out": str(job.run_folder.resolve()),
        "tensor_specs": specs,
        "serves_machines": serves_machines,
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


def spec_from_description(endpoint: Endpoint, folder: Path, file: Path | None, about: Any) -> "WorkerSpec":
    """The worker spec of the job that a coordinator describes; without its run folder, `folder` holds files to be sent.

    `file` is this machine's job file. Raises if this machine would train something else, with the difference.
    """
    import torch

    from recycle.runtime.checkpoint.files import plain
    from recycle.runtime.checkpoint.resume import differing
    from recycle.runtime.compute.weight_digest import digest
    from recycle.runtime.launch.configure import worker_spec
    from recycle.runtime.transport.specs import TensorSpec

    if about["serves_machines"] and _is_loopback(endpoint.host):
        raise UserError(
            f"workers of other machines reach this one by the address at which it joins, and not at {endpoint.host}: "
            "name the coordinator by an address of this machine's network"
        )
    out = Path(about["out"])
    sees_run = _read_job(out).get("job") == about["job"]
    _refuse_difference(differing(about["versions"], _versions()), "give all machines the same Python and packages")
    factory = TrainingJobFactory(_own_config(parse_config(about["config"]), file))
    _refuse_difference(differing(about["code"], dict(factory.code)), "copy it from the coordinator's machine")
    job = factory.job(Plan.parse(about["plan"]), out if sees_run else folder)
    _refuse_difference(differing(about["fingerprint"], plain(job.fingerprint())), "give all machines the same packages and data")
    for number, (expected, stage) in enumerate(zip(about["weights"], job.stages, strict=True)):
        found = {f"first weights of stage {number}": digest(stage)}
        _refuse_difference(differing(dict.fromkeys(found, expected), found), "seed them, with torch.manual_seed for instance")
    specs = {int(stage): TensorSpec(tuple(shape), getattr(torch, dtype)) for stage, shape, dtype in about["tensor_specs"]}
    return worker_spec(job, tensor_specs=specs, file_transfer=None if sees_run else FileTransfer(endpoint))


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


def _find_job(out: Path, config: TrainConfig) -> tuple[str, int] | None:
    """The name and the start of the unfinished job in this folder, if it has the same configuration."""
    if not (found := _read_job(out)):
        return None
    if (out / SUMMARY).exists():
        raise FileProblem(f"{out} holds a run that is over: name another folder")
    if found.get("config") != config.to_toml():
        raise FileProblem(
            f"{out} holds a job with another configuration, which is not over: name another folder, or go on with it"
        )
    return str(found["job"]), int(found["begin_us"])


def _read_job(out: Path) -> dict[str, Any]:
    """The job file of a run folder; empty if this machine does not see it."""
    try:
        found = json.loads((out / _JOB).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or not 0 <= int(port) <= 65535:
        raise UserError(f"{text!r} is no address: write HOST:PORT, such as {_DEFAULT}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _token(path: Path, makes_one: bool) -> str:
    """The secret in a file that only its owner may read."""
    if not path.exists() and makes_one:
        token = new_token()
        try:
            path.touch(0o600, exist_ok=False)
            path.write_text(token + "\n", encoding="ascii")
        except OSError as problem:
            raise FileProblem(f"cannot write {path}: {problem.strerror or problem}") from None
        return token
    try:
        text, mode = path.read_text(encoding="utf-8").strip(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise FileProblem(f"cannot read the token in {path}: {reason}; copy the file from the coordinator's machine") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FileProblem(f"the token in {path} can be read by others on this machine: chmod 600 {path}")
    if not text:
        raise FileProblem(f"{path} holds no token: take a copy of the coordinator's")
    return text
