"""`RayAgent`: one worker of a job as a Ray actor. It runs `recycle agent` in a child process, so Ray's process has no torch.

The driver (`ray.py`) makes actors of this class. The module does not import Ray, and runs on every machine of the cluster.
"""

import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from recycle.core.files import write_secret
from recycle.host.scratch import scratch
from recycle.integrations.child_process import ChildProcess
from recycle.integrations.job_commands import JobCommands


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent has ended: its exit code, the machine on which it ran, and the last lines that it printed."""

    code: int
    host: str
    last_lines: tuple[str, ...]

    def __str__(self) -> str:
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"its agent on {self.host} {how}: {' / '.join(self.last_lines[-2:]) or 'it printed nothing'}"


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What every agent of a job needs: its command, the host of the coordinator, and the token, which is a secret."""

    commands: JobCommands
    host: str
    token: str

    def __repr__(self) -> str:
        return f"AgentSpec({self.commands!r}, {self.host!r}, a token)"  # errors and logs show arguments


class RayAgent:
    """One agent with one worker. `files` are the job file and the modules beside it, by their paths from its folder.

    Ray calls `stop` and `kill` in other threads than `run`. If this process ends, the agent lets its worker leave the job.
    """

    def __init__(self, number: int, spec: AgentSpec, files: Mapping[str, bytes]) -> None:
        self._number, self._spec, self._files = number, spec, files
        self._child: ChildProcess | None = None
        self._is_stopped = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"recycle worker {self._number}"  # Ray puts it before every line that this process prints

    def host(self) -> str:
        """The name of the machine on which this actor is."""
        return socket.gethostname()

    def run(self) -> AgentEnd:
        """Run the agent to its end, with files of its own that are removed afterwards."""
        with scratch() as folder:
            for name, content in self._files.items():
                path = folder / "job" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            token = write_secret(folder / "token", self._spec.token)
            commands = self._spec.commands
            commands = replace(commands, file=str(folder / "job" / commands.file), token_file=str(token))
            with self._lock:
                if self._is_stopped:
                    return AgentEnd(0, socket.gethostname(), ())
                self._child = ChildProcess(commands.agent(self._spec.host), _print)
            code = self._child.wait()
            assert code is not None
            return AgentEnd(code, socket.gethostname(), self._child.last_lines)

    def stop(self) -> None:
        """Let the worker leave the job after its present step."""
        with self._lock:
            self._is_stopped = True
            if self._child is not None:
                self._child.ask_to_stop()

    def kill(self) -> None:
        """End the agent, and its worker with it, at once."""
        with self._lock:
            self._is_stopped = True
            if self._child is not None:
                self._child.kill()


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
