"""`ProcessLauncher`: the launcher of an agent. A worker is a process of this machine, forked from a server with torch loaded."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from recycle.core.errors import UserError
from recycle.host.process_lifetime import end_with_parent, interrupts_held
from recycle.runtime.launch.start_process import start_process
from recycle.runtime.launch.supervisor import EndKind, WorkerEnd, WorkerSlot
from recycle.runtime.transport.gpu.nccl import prepare_process
from recycle.runtime.worker.worker import MAY_RETRY, REFUSED

Say = Callable[[str], None]
TakePart = Callable[[Say], None]
"""Takes part in the job as one worker, to its end. It runs in another process, so it must be picklable."""


@dataclass(slots=True)
class _Running:
    """A worker process, and the end of the pipe to which it prints; `unfinished` is a line whose end has not come yet."""

    process: BaseProcess
    output: Connection
    unfinished: bytes = b""


class ProcessLauncher:
    """A `Launcher` of worker processes. What they print goes to the error stream; with `logs`, also to a file for each slot.

    Slots of `shared_gpus` have their GPU with others.
    """

    def __init__(
        self, context: ForkServerContext, take_part: TakePart, shared_gpus: frozenset[str], say: Say, logs: Path | None = None
    ) -> None:
        self._context, self._take_part, self._shared_gpus, self._say, self._logs = context, take_part, shared_gpus, say, logs
        self._running: dict[WorkerSlot, _Running] = {}
        self._is_asked_to_leave = False

    def start(self, slot: WorkerSlot) -> None:
        receiver, sender = self._context.Pipe(duplex=False)
        args = sender, slot.gpu, slot.gpu in self._shared_gpus, self._take_part
        process = self._context.Process(target=_run_worker, args=args, daemon=True, name=str(slot))
        try:
            with interrupts_held():
                start_process(process)
                self._running[slot] = _Running(process, receiver)
            if self._is_asked_to_leave:  # since then, and this worker was not known; a new process may still ignore SIGTERM
                process.kill()
        except OSError:
            receiver.close()
            raise
        finally:
            sender.close()

    def wait(self, timeout_s: float) -> Sequence[WorkerEnd]:
        sentinels = [running.process.sentinel for running in self._running.values()]
        outputs = [running.output for running in self._running.values() if not running.output.closed]
        ready = wait([*outputs, *sentinels], timeout_s)
        ends = []
        for slot, running in list(self._running.items()):
            if running.output in ready:
                self._forward(slot, running)
            if running.process.exitcode is not None:
                ends.append(self._collect(slot, running))
        return ends

    def ask_to_leave(self) -> None:
        """Have all workers leave the job at the next iteration boundary. A signal handler may call this."""
        self._is_asked_to_leave = True
        for running in list(self._running.values()):
            _ask_to_leave(running.process)

    def kill(self) -> None:
        """End all workers at once; `wait` returns their ends."""
        for running in self._running.values():
            running.process.kill()

    def end(self) -> None:
        """End every worker, also one that is stopped by a signal."""
        self.kill()
        for running in self._running.values():
            running.process.join()

    def _collect(self, slot: WorkerSlot, running: _Running) -> WorkerEnd:
        while not running.output.closed and wait([running.output], 0):
            self._forward(slot, running)
        running.output.close()
        code = running.process.exitcode
        assert code is not None
        running.process.close()
        del self._running[slot]
        kinds = {0: EndKind.OVER, REFUSED: EndKind.REFUSED}
        return WorkerEnd(slot, kinds.get(code, EndKind.FAILED), _describe(code))

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
