"""torchft's side of the benchmark beside it: a lighthouse, and replica groups of one process each, one of which is killed.

All are processes of the fork server that starts ReCycle's workers, so that both sides have the same allocator, and one thread in
each replica. Every wait has a deadline, and no process outlives its run.
"""

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from recovery_cases import TimeLimitExceeded
from runtime_cases import SAMPLES, adamw
from torchft_cases import VICTIM, AppliedStep, KilledRun, Trial, middle_of_next_us, unseen_loss

from recycle.host.process_lifetime import end_with_parent, interrupts_held
from recycle.models.gpt import next_byte_loss
from recycle.runtime.execute.spans import now_us
from recycle.runtime.launch.forkserver import fork_context

# A survivor that waits for another one, which has noticed the death and left, waits for so long; torchft's default is a minute.
COLLECTIVE_TIMEOUT_S = 5
_HOST = "127.0.0.1"
_GONE_S = 5.0
_LOG_CHARACTERS = 6000
_TELEMETRY = {
    "opentelemetry._logs": ("set_logger_provider",),
    "opentelemetry.exporter.otlp.proto.http._log_exporter": ("OTLPLogExporter",),
    "opentelemetry.sdk._logs": ("LoggerProvider", "LoggingHandler", "ReadableLogRecord"),
    "opentelemetry.sdk._logs.export": (
        "BatchLogRecordProcessor",
        "ConsoleLogRecordExporter",
        "LogRecordExporter",
        "LogRecordExportResult",
    ),
    "opentelemetry.sdk.resources": ("Resource",),
}


def load_torchft() -> ModuleType:
    """Import torchft. It imports OpenTelemetry, but uses it only if TORCHFT_USE_OTEL says so: empty classes will do.

    Raises:
        ImportError: There is no torchft here, or not for this Python.
    """
    for name, members in _TELEMETRY.items():
        try:
            importlib.import_module(name)
        except ImportError:
            module = ModuleType(name)
            for member in members:
                setattr(module, member, type(member, (), {}))
            sys.modules[name] = module
    return importlib.import_module("torchft")


@dataclass(frozen=True, slots=True)
class ReplicaStep:
    """A step of one replica of torchft, committed or not."""

    number: int
    start_us: int
    end_us: int
    num_replicas: int
    is_committed: bool


@dataclass(frozen=True, slots=True)
class _Failed:
    """The last message of a process that has failed."""

    text: str


class _Replica:
    """One of torchft's replica groups, of one process.

    The gradients go through `Manager.allreduce` as one tensor, and not through torchft's DistributedDataParallel, which in 0.2.0
    ends the survivors: over gloo, its hook asserts a future that a failed reduction does not have.
    """

    def __init__(self, trial: Trial, place: int, lighthouse: str) -> None:
        torchft, patience = load_torchft(), timedelta(seconds=trial.limit_s)
        self._trial, self._place = trial, place
        self._batches = trial.sizes.batches()
        self.model = trial.sizes.gpt()[0]
        self._parameters = list(self.model.parameters())
        self._plain = adamw(self._parameters)
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._manager = torchft.Manager(
            torchft.ProcessGroupGloo(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S)),
            self._load_state,
            self._state,
            min_replica_size=trial.sizes.pipelines - 1,
            timeout=patience,
            quorum_timeout=patience,
            connect_timeout=patience,
            rank=0,
            world_size=1,
            store_addr=_HOST,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{place}",
            hostname=_HOST,
            init_sync=False,  # all begin with the same weights
        )
        self._optimizer = torchft.Optimizer(self._manager, self._plain)

    @property
    def num_samples(self) -> int:
        committed: int = self._manager.batches_committed()
        return committed * self._trial.sizes.microbatches * SAMPLES

    def step(self) -> ReplicaStep:
        """Try the next step. Its samples depend on its number, so that one that is not committed is tried with the same ones."""
        number, start_us, num_microbatches = self._manager.current_step(), now_us(), self._trial.sizes.microbatches
        self._optimizer.zero_grad()
        for index in range(num_microbatches):
            inputs, targets = self._batches.get(number, self._place, index)
            torch.autograd.backward([next_byte_loss(self.model(inputs), targets) / num_microbatches])
        self._reduce()
        self._optimizer.step()
        is_committed = self._manager.current_step() > number
        return ReplicaStep(number, start_us, now_us(), self._manager.num_participants(), is_committed)

    def _reduce(self) -> None:
        """Replace the gradients by their mean over the replicas."""
        flat = torch.cat([parameter.grad.flatten() for parameter in self._parameters if parameter.grad is not None])
        self._manager.allreduce(flat).wait()
        for parameter, part in zip(self._parameters, torch.split(flat, [own.numel() for own in self._parameters]), strict=True):
            parameter.grad = part.view(parameter.shape)

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._plain.state_dict()}

    def _load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._plain.load_state_dict(state["optimizer"])


def _train_replica(pipe: Connection, trial: Trial, place: int, lighthouse: str) -> None:
    replica = _Replica(trial, place, lighthouse)
    pipe.send("ready")
    pipe.recv()
    while replica.num_samples < trial.num_samples:
        pipe.send(replica.step())
    pipe.send(unseen_loss(trial.sizes, replica.model))
    pipe.recv()  # until this process is ended


def _serve_lighthouse(pipe: Connection, trial: Trial) -> None:
    load_torchft()
    coordination = importlib.import_module("torchft.coordination")
    server = coordination.LighthouseServer("[::]:0", trial.sizes.pipelines - 1, join_timeout_ms=trial.join_ms)
    # By number: the machine's name, which torchft would use, need not be known to the resolver.
    pipe.send(f"http://{_HOST}:{urlsplit(server.address()).port}")
    pipe.recv()


