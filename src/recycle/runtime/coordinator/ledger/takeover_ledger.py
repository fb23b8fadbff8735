"""`TakeoverLedger`: the ledger of a coordinator that may not have the whole record, because that was on a machine which is gone.

Workers send again the reports that were not acknowledged; the earlier ones are in the record that is gone. So the ledger does not
know how many steps were recorded. Every worker's reports come in order: when all reporters of an iteration have reported it,
nothing below it comes any more. That iteration is the first one of this record; losses before it are unknown.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from recycle.control.decide.journal import JournalEntry
from recycle.control.decide.members import members_at
from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem
from recycle.core.plans.packed_plan import unpack_plan
from recycle.core.plans.plan import Plan
from recycle.runtime.coordinator.ledger.run_ledger import RunLedger


class TakeoverLedger(RunLedger):
    """A ledger that may begin, or go on, with a later iteration than the next one, once, after it took over with a gap."""

    _may_have_gap = False

    def take_over(self, entry: JournalEntry, has_gap: bool) -> Plan:
        """Continue in the epoch of the coordinator that wrote this entry; return its plan.

        If it `has_gap`, steps may be missing: that coordinator's record is perhaps not here.
        """
        try:
            self._may_have_gap, plan = has_gap, unpack_plan(entry.plan)
        except FileProblem as problem:
            advice = "go on from the last checkpoint, with --resume"
            raise FileProblem(
                f"the plan in the journal cannot be read ({problem}); another release may have written it: {advice}"
            ) from None
        self.resume_epoch(plan, entry.epoch, entry.iteration, members_at(entry.places), entry.reporters)
        for place, (host, pid, _) in entry.processes.items():  # the coordinator may have been killed before it wrote that
            self.processes.place(place, host, pid)
        return plan

    def resume_epoch(
        self, plan: Plan, epoch: int, iteration: int, members: Mapping[int, Worker], reporters: Mapping[int, Sequence[int]]
    ) -> None:
        if self._may_have_gap:  # all iterations before the epoch were recorded, except those that somebody has to report
            self._skip_to(min([*reporters, iteration]))
        super().resume_epoch(plan, epoch, iteration, members, reporters)

    def start_epoch(self, plan: Plan, iteration: int, members: Mapping[int, Worker], survivors: AbstractSet[int]) -> None:
        if self._may_have_gap:  # all have stopped and reported; the last iteration may be settled only now
            self._skip_to(min([*self._pending, iteration - 1]))
        super().start_epoch(plan, iteration, members, survivors)

    def all_finished(self, num_steps: int | None) -> None:
        """Note that all workers have reported their last iteration: `num_steps` in all, None if they only saved.

        Reports that are still missing were acknowledged by the coordinator before, or their worker is dead: none will come, so
        that the others are the record of their iterations.
        """
        if self._may_have_gap:
            reported = sorted(number for number, pending in self._pending.items() if pending.ran)
            self._close_gap(reported[0] if reported else num_steps or len(self._losses))
            for number in reported:
                self._pending[number].reporters &= self._pending[number].ran.keys()
            if reported:
                self._write_if_complete(reported[0])  # and with it those that follow

    def _write_if_complete(self, iteration: int) -> None:
        pending = self._pending[iteration]
        if self._may_have_gap and pending.is_complete() and pending.verdict is not None:
            self._close_gap(iteration)
        super()._write_if_complete(iteration)

    def _close_gap(self, num_steps: int) -> None:
        self._may_have_gap = False
        self._skip_to(num_steps)
        self.checkpoints.release()

    def _skip_to(self, num_steps: int) -> None:
        """Have at least so many steps; what waits for reports on earlier ones waits no longer."""
        if num_steps > len(self._losses):
            self.warn(f"the record of steps {len(self._losses) + 1} to {num_steps} is not here: their losses are unknown")
            self._cut_losses(num_steps)
        for number in [number for number in self._pending if number < num_steps]:
            del self._pending[number]
