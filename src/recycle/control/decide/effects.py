"""`CoordinatorEffects`: the actions that the coordinator can take, on connections, processes, plans and the ledger."""

from collections.abc import Iterable
from typing import Protocol

from recycle.control.decide.members import Member, Recovery, Reporters
from recycle.control.decide.messages import ControlMessage
from recycle.control.decide.new_epoch import NewEpoch
from recycle.core.cluster import Worker
from recycle.core.plans.plan_source import PlanAssignment


class CoordinatorEffects(Protocol):
    """The actions of the coordinator on connections, processes, plans and the ledger."""

    def now_us(self) -> int: ...

    def is_ready(self) -> bool:
        """Whether the first epoch may start; if not, `Coordinator.update_membership` is called again later."""

    def send(self, connection: int, message: ControlMessage) -> None: ...

    def send_all(self, connections: Iterable[int], message: ControlMessage) -> None: ...

    def disconnect(self, connection: int, reason: str = "") -> None:
        """Close a connection; with a `reason`, the member hears it first, and ends."""

    def is_process_running(self, member: Member) -> bool:
        """Whether the member's process is seen running on this machine, and not stopped."""

    def fence(self, member: Member) -> None:
        """Make sure that a member does nothing any more, if its machine is in reach."""

    def request_plan(self, failed: frozenset[Worker]) -> None:
        """Request a plan for these dead workers; `Coordinator.plan_received` is called with it later."""

    def expect_request(self, failed: frozenset[Worker]) -> None:
        """Prepare the plan for these dead workers: it will be requested when all have stopped, unless more die."""

    def find_checkpoint(self) -> None:
        """Find the newest complete checkpoint; `Coordinator.checkpoint_found` is called with its number of steps later."""

    def no_checkpoint(self, begins_again: bool) -> None:
        """Note that an epoch needs a checkpoint and there is none: training begins again, or keeps a wrong gradient."""

    def member_left(self, member: Member, reason: str) -> int:
        """Note that a member is gone; return when it died if that is known, else 0."""

    def member_suspected(self, member: Member, reason: str) -> None: ...

    def member_joining(self, member: Member, place: Worker) -> None: ...

    def planning_failed(self, reason: str) -> None:
        """Note that no plan will come: the job must end."""

    def stalled(self, stalled_s: float) -> None:
        """Note that the coordinator itself stood still for so long."""

    def cannot_save(self) -> None:
        """Note that the job is to stop, and that there is no epoch that could write a checkpoint: it must end."""

    def waiting(self, reason: str) -> None:
        """Note that training cannot continue, and what it waits for."""

    def epoch_started(self, assignment: PlanAssignment, start: NewEpoch) -> Reporters:
        """Note that an epoch starts; its members receive their parts of `start` afterwards."""

    def recovery_finished(self, recovery: Recovery) -> None: ...
