"""`recycle ray` and `recycle.integrations.ray.train`: a job whose workers are actors of a Ray cluster.

The process that calls `train` is Ray's driver. It runs the coordinator as a child process, and each worker as a `RayAgent`, an
actor in a placement group. An actor that is lost is made again: Ray starts it when the cluster has room for it, and its worker
joins the job, which has gone on meanwhile. Ray is imported when it is used.
"""

import json
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recycle.control.net.tls import TlsFiles
from recycle.control.net.wire import new_token
from recycle.core.errors import FileProblem, Stopped, UserError, WorkerFailed
from recycle.core.events.record_file import RECORD
from recycle.core.files import write_secret
from recycle.host.scratch import scratch
from recycle.host.stop_signals import stop_signals
from recycle.integrations.child_process import ChildProcess
from recycle.integrations.job_commands import JobCommands
from recycle.integrations.ray_agent import AgentSpec
from recycle.integrations.ray_cluster import AUTO, connected, import_ray, reserve
from recycle.integrations.ray_job import CoordinatedJob, find_job_file
from recycle.integrations.ray_launcher import RayLauncher, RayPlaces, refuse_hopeless
from recycle.runtime.launch.restart_policy import RestartPolicy
from recycle.runtime.launch.supervisor import Supervisor, WorkerSlot

if TYPE_CHECKING:
    from recycle.runtime.job import Job

_LOOK_S = 0.5
_KILL_S = 10.0
_AGAIN = "it comes back when the cluster has room for it, in {} s or later"
# Lines of the coordinator: what it says when it is ready, the sentence with which it ends, and how it is resumed by itself.
_READY = re.compile(r"((?:waiting for|found again) \d+ workers): ")
_PREFIX, _RESUME = "recycle coordinator: ", re.compile(r"recycle coordinator --resume .*")


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How a job runs on a Ray cluster.

    Attributes:
        address: Where the cluster is, HOST:PORT; auto is the one of this machine, or the one that RAY_ADDRESS names.
        cpus_per_worker: The CPUs that Ray reserves for each worker, beside its GPU if the job computes on GPUs.
        working_dir: A folder that Ray copies to every machine; workers run in the copy, and can import modules from it.
        port: Where the coordinator listens, on the address that this machine has in the cluster; 0 is a free port.
        wait_s: How long to wait until the cluster has room for all workers; None waits for ever.
        restarts: How often an hour a worker whose agent fails is started again. Lost machines do not count.
        grace_s: How long workers may take to leave.
        tls: Use TLS on control connections, with files that are at the same paths on every machine; each may have its own.
    """

    address: str = AUTO
    cpus_per_worker: float = 1.0
    working_dir: Path | str | None = None
    port: int = 0
    wait_s: float | None = None
    restarts: int = 5
    grace_s: float = 600.0
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        if self.cpus_per_worker <= 0:
            raise UserError(f"a worker cannot have {self.cpus_per_worker:g} CPUs: it needs more than 0")
        if self.working_dir is not None and not Path(self.working_dir).is_dir():
            raise FileProblem(f"there is no folder {self.working_dir} to copy to the machines of the cluster")


def train_on_ray(
    job: "Job | Path | str | None" = None,
    *,
    workers: int | None = None,
    out: Path | str | None = None,
    resume: Path | str | None = None,
    flags: Sequence[str] = (),
    options: RayOptions | None = None,
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Train a job on a Ray cluster to its end; `recycle.integrations.ray.train` is this function.

    Ctrl-C or SIGTERM lets the job write a checkpoint and end. Actors and placement groups are removed in any case.

    Args:
        job: A job file, or a `recycle.Job`. A job is pickled: modules that it needs must be installed on every machine.
        workers: How many workers; one for each place of the job if left out. More of them wait as spares.
        out: The run folder, on this machine.
        resume: The folder of a run to go on with, instead of `job` and `out`.
        flags: Flags of `recycle coordinator` that change the job, such as `("--steps", "100")`.
        options: Where the cluster is, and what workers need.
        say: Gets what happens; the error stream if left out.

    Returns:
        The summary of the run, as `recycle coordinator --json` prints it.

    Raises:
        UserError: The job, the cluster or an option cannot be used; `Stopped` if a signal ended the job before its last step.
    """
    if (resume is None) == (job is None or out is None):
        raise UserError("name a job and the folder of its run, or the folder of a run to resume")
    folder = Path(resume if resume is not None else out or "").resolve()
    import_ray()
    file = "" if job is None else str(find_job_file(job, folder))
    driver = _Driver(folder, resume is not None, workers, options or RayOptions(), say or _print)
    return driver.run(file, tuple(flags))


train = train_on_ray


