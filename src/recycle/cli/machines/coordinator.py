"""`recycle coordinator`: the process that coordinates a job on several machines."""

import argparse
import json
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from recycle.cli.arguments import Subparsers, add_command, output_path
from recycle.cli.live.page_process import add_page_arguments
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
from recycle.cli.machines.store_flags import add_store_arguments, read_store, write_store_flags
from recycle.cli.machines.store_job import LedJob, describe_end, new_job
from recycle.cli.training.plan_choice import choose_source
from recycle.cli.training.train import config_and_folder, describe_run, loggers_of, observers_of_config, prepare, refuse_unsaved
from recycle.cli.training.train_config import TrainConfig, add_config_arguments, parse_config
from recycle.control.net.handshake import Endpoint
from recycle.control.net.listener import BACKLOG, reserve_address
from recycle.control.net.wire import new_name
from recycle.core.errors import FileProblem, NoCheckpoint, Stopped, UserError, WorkerFailed
from recycle.core.events.record import Event
from recycle.core.events.record_file import CHECKPOINTS, JOB, SUMMARY
from recycle.core.files import write_text
from recycle.host.folder_lock import locked
from recycle.planner.shared_layers_choice import AUTO

_DESCRIPTION = """\
Coordinate a job whose workers are started elsewhere, by 'recycle agent' on every machine. It waits until every place of the plan
has its worker; from then on workers may die and come back at any time. If the coordinator itself is killed, workers go on
training: start it again with the same arguments, and it continues its job. With --store, coordinators run on two or three
machines, and one leads; if it dies with its machine, another one goes on."""
_EXAMPLES = """\
examples:
  on one machine
    recycle coordinator train.py --listen 10.0.0.1:29400 --token-file token --out runs/a
  on every machine, with copies of train.py and of the token that it wrote (a secret)
    recycle agent 10.0.0.1:29400 train.py --token-file token
  go on with a run that was stopped, from its last checkpoint
    recycle coordinator --resume runs/a --listen 10.0.0.1:29400 --token-file token
  on three machines, each with its own address, a copy of the token, and etcd on the same or other machines; one of them leads
    recycle coordinator train.py --listen 10.0.0.1:29400 --token-file token --out runs/a \\
      --store etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379/jobs/a
    recycle agent 10.0.0.1:29400,10.0.0.2:29400,10.0.0.3:29400 train.py --token-file token

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
    add_store_arguments(parser)
    about = "begin a new job at the prefix of --store, in place of one that is over or that nobody leads"
    parser.add_argument("--anew", action="store_true", help=about)
    parser.add_argument("--out", type=output_path, metavar="FOLDER", help="record the run there, with checkpoints")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder, from its last checkpoint")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    add_page_arguments(parser, may_inject=False)


def run_coordinator(args: argparse.Namespace) -> None:
    config, out = config_and_folder(args)
    if out is None:
        raise UserError("name the folder of the run: a new one with --out, or one to go on with by --resume")
    if args.anew and not args.store:
        raise UserError("--anew begins a new job at the prefix of --store, but there is no --store: leave --anew out")
    host, port = read_address(args.listen)
    advertised = read_address(args.advertise) if args.advertise else None
    token, tls, store = read_token(args.token_file, makes_one=True), read_tls(args), read_store(args)
    factory, plan = prepare(_settled(config, out, has_store=store is not None), is_local=False)
    config = factory.config
    from recycle.runtime.callbacks.watched_run import run_start, watched
    from recycle.runtime.coordinator.process import serve_job
    from recycle.runtime.launch.configure import coordinator_config

    with reserve_address(host, port) as listener:
        reached_at = advertised or (socket.gethostname() if host in _ALL_ADDRESSES else host, listener.getsockname()[1])
        led = None
        if store is not None:
            lease_s = factory.job(plan, out).options.failures.lease_s
            own = new_job(args.resume is not None, config, factory.code, token)
            if (led := LedJob.lead(store, args.anew, write_address(*reached_at), lease_s, own)) is None:
                return
        found = _find_led_job(led, out) if led is not None else _find_job(out, config, args.resume is not None)
        if found is None and args.resume is not None and (facts := _finished_run(out, config.training.steps)):
            if led is not None:
                led.conclude(describe_end(facts, config.training.steps))
            print(json.dumps(facts) if args.json else describe_run(facts, out))
            print(f"all {facts['steps']} steps of this run are done: --steps N goes on to step N", file=sys.stderr)
            return
        begun, is_takeover = found or _begin_job(led, out, args.resume is not None), found is not None
        job = factory.job(plan, out, begun.is_resumed, factory.plan_source or choose_source(plan, config.cluster))
        serves_machines = not is_loopback(advertised[0] if advertised else host)
        about = describe_job(begun.name, factory, job, serves_machines, sends_files=led is not None)
        start = partial(run_start, out, begun.is_resumed, is_takeover)
        with (
            observers_of_config(args, config, plan, out) as view,
            watched(view.observers, loggers_of(config, out), start, view.warn) as watch,
        ):
            endpoint, moves = Endpoint(host, port, token, begun.name, tls), bool(about["layer_specs"])
            coordinator = coordinator_config(job, endpoint, begun.begin_us, out, about=about, moves_layers=moves)
            if not is_takeover or not read_job(out):
                # Locked, else the job of another coordinator, which has this folder, would lose its name.
                with locked(out, is_required=led is None):
                    begun.write(out, config, len(plan.rows), dict(factory.code))
            file = f" {Path(config.job.file).name}" if config.job.file else ""
            command = f"recycle agent {write_address(*reached_at)}{file} --token-file {args.token_file.name}"
            view.say(f"{'found again' if is_takeover else 'waiting for'} {len(plan.rows)} workers: {command}")
            listener.listen(BACKLOG)
            sink = _NoticeSink(watch.on_event)
            serve_job(coordinator, listener, sink, () if is_takeover else None, store=led.store if led is not None else None)
            if sink.trained is not None:
                watch.ended(sink.trained)
    _conclude(args, sink, watch.warnings, led, out, config.training.steps)


def _settled(config: TrainConfig, out: Path, has_store: bool) -> TrainConfig:
    """The configuration with as many shared layers as the job in this folder has, if it says `auto`.

    All coordinators of a job must come to the same number, and what one measures another may not.
    """
    if config.cluster.shared_layers != AUTO:
        return config
    if has_store:
        raise UserError("cluster.shared_layers is auto, which coordinators of one store may choose differently: give a number")
    found = read_job(out).get("config")
    if not isinstance(found, str):
        return config
    known = parse_config(found).cluster.shared_layers
    return replace(config, cluster=replace(config.cluster, shared_layers=known))


def _conclude(
    args: argparse.Namespace, sink: "_NoticeSink", warnings: Sequence[str], led: LedJob | None, out: Path, num_steps: int
) -> None:
    """Print the summary of the job, or raise the error with which it ended; with a store, note the end there."""
    try:
        facts = sink.summary()
        facts["warnings"] += warnings
    except UserError as problem:
        if led is not None:
            led.conclude(f"it failed: {problem}" if sink.ends_job else "")
        raise
    if led is not None:
        led.conclude(describe_end(facts, num_steps))
    print(json.dumps(facts) if args.json else describe_run(facts, out))
    flags = f"{write_tls_flags(args)}{write_store_flags(args)}"
    again = f"recycle coordinator --resume {out} --listen {args.listen} --token-file {args.token_file}{flags}"
    if facts["steps"] < num_steps and not facts["stopped_because"]:
        sentence = f"stopped after step {facts['steps']} of {num_steps}, and all workers with it"
        raise Stopped(f"{sentence}; go on with: {again}", signal.SIGTERM)
    refuse_unsaved(facts, again)


def _find_led_job(led: LedJob, out: Path) -> "_BegunJob | None":
    """The job of the store that this coordinator takes over, None if it is new. Its folder may be on a machine that is gone."""
    here = read_job(out).get("job")
    if not led.is_takeover:
        if here is not None and not led.job.is_resumed:
            led.conclude("")
            raise FileProblem(f"{out} holds another run: name another folder, or go on with it by --resume {out}")
        return None
    if here not in (None, led.job.job):
        led.conclude("")
        raise FileProblem(f"{out} holds another job than {led.job.job}, which is that of the store: name another folder")
    return _BegunJob(led.job.job, led.begin_us(), led.refuse_missing_checkpoint(out))


def _begin_job(led: LedJob | None, out: Path, resume: bool) -> "_BegunJob":
    from recycle.runtime.checkpoint.files import find_checkpoints
    from recycle.runtime.execute.spans import now_us

    if resume and not find_checkpoints(out / CHECKPOINTS):
        if led is not None:
            led.conclude("")
        with locked(out):  # which says so if another run is using it, and has not written its first checkpoint yet
            raise NoCheckpoint(f"there is no checkpoint in {out / CHECKPOINTS}: start the run anew, without --resume")
    return _BegunJob(led.job.job if led is not None else new_name(), now_us(), resume)


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

    @property
    def trained(self) -> Any:
        """The summary of the job, if it has ended well."""
        return getattr(self._last, "trained", None)

    @property
    def ends_job(self) -> bool:
        """Whether the job is over by the last notice, and not only this coordinator's part in it."""
        return self._last is not None and getattr(self._last, "is_over", True)

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
