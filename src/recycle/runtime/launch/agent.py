"""`Agent`: the worker processes of one machine, in a job that a coordinator elsewhere runs.

It keeps a worker in every slot. One that dies is started again after a pause, until it has died too often: then its slot is set
aside. A worker that ends because the job is over, or is refused for good, is not started again. No worker outlives the agent.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from recycle.core.errors import FileProblem, UserError, WorkerFailed
from recycle.host.process_lifetime import end_with_parent, interrupts_held
from recycle.host.stop_signals import stop_signals
from recycle.runtime.launch.restart_policy import RestartPolicy
from recycle.runtime.launch.start_process import start_process
from recycle.runtime.transport.gpu.nccl import prepare_process
from recycle.runtime.worker.worker import MAY_RETRY, REFUSED

# The agent looks at its deadlines at least so often, also while it waits for its workers.
_LOOK_S = 0.5
Say = Callable[[str], None]
TakePart = Callable[[Say], None]
"""Takes part in the job as one worker, to its end. It runs in another process, so it must be picklable."""


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """Where an agent runs a worker: a number, and a GPU by its UUID if the machine has any."""

    number: int
    gpu: str = ""

    def __str__(self) -> str:
        return f"worker {self.number} on {self.gpu}" if self.gpu else f"worker {self.number}"


@dataclass(slots=True)
class _Running:
    """A worker process, and the end of the pipe to which it prints; `unfinished` is a line whose end has not come yet."""

    process: BaseProcess
    output: Connection
    unfinished: bytes = b""


class Agent:
    """The workers of one machine. `say` gets the agent's own sentences; what workers print goes to the error stream.

    With `logs`, it also goes to a file for each slot in that folder.
    """

    def __init__(
        self,
        context: ForkServerContext,
        slots: Sequence[WorkerSlot],
        take_part: TakePart,
        restarts: int,
        grace_s: float,
        say: Say,
        logs: Path | None = None,
    ) -> None:
        self._context, self._slots, self._take_part = context, slots, take_part
        self._restarts, self._grace_s, self._say, self._logs = RestartPolicy[WorkerSlot](restarts), grace_s, say, logs
        self._running: dict[WorkerSlot, _Running] = {}
        self._due_s: dict[WorkerSlot, float] = {}
        self._stop_until_s: float | None = None
        self._is_over = False

    def run(self) -> None:
        """Keep the workers running until all have ended for good; raises WorkerFailed if none was there to the end."""
        if self._logs is not None:
            try:
                self._logs.mkdir(parents=True, exist_ok=True)
            except OSError as problem:
                raise FileProblem(f"cannot write {self._logs}: {problem.strerror or problem}") from None
        try:
            with stop_signals(self.ask_to_stop):
                for slot in self._slots:
                    if self._stop_until_s is None:
                        self._start(slot)
                while self._running or (self._due_s and not self._is_over and self._stop_until_s is None):
                    self._step()
        finally:
            self._end()
        if self.is_asked_to_stop:
            return
        if not self._is_over:
            raise WorkerFailed("no worker of this machine takes part any more: see above why")
        self._say("the job is over")

    @property
    def is_asked_to_stop(self) -> bool:
        return self._stop_until_s is not None

    def ask_to_stop(self, number: signal.Signals) -> None:
        """Have all workers leave the job at the next iteration boundary."""
        self._stop_until_s = time.monotonic() + self._grace_s
        self._say(
            f"{number.name}: {len(self._running)} workers leave after the present step, within {self._grace_s:g} s; "
            "a second signal ends them at once"
        )
        for running in self._running.values():
            _ask_to_leave(running.process)

    def _start(self, slot: WorkerSlot) -> None:
        is_shared = [other.gpu for other in self._slots].count(slot.gpu) > 1
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_run_worker, args=(sender, slot.gpu, is_shared, self._take_part), daemon=True, name=str(slot)
        )
        try:
            with interrupts_held():
                start_process(process)
                self._running[slot] = _Running(process, receiver)
            if self._stop_until_s is not None:  # since then it was asked to stop; a new process may still ignore SIGTERM
                process.kill()
        except OSError as problem:
            receiver.close()
            self._start_later(slot, f"could not be started ({problem.strerror or problem})")
        finally:
            sender.close()

    def _step(self) -> None:
        """Wait until something happens, and act on it."""
        sentinels = [running.process.sentinel for running in self._running.values()]
        outputs = [running.output for running in self._running.values() if not running.output.closed]
        now_s = time.monotonic()
        ready = wait([*outputs, *sentinels], max(0.0, min([_LOOK_S, *(due_s - now_s for due_s in self._due_s.values())])))
        for slot, running in list(self._running.items()):
            if running.output in ready:
                self._forward(slot, running)
            if running.process.exitcode is not None:
                self._ended(slot, running)
        if self._stop_until_s is not None and time.monotonic() > self._stop_until_s:
            for slot, running in self._running.items():
                self._say(f"{slot} has not left within {self._grace_s:g} s, and is ended")
                running.process.kill()
            self._stop_until_s += self._grace_s
        for slot in [slot for slot, due_s in self._due_s.items() if due_s <= time.monotonic()]:
            del self._due_s[slot]
            if self._stop_until_s is None:
                self._start(slot)

    def _forward(self, slot: WorkerSlot, running: _Running) -> None:
        """Pass on what a worker has printed."""
        printed = os.read(running.output.fileno(), 1 << 16)
        if not printed:
            running.output.close()
        *lines, running.unfinished = (running.unfinished + printed).split(b"\n")
        if not printed and running.unfinished:
            lines.append(running.unfinished)
        for line in lines:
            self._show(slot, line.decode(errors="replace"))

    def _show(self, slot: WorkerSlot, line: str) -> None:
        print(f"worker {slot.number} | {line}", file=sys.stderr, flush=True)
        if self._logs is not None:
            try:
                with (self._logs / f"worker-{slot.number}.log").open("a", encoding="utf-8") as stream:
                    stream.write(line + "\n")
            except OSError as problem:  # a full disk ends no training
                self._say(f"cannot write {self._logs}: {problem.strerror or problem}; nothing more is logged")
                self._logs = None

    def _ended(self, slot: WorkerSlot, running: _Running) -> None:
        """Note that a worker has ended, and decide whether it is started again."""
        while not running.output.closed and wait([running.output], 0):
            self._forward(slot, running)
        running.output.close()
        code = running.process.exitcode
        running.process.close()
        del self._running[slot]
        if code == 0:
            self._is_over = True
        elif code == REFUSED:
            self._say(f"{slot} was refused, and is not started again")
        elif self._stop_until_s is None:
            assert code is not None
            self._start_later(slot, _describe(code))

    def _start_later(self, slot: WorkerSlot, how: str) -> None:
        pause_s = self._restarts.pause_s(slot, time.monotonic())
        if pause_s is None:
            self._say(f"{slot} {how}, too often within an hour: it is set aside, and the job goes on without it")
        else:
            self._say(f"{slot} {how}; it is started again in {pause_s:g} s")
            self._due_s[slot] = time.monotonic() + pause_s

    def _end(self) -> None:
        """End every worker, also one that is stopped by a signal."""
        for running in self._running.values():
            running.process.kill()
        for running in self._running.values():
            running.process.join()


def _ask_to_leave(process: BaseProcess) -> None:
    if process.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


def _describe(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return "could not join" if code == MAY_RETRY else f"failed with exit code {code}"


def _run_worker(output: Connection, gpu: str, is_shared: bool, take_part: TakePart) -> None:
    """Be one worker of an agent, which gets all that this process prints. The process ends with the agent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; the agent tells its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the fork server ignores
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output.fileno(), stream.fileno())
    output.close()
    end_with_parent()
    try:
        if gpu:
            _use(gpu, is_shared)
        take_part(lambda sentence: print(sentence, file=sys.stderr, flush=True))
    except UserError as problem:
        print(problem, file=sys.stderr, flush=True)
        raise SystemExit(REFUSED) from None


def _use(gpu: str, is_shared: bool) -> None:
    """Make this process see one GPU only; end it if the GPU does not answer, so that no job gets a worker without one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if not is_shared:
        prepare_process()  # before the first use of the GPU: NCCL connects workers that have one each
    try:
        torch.cuda.synchronize()
    except Exception as problem:
        print(f"{gpu} does not answer: {str(problem).strip().partition(chr(10))[0]}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
