"""`ReportInbox`, which feeds numbered worker reports to the ledger once each, and acknowledges them."""

from collections import deque
from collections.abc import Callable

from recycle.control.decide.messages import Ack, Report
from recycle.runtime.coordinator.ledger.run_ledger import RunLedger
from recycle.runtime.worker.worker_reports import WorkerCrashed, WorkerReport, report_from_json


class ReportInbox:
    """Adds every report to the ledger once, and acknowledges it when the record holds it for good.

    `acknowledge` is called with the number of a member and the message for it.
    """

    def __init__(self, ledger: RunLedger, acknowledge: Callable[[int, Ack], None]) -> None:
        self._ledger, self._acknowledge = ledger, acknowledge
        self._last_numbers: dict[int, int] = {}
        self._unacknowledged: dict[int, deque[tuple[int, WorkerReport | None]]] = {}

    def accept(self, member: int, message: Report, clock_offset_us: int, origin: int = 0) -> WorkerReport | None:
        """Return the report of a member; None if it was received before, and sent again after a reconnect.

        A report from before the epoch `origin`, in which all went back, is only acknowledged: a coordinator that was killed since
        then had received it. An error of the worker is always heard.
        """
        report = report_from_json(message.body, clock_offset_us)
        if message.number <= self._last_numbers.get(member, 0):
            return None
        self._last_numbers[member] = message.number
        if 0 < message.origin < origin and not isinstance(report, WorkerCrashed):
            self._unacknowledged.setdefault(member, deque()).append((message.number, None))
            self._acknowledge_recorded(member)
            return None
        num_steps = self._ledger.num_steps
        self._ledger.add(member, report)
        self._unacknowledged.setdefault(member, deque()).append((message.number, report))
        if self._ledger.num_steps != num_steps:
            self.acknowledge_recorded()  # a complete iteration is in the record for all members that have reported it
        else:
            self._acknowledge_recorded(member)
        return report

    def acknowledge_recorded(self) -> None:
        """Acknowledge all reports that wait for nothing any more."""
        for member in list(self._unacknowledged):
            self._acknowledge_recorded(member)

    def remove(self, member: int) -> None:
        """Forget a member that is gone: a job may lose many."""
        self._unacknowledged.pop(member, None)
        self._last_numbers.pop(member, None)

    def _acknowledge_recorded(self, member: int) -> None:
        waiting, last = self._unacknowledged[member], 0
        while waiting and ((report := waiting[0][1]) is None or not self._ledger.is_pending(report)):
            last, _ = waiting.popleft()
        if last:
            self._acknowledge(member, Ack(last))
