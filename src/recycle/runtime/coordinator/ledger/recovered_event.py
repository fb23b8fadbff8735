"""`recovered_event`: the event of a recovery, from the facts that the coordinator has."""

from recycle.control.decide.members import Recovery
from recycle.core.events.record import Recovered
from recycle.runtime.coordinator.ledger.run_ledger import RunLedger
from recycle.runtime.execute.spans import now_us


def recovered_event(recovery: Recovery, ledger: RunLedger) -> Recovered:
    """Return the event of a recovery, in the time of the record."""
    end_us = recovery.begun_us or now_us()
    # A member that joins or leaves lets all train until the next iteration boundary: nothing is lost before that.
    at_us = recovery.stopped_us if recovery.at_boundary else recovery.at_us
    noticed_us = recovery.stopped_us if recovery.at_boundary else recovery.noticed_us
    restart_us = end_us - recovery.planned_us
    transfer_us = min(recovery.transfer_us, max(0, restart_us))
    return Recovered(
        at_us=ledger.to_record_us(at_us),
        end_us=ledger.to_record_us(end_us),
        epoch=recovery.epoch,
        workers=tuple(recovery.joined if recovery.joins else recovery.left),
        joins=recovery.joins,
        cause=recovery.cause,
        iteration=recovery.iteration,
        detect_us=max(0, noticed_us - at_us),
        abort_us=max(0, recovery.stopped_us - noticed_us),
        plan_us=max(0, recovery.planned_us - recovery.stopped_us),
        regroup_us=max(0, restart_us - transfer_us),
        transfer_us=transfer_us,
        moves=recovery.moves,
        num_live=recovery.num_live,
        layers=recovery.layers,
        carried=recovery.carried,
    )
