"""`recycle coordinator` and `recycle worker`: a job on several machines, one coordinator and a worker for every seat."""

import argparse
import json
import os
import stat
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.cli.training.job_factory import CONFIG, TrainingJobFactory
from recycle.cli.training.plan_choice import choose_plan, choose_source
from recycle.cli.training.train_config import TrainConfig, add_config_arguments, parse_config, read_config
from recycle.control.net.server import listen
from recycle.control.net.wire import new_name, new_token
from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem, UserError, WorkerFailed
from recycle.core.events.record import SUMMARY
from recycle.core.files import write_text
from recycle.core.plans.plan import Plan
from recycle.host.scratch import scratch

if TYPE_CHECKING:
    from recycle.control.net.handshake import Endpoint
    from recycle.runtime.job import Job
    from recycle.runtime.worker.worker_spec import WorkerSpec

_COORDINATOR = """\
Coordinate a job whose workers are started elsewhere, each with 'recycle worker'. It waits until every place of the plan has its
worker; from then on workers may die and come back at any time. If the coordinator itself is killed, workers go on training:
start it again with the same words, and it finds its job again."""
_COORDINATOR_EXAMPLES = """\
examples:
  on one machine
    recycle coordinator --pipelines 2 --stages 2 --steps 50 --listen 10.0.0.1:29400 --token-file token --out runs/a
  with a copy of the file that it wrote (its contents are a secret), on every machine, once for each worker
    recycle worker 10.0.0.1:29400 --token-file token

Without --listen only this machine is listened to. Machines need not share a disk: a worker that sees the folder of the run writes
its checkpoints there, and any other sends them to the coordinator, and gets them back from it when they are needed."""
_WORKER = """\
Take part in a job that 'recycle coordinator' runs. What is trained comes from there. A worker that is started while the job
runs takes a free place at the next step, and copies its stage's state from a peer."""
_WORKER_EXAMPLES = """\
examples:
  recycle worker 10.0.0.1:29400 --token-file token
  recycle worker 10.0.0.1:29400 --token-file token --seat W1_2"""
_JOB = "job.json"
_DEFAULT = "127.0.0.1:29400"


def add_coordinator_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "coordinator",
        usage="recycle coordinator [CONFIG] [options]",
        help="coordinate a job on several machines",
        description=_COORDINATOR,
        epilog=_COORDINATOR_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    parser.add_argument("--listen", default=_DEFAULT, metavar="HOST:PORT", help=f"where workers connect to ({_DEFAULT})")
    _add_token(parser, "the job's secret; made if there is no such file")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="record the run there, with checkpoints")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    parser.set_defaults(run=run_coordinator)


def add_worker_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "worker",
        help="take part in a job on several machines",
        description=_WORKER,
        epilog=_WORKER_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", metavar="HOST:PORT", help="where the coordinator listens")
    _add_token(parser, "the job's secret, as the coordinator wrote it")
    parser.add_argument("--seat", default="", metavar="W1_2", help="the place it would like; any free one if left out")
    parser.set_defaults(run=run_worker)


