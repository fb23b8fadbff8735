"""`ChildProcess`: a `recycle` command as a child of this process, whose lines are passed on, and which ends with this process."""

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

# The child asks itself to stop when its parent has ended: an engine may kill the parent at any time.
_START = """\
from recycle.host.process_lifetime import stop_with_parent
stop_with_parent()
from recycle.cli.main import main
raise SystemExit(main())
"""
_NUM_LAST_LINES = 20


class ChildProcess:
    """A `recycle` command in a process and a session of its own; `forward` gets the lines of its error stream as they come.

    `command` begins with the name of the program. Standard output goes to the file `output`, if there is one. `forward` is called
    in another thread. The child imports modules from where this process does.
    """

    def __init__(self, command: Sequence[str], forward: Callable[[str], None], output: Path | None = None) -> None:
        self._forward = forward
        self._lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        paths = os.pathsep.join(path for path in sys.path if path)
        with open(output or os.devnull, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # a terminal sends Ctrl-C to its whole session; this process tells the child itself
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._lines)

    def poll(self) -> int | None:
        """The exit code, negative if a signal ended the process; None while it runs, or while lines of it may still come."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(1.0)  # a grandchild may hold the stream open for longer
        return code

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end, and return the exit code; None if it has not come in time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def ask_to_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        stream = self._process.stderr
        assert stream is not None
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self._lines.append(text)
                self._forward(text)
