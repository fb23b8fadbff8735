"""`recycle coordinator`: the process that coordinates a job on several machines."""

import argparse
import json
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.cli.machines.endpoint_flags import (
    DEFAULT_ADDRESS,
    add_tls_arguments,
    is_loopback,
    read_address,
    read_tls,
    read_token,
    write_address,
    write_tls_flags,
)
from recycle.cli.machines.job_description import describe_job, read_job
from recycle.cli.training.plan_choice import choose_source
from recycle.cli.training.train import config_and_folder, describe_run, prepare, refuse_unsaved, watching
from recycle.cli.training.train_config import TrainConfig, add_config_arguments
from recycle.control.net.handshake import Endpoint
from recycle.control.net.listener import listen
from recycle.control.net.wire import new_name
from recycle.core.errors import FileProblem, Stopped, UserError, WorkerFailed
from recycle.core.events.record import Event
from recycle.core.events.record_file import JOB, SUMMARY
from recycle.core.files import write_text
from recycle.host.folder_lock import locked

_DESCRIPTION = """\
Coordinate a job whose workers are started elsewhere, by 'recycle agent' on every machine. It waits until every place of the plan
has its worker; from then on workers may die and come back at any time. If the coordinator itself is killed, workers go on
training: start it again with the same arguments, and it continues its job."""
_EXAMPLES = """\
examples:
  on one machine
    recycle coordinator train.py --listen 10.0.0.1:29400 --token-file token --out runs/a
  on every machine, with copies of train.py and of the token that it wrote (a secret)
    recycle agent 10.0.0.1:29400 train.py --token-file token
  go on with a run that was stopped, from its last checkpoint
    recycle coordinator --resume runs/a --listen 10.0.0.1:29400 --token-file token

Without --listen only this machine is listened to. Machines need not share a disk: a worker that sees the folder of the run writes
its checkpoints there, and any other sends them to the coordinator, and gets them back from it when they are needed."""
_ALL_ADDRESSES = ("0.0.0.0", "::")


def add_coordinator_parser(subparsers: Subparsers) -> None:
    summary, usage = "coordinate a job on several machines", "recycle coordinator [FILE] [options]"
    parser = add_command(subparsers, "coordinator", run_coordinator, summary, _DESCRIPTION, _EXAMPLES, usage)
    add_config_arguments(parser)
    parser.add_argument(
        "--listen", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=f"where workers connect to ({DEFAULT_ADDRESS})"
    )
    about = "the address by which workers reach it, if that is another one, as behind a forwarded port"
    parser.add_argument("--advertise", default="", metavar="HOST:PORT", help=about)
    about = "the job's secret; made if there is no such file"
    parser.add_argument("--token-file", type=Path, required=True, metavar="FILE", help=about)
    add_tls_arguments(parser)
    parser.add_argument("--out", type=output_path, metavar="FOLDER", help="record the run there, with checkpoints")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder, from its last checkpoint")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run_coordinator(args: argparse.Namespace) -> None:
    config, out = config_and_folder(args)
    if out is None:
        raise UserError("name the folder of the run: a new one with --out, or one to go on with by --resume")
    host, port = read_address(args.listen)
    advertised = read_address(args.advertise) if args.advertise else None
    token, tls = read_token(args.token_file, makes_one=True), read_tls(args)
    factory, plan = prepare(config)
    config = factory.config
    from recycle.runtime.coordinator.process import serve_job
    from recycle.runtime.execute.spans import now_us
    from recycle.runtime.launch.configure import coordinator_config

    begun = _find_job(out, config, args.resume is not None)
    if begun is None and args.resume is not None and (facts := _finished_run(out, config.training.steps)):
        print(json.dumps(facts) if args.json else describe_run(facts, out))
        return
    found = begun or _BegunJob(new_name(), now_us(), args.resume is not None)
    job = factory.job(plan, out, found.is_resumed, factory.plan_source or choose_source(plan, config.cluster))
    about = describe_job(found.name, factory, job, serves_machines=not is_loopback(advertised[0] if advertised else host))
    with listen(host, port) as listener, watching(config, plan, out, found.is_resumed) as (watch, say):
        coordinator = coordinator_config(job, Endpoint(host, port, token, found.name, tls), found.begin_us, out, about=about)
        if begun is None:
            with locked(out):  # else the job of another coordinator, which has this folder, would lose its name
                found.write(out, config, len(plan.rows), dict(factory.code))
        reached_at = advertised or (socket.gethostname() if host in _ALL_ADDRESSES else host, listener.getsockname()[1])
        file = f" {Path(config.job.file).name}" if config.job.file else ""
        command = f"recycle agent {write_address(*reached_at)}{file}"
        say(f"{'found again' if begun else 'waiting for'} {len(plan.rows)} workers: {command}")
        sink = _NoticeSink(watch)
        serve_job(coordinator, listener, sink, () if begun else None)
    facts = sink.summary()
    print(json.dumps(facts) if args.json else describe_run(facts, out))
    again = f"recycle coordinator --resume {out} --listen {args.listen} --token-file {args.token_file}{write_tls_flags(args)}"
    if facts["steps"] < config.training.steps:
        sentence = f"stopped after step {facts['steps']} of {config.training.steps}, and all workers with it"
        raise Stopped(f"{sentence}; go on with: {again}", signal.SIGTERM)
    refuse_unsaved(facts, again)


def _finished_run(out: Path, num_steps: int) -> dict[str, Any]:
    """The summary of a run that has done and saved all its steps, so that it needs no workers; else empty."""
    try:
        facts = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
        return dict(facts) if facts["steps"] == facts["saved_steps"] == num_steps else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


@dataclass(frozen=True, slots=True)
class _BegunJob:
    """A job that a coordinator has begun: another one can take it over, as long as it is not over."""

    name: str
    begin_us: int
    is_resumed: bool

    def write(self, out: Path, config: TrainConfig, num_workers: int, code: dict[str, str]) -> None:
        """Write the job to the run folder, with the files that its machines need: their digests by their paths."""
        (out / SUMMARY).unlink(missing_ok=True)  # of the run that is resumed
        facts = {"job": self.name, "begin_us": self.begin_us, "resumed": self.is_resumed, "config": config.to_toml()}
        facts |= {"workers": num_workers, "device": config.training.device, "code": code}
        write_text(out / JOB, json.dumps(facts) + "\n")


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


def _find_job(out: Path, config: TrainConfig, resume: bool) -> _BegunJob | None:
    """The job in this folder that has begun and is not over, if it has the same configuration; without it, a run is resumed."""
    found = read_job(out)
    is_same, is_over = found.get("config") == config.to_toml(), (out / SUMMARY).exists()
    if not found or (resume and (is_over or not is_same)):
        return None
    if is_over:
        raise FileProblem(f"{out} holds a run that is over: name another folder, or go on with it by --resume {out}")
    if not is_same:
        raise FileProblem(
            f"{out} holds a job with another configuration, which is not over: name another folder, or go on with it"
        )
    return _BegunJob(str(found["job"]), int(found["begin_us"]), bool(found.get("resumed")))