class _Driver:
    """Runs the coordinator and the workers of one job. A signal may call `ask_to_stop` at any time."""

    def __init__(self, out: Path, resume: bool, num_workers: int | None, options: RayOptions, say: Callable[[str], None]) -> None:
        self._out, self._resume, self._options, self._say = out, resume, options, say
        self._num_workers = num_workers
        self._coordinator: ChildProcess | None = None
        self._deaths = RestartPolicy[str](options.restarts)
        self._stopped_by: signal.Signals | None = None
        self._is_ready = self._is_begun = False

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Let the job write a checkpoint and end."""
        self._stopped_by = number
        self._say(f"{number.name}: the job ends after the present step, with a checkpoint; a second signal ends it at once")
        if self._coordinator is not None:
            self._coordinator.ask_to_stop()

    def run(self, file: str, flags: tuple[str, ...]) -> dict[str, Any]:
        """Run the job to its end, and return its summary; raises if it fails or is stopped."""
        options = self._options
        with ExitStack() as stack:
            ray = stack.enter_context(connected(options.address, options.working_dir))
            stack.enter_context(stop_signals(self.ask_to_stop))  # only now, because Ray sets handlers of its own
            folder, host, token = stack.enter_context(scratch()), str(ray.util.get_node_ip_address()), new_token()
            token_file = write_secret(folder / "token", token)
            port = options.port or _free_port(host)
            commands = JobCommands(file, str(self._out), str(token_file), port, flags, tls=options.tls)
            command = (commands.resumed_coordinator if self._resume else commands.coordinator)(host)
            self._start_coordinator = partial(ChildProcess, [*command, "--json"], self._heard, folder / "summary")
            stack.callback(self._end_coordinator)
            self._coordinator = self._start_coordinator()
            if self._stopped_by is not None:  # since then it was asked to stop, and did not know of the coordinator
                self._coordinator.ask_to_stop()
            while not self._is_ready and not self._is_over():
                time.sleep(_LOOK_S / 10)
            if self._is_ready:
                self._run_workers(ray, AgentSpec(commands, host, token))
            return self._summary(folder / "summary")

    def _run_workers(self, ray: Any, spec: AgentSpec) -> None:
        """Run the workers until the coordinator has ended; nothing of them is left then."""
        job, options = CoordinatedJob.read(self._out), self._options
        num_workers = self._num_workers or job.num_places
        job.refuse_too_few(num_workers)
        commands = replace(spec.commands, file=job.file.name, workers_per_machine=1, grace_s=options.grace_s, gpus=job.gpus)
        needs = job.needs(options.cpus_per_worker)
        with ExitStack() as stack:
            reserved = reserve(ray, num_workers, needs, options.wait_s, self._say, self._is_over)
            if reserved is None:
                return
            places = RayPlaces(ray, num_workers, needs, reserved)
            stack.callback(places.remove)
            launcher = RayLauncher(places, replace(spec, commands=commands), job.read_files(), self._say)
            stack.callback(launcher.end)
            slots = [WorkerSlot(number) for number in range(num_workers)]
            workers = Supervisor(launcher, slots, options.restarts, self._say, _AGAIN)
            stack.callback(self._end_coordinator)
            while not self._is_over():
                workers.step(_LOOK_S)
                refuse_hopeless(workers, job.num_places, self._has_begun())

    def _heard(self, line: str) -> None:
        """Pass on a line of the coordinator, but for what only concerns commands that this one replaces."""
        if ready := _READY.search(line):
            self._is_ready = True
            line = ready[1]
        if not line.startswith(_PREFIX):
            self._say(line)

    def _has_begun(self) -> bool:
        """Whether the job has done a step; a job that has begun goes on with fewer workers."""
        if not self._is_begun:
            with suppress(OSError), (self._out / RECORD).open("rb") as stream:
                self._is_begun = any(b'"event":"step"' in line for line in stream)
        return self._is_begun

    def _is_over(self) -> bool:
        """Whether the coordinator has ended; one that was killed is started again, and takes over its job."""
        assert self._coordinator is not None
        code = self._coordinator.poll()
        if code is None or code >= 0 or self._stopped_by is not None:
            return code is not None
        pause_s = self._deaths.pause_s("coordinator", time.monotonic())
        if pause_s is None:
            return True
        self._say(f"the coordinator was killed by {signal.Signals(-code).name}; another one takes over")
        time.sleep(pause_s)
        self._coordinator = self._start_coordinator()
        return False

    def _end_coordinator(self) -> None:
        """End the coordinator if it runs, as after an error."""
        if self._coordinator is not None and self._coordinator.poll() is None:
            self._coordinator.ask_to_stop()
            if self._coordinator.wait(_KILL_S) is None:
                self._coordinator.kill()

    def _summary(self, path: Path) -> dict[str, Any]:
        """The summary that the coordinator has written; raises with the sentence with which it ended if it did not end well."""
        assert self._coordinator is not None
        code, lines = self._coordinator.poll(), self._coordinator.last_lines
        if code == 0:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        tls = self._options.tls
        again = shlex.join(["recycle", "ray", "--resume", str(self._out), *(tls.flags() if tls is not None else [])])
        sentence = lines[-1] if lines else "the coordinator ended, and said nothing"
        sentence = _RESUME.sub(lambda _: again, sentence.removeprefix(_PREFIX))
        if self._stopped_by is not None:
            has_reason = bool(lines) and lines[-1].startswith(_PREFIX)
            raise Stopped(sentence if has_reason else "stopped before the first step", self._stopped_by)
        problem = UserError(sentence)
        problem.exit_code = code if code is not None and code > 0 else WorkerFailed.exit_code
        raise problem


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _print(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