def _run_child(log: Path, pipe: Connection, run: Callable[..., None], arguments: Sequence[Any]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; the parent ends this one
    with log.open("wb") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        run(pipe, *arguments)
    except EOFError:  # the parent has ended, or is about to end this process
        return
    except Exception:
        pipe.send(_Failed(traceback.format_exc()))


@dataclass(slots=True)
class _Child:
    """A process of torchft's side, with what it has reported of its steps."""

    name: str
    process: BaseProcess
    pipe: Connection
    log: Path
    steps: list[ReplicaStep] = field(default_factory=list)

    def receive(self, deadline_s: float) -> Any:
        """The next message; raises if the process has failed or ended, or sends none in time."""
        if not self.pipe.poll(max(0.0, deadline_s - time.monotonic())):
            raise TimeLimitExceeded(self._told("said nothing in time"))
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_GONE_S)
            raise RuntimeError(self._told(f"ended with exit code {self.process.exitcode}")) from None
        if isinstance(message, _Failed):
            raise RuntimeError(self._told(f"failed:\n{message.text}"))
        return message

    def _told(self, problem: str) -> str:
        return f"torchft's {self.name} {problem}\nThe end of its log:\n{self.log.read_text(errors='replace')[-_LOG_CHARACTERS:]}"


Start = Callable[..., _Child]


@contextmanager
def _children() -> Iterator[Start]:
    """A function that starts a process; all have ended when the context is left."""
    started: list[_Child] = []
    context = fork_context(["recycle.models.gpt"])
    with TemporaryDirectory() as folder:

        def start(name: str, run: Callable[..., None], *arguments: Any) -> _Child:
            own, other = context.Pipe()
            log = Path(folder) / name
            log.touch()
            process = context.Process(target=_run_child, args=(log, other, run, arguments), daemon=True, name=name)
            with interrupts_held():
                process.start()
                started.append(_Child(name, process, own, log))
            other.close()
            return started[-1]

        try:
            yield start
        finally:
            for child in started:
                child.process.kill()
            for child in started:
                child.process.join(_GONE_S)
                child.pipe.close()


def run_torchft(trial: Trial) -> KilledRun:
    """Train by torchft, one process for a replica group."""
    deadline_s = time.monotonic() + trial.limit_s
    with _children() as start:
        lighthouse = start("lighthouse", _serve_lighthouse, trial)
        address = lighthouse.receive(deadline_s)
        places = range(trial.sizes.pipelines)
        replicas = [start(f"replica_{place}", _train_replica, trial, place, address) for place in places]
        for replica in replicas:
            replica.receive(deadline_s)
        # All at once: whoever comes later than the lighthouse waits for is left out of the first step.
        for replica in replicas:
            replica.pipe.send("go")
        killed_us = _kill_in_step(replicas, trial, deadline_s)
        survivors = [replica for replica in replicas if replica is not replicas[VICTIM]]
        losses = [_last_message(survivor, deadline_s) for survivor in survivors]
    return _torchft_run(trial, killed_us, [survivor.steps for survivor in survivors], losses[0])


def _kill_in_step(replicas: Sequence[_Child], trial: Trial, deadline_s: float) -> int:
    """Kill a replica in the middle of the step after `kill_after` steps of its own; return when."""
    victim = replicas[VICTIM]
    while sum(step.is_committed for step in victim.steps) < trial.kill_after:
        ready = wait([replica.pipe for replica in replicas], max(0.0, deadline_s - time.monotonic()))
        # Without any news, the victim's own deadline raises.
        for replica in [each for each in replicas if each.pipe in ready] or [victim]:
            replica.steps.append(_step_of(replica.receive(deadline_s)))
    ends_us = [step.end_us for step in victim.steps if step.is_committed]
    time.sleep(max(0.0, (middle_of_next_us(ends_us) - now_us()) / 1e6))
    killed_us = now_us()
    victim.process.kill()
    return killed_us


def _step_of(message: Any) -> ReplicaStep:
    if not isinstance(message, ReplicaStep):
        raise RuntimeError(f"a replica of torchft said {message!r} where a step was expected")
    return message


def _last_message(replica: _Child, deadline_s: float) -> float:
    """Read the remaining steps of a replica, up to the loss that it sends last."""
    while isinstance(message := replica.receive(deadline_s), ReplicaStep):
        replica.steps.append(message)
    return float(message)


def _torchft_run(trial: Trial, killed_us: int, survivors: Sequence[Sequence[ReplicaStep]], loss: float) -> KilledRun:
    committed = [{step.number: step for step in steps if step.is_committed} for steps in survivors]
    if {*committed[0]} != {*committed[1]}:
        raise RuntimeError(f"survivors of torchft committed different steps: {[sorted(own) for own in committed]}")
    steps, first_op_us, num_with_victim = list[AppliedStep](), 0, 0
    for number in sorted(committed[0]):
        own = [steps_of[number] for steps_of in committed]
        start_us, end_us = min(step.start_us for step in own), max(step.end_us for step in own)
        num_replicas = min(step.num_replicas for step in own)
        steps.append(AppliedStep(end_us, num_replicas * trial.sizes.microbatches * SAMPLES))
        if not first_op_us and start_us > killed_us and num_replicas < trial.sizes.pipelines:
            first_op_us, num_with_victim = start_us, len(steps) - 1
    if not first_op_us:
        raise RuntimeError("no step of torchft was committed after the kill without the victim")
    num_undone = sum(not step.is_committed and step.end_us > killed_us for steps_of in survivors for step in steps_of)
    num_discarded = num_undone * trial.sizes.microbatches
    return KilledRun(killed_us, first_op_us, tuple(steps), num_with_victim, num_discarded, loss)
