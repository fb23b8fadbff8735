"""`WorkerProcesses`: which process has which place, as far as the record says."""

from collections.abc import Callable

from recycle.core.events.record import Placed


class WorkerProcesses:
    """Writes the host and the process id of every worker into the record, once for each place that it takes."""

    def __init__(self, write: Callable[[Placed], None], now_us: Callable[[], int]) -> None:
        self._write, self._now_us = write, now_us
        self._known: dict[str, tuple[str, int]] = {}

    def restore(self, event: Placed) -> None:
        """Continue from an event that another coordinator of this run has written."""
        self._known[event.node] = event.host, event.pid

    def place(self, node: str, host: str, pid: int) -> None:
        """Write that a process has a place, unless the record says so already; `host` begins with the name of the machine."""
        process = host.partition(" ")[0], pid
        if self._known.get(node) != process:
            self._known[node] = process
            self._write(Placed(self._now_us(), node, *process))