def _add_token(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("--token-file", type=Path, required=True, metavar="FILE", help=about)


def run_coordinator(args: argparse.Namespace) -> int:
    from recycle.cli.training.train import watching
    from recycle.control.net.handshake import Endpoint
    from recycle.runtime.coordinator.config import (
        JOURNAL,
        EventsRecorded,
        JobDone,
        JobFailed,
        Notice,
        WorkerLost,
        coordinator_config,
    )
    from recycle.runtime.coordinator.ledger.run_folder import RunFolderOptions
    from recycle.runtime.coordinator.service import serve_job
    from recycle.runtime.execute.spans import now_us

    config = read_config(args)
    host, port = _address(args.listen)
    token = _token(args.token_file, makes_one=True)
    parts = TrainingJobFactory(config)
    plan = choose_plan(config.cluster, parts.measured() if config.cluster.measure else None)
    job = parts.job(plan)
    found = _found_again(args.out, config)
    name, begin_us = found or (new_name(), now_us())
    door = Endpoint(host, port, token, name)
    about = print_notice(name, config, job, args.out)
    plot = RunFolderOptions(
        args.out, config.checkpoint.every, config.checkpoint.keep, name=parts.name, files={CONFIG: config.to_toml()}
    )
    outcome: list[Notice] = []
    with listen(host, port) as listener, watching(config, plan, args.out, resume=False) as (watch, say):

        class Mouth:
            def send(self, said: Notice) -> None:
                if isinstance(said, EventsRecorded):
                    for event in said.events:
                        watch(event)
                elif isinstance(said, JobDone | JobFailed | WorkerLost):
                    outcome.append(said)

        source = choose_source(plan, config.cluster)
        journal = args.out / JOURNAL
        brief = coordinator_config(job, door, source, config.cluster.lease, plot, begin_us=begin_us, journal=journal, about=about)
        if found is None:
            told = {"job": name, "begin_us": begin_us, "config": config.to_toml()}
            write_text(args.out / _JOB, json.dumps(told) + "\n")
        where = listener.getsockname()
        say(f"{'found again' if found else 'waiting for'} {len(plan.rows)} workers: recycle worker {where[0]}:{where[1]}")
        serve_job(brief, listener, Mouth(), () if found else None)
    return _ended(outcome, args)


def _ended(outcome: list[Any], args: argparse.Namespace) -> int:
    from recycle.cli.training.train import describe
    from recycle.runtime.coordinator.config import JobDone, JobFailed, WorkerLost

    match outcome:
        case [JobDone(trained)]:
            facts = trained.to_json()
            print(json.dumps(facts) if args.json else describe(facts, args.out))
            return 0
        case [JobFailed(problem)]:
            raise problem
        case [WorkerLost(_, text)]:
            raise WorkerFailed(text)
    raise WorkerFailed("the coordinator ended before the job did")


def run_worker(args: argparse.Namespace) -> int:
    from recycle.control.net.handshake import Endpoint
    from recycle.runtime.launch.forkserver import settle_in

    host, port = _address(args.address)
    seat = str(Worker.parse(args.seat)) if args.seat else ""
    door = Endpoint(host, port, _token(args.token_file, makes_one=False))
    settle_in()
    import recycle.runtime.launch.preload  # noqa: F401  before the coordinator waits for signs of life
    from recycle.runtime.worker.worker import join_job

    with scratch() as folder:
        join_job(door, seat, partial(make_worker_spec, door, folder))
    return 0


def print_notice(name: str, config: TrainConfig, job: "Job", out: Path) -> dict[str, Any]:
    """What a coordinator says of its job to every worker, from which that makes its kit."""
    from recycle.runtime.checkpoint.files import plain

    parcels = [[stage, list(one.shape), str(one.dtype).removeprefix("torch.")] for stage, one in job.parcels().items()]
    return {
        "job": name,
        "config": config.to_toml(),
        "plan": job.plan.dumps(),
        "out": str(out.resolve()),
        "parcels": parcels,
        "fingerprint": plain(job.fingerprint()),
    }


def make_worker_spec(door: "Endpoint", folder: Path, about: Any) -> "WorkerSpec":
    """What a worker needs, from what the coordinator says of the job; `folder` is for files on their way."""
    import torch

    from recycle.control.net.file_transfer import FileTransfer
    from recycle.runtime.checkpoint.files import plain
    from recycle.runtime.checkpoint.resume import differing
    from recycle.runtime.coordinator.ledger.run_folder import RunFolderOptions
    from recycle.runtime.transport.specs import TensorSpec
    from recycle.runtime.worker.worker_spec import CopiedStages, worker_spec

    config = parse_config(about["config"])
    job = TrainingJobFactory(config).job(Plan.parse(about["plan"]))
    parcels = {int(stage): TensorSpec(tuple(shape), getattr(torch, dtype)) for stage, shape, dtype in about["parcels"]}
    if differences := [*differing(about["fingerprint"], plain(job.fingerprint()))]:
        raise UserError(
            f"this machine would train something else: the job's {differences[0][0]} is {differences[0][1]}, and here it is "
            f"{differences[0][2]}; give all machines the same Python, packages and data"
        )
    out = Path(about["out"])
    is_seen = _job_in(out).get("job") == about["job"]
    plot = RunFolderOptions(out if is_seen else folder, config.checkpoint.every, config.checkpoint.keep)
    kit = worker_spec(job, CopiedStages(job.stages), parcels, plot.saving)
    return kit if is_seen else replace(kit, courier=FileTransfer(door))


def _found_again(out: Path, config: TrainConfig) -> tuple[str, int] | None:
    """The name and the beginning of the job that was being run in this folder by the same words, and is not over."""
    if not (found := _job_in(out)):
        return None
    if (out / SUMMARY).exists():
        raise FileProblem(f"{out} holds a run that is over: name another folder")
    if found.get("config") != config.to_toml():
        raise FileProblem(
            f"{out} holds a job with another configuration, which is not over: name another folder, or go on with it"
        )
    return str(found["job"]), int(found["begin_us"])


def _job_in(out: Path) -> dict[str, Any]:
    """What a run's folder says of its job; nothing if it is not there, or not seen from here."""
    try:
        found = json.loads((out / _JOB).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise UserError(f"{text!r} is no address: write HOST:PORT, such as {_DEFAULT}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _token(path: Path, makes_one: bool) -> str:
    """The secret in a file that nobody else may read."""
    if not path.exists() and makes_one:
        token = new_token()
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as problem:
            raise FileProblem(f"cannot write {path}: {problem.strerror or problem}") from None
        with os.fdopen(handle, "w", encoding="ascii") as stream:
            stream.write(token + "\n")
        return token
    try:
        text, mode = path.read_text(encoding="utf-8").strip(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise FileProblem(f"cannot read the token in {path}: {reason}") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FileProblem(f"the token in {path} can be read by others on this machine: chmod 600 {path}")
    if not text:
        raise FileProblem(f"{path} holds no token: take a copy of the coordinator's")
    return text
