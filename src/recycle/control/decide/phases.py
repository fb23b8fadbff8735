"""The phases of the coordinator, and the table of all allowed transitions between them."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple


class CoordinatorPhase(StrEnum):
    FORMING = "forming"
    RUNNING = "running"
    PAUSING = "pausing"
    STOPPING = "stopping"
    PLANNING = "planning"
    WAITING = "waiting"
    DONE = "done"


class PhaseTrigger(StrEnum):
    JOURNAL_FOUND = "journal found"
    EPOCH_STARTED = "epoch started"
    MEMBER_JOINED = "member joined"
    EPOCH_BROKEN = "epoch broken"
    ALL_STOPPED = "all stopped"
    MEMBERS_CHANGED = "members changed"
    NO_PLAN = "no plan"
    JOB_ENDED = "job ended"


class Transition(NamedTuple):
    phase: CoordinatorPhase
    reason: str


def _table() -> Mapping[CoordinatorPhase, Mapping[PhaseTrigger, Transition]]:
    phase, trigger = CoordinatorPhase, PhaseTrigger
    broken = Transition(phase.STOPPING, "a member is lost or has left the epoch: all others abort it and report their progress")
    stopped = Transition(phase.PLANNING, "every member has stopped: a plan for the live members is requested")
    table = {
        phase.FORMING: {
            trigger.JOURNAL_FOUND: Transition(phase.RUNNING, "this coordinator replaces one that died in an epoch"),
            trigger.EPOCH_STARTED: Transition(phase.RUNNING, "every row of the first plan has a member"),
        },
        phase.RUNNING: {
            trigger.MEMBER_JOINED: Transition(phase.PAUSING, "a new member needs a place: all pause at an iteration boundary"),
            trigger.EPOCH_BROKEN: broken,
        },
        phase.PAUSING: {trigger.ALL_STOPPED: stopped, trigger.EPOCH_BROKEN: broken},
        phase.STOPPING: {trigger.ALL_STOPPED: stopped},
        phase.PLANNING: {
            trigger.EPOCH_STARTED: Transition(
                phase.RUNNING, "the plan has come: every member gets its place and its first iteration"
            ),
            trigger.MEMBERS_CHANGED: Transition(
                phase.PLANNING, "the requested plan no longer fits the members: another is requested"
            ),
            trigger.NO_PLAN: Transition(phase.WAITING, "the live members cannot hold every stage: the job waits for new members"),
        },
        phase.WAITING: {
            trigger.MEMBERS_CHANGED: Transition(phase.PLANNING, "a member came or left: there may be a plan now"),
        },
        phase.DONE: {},
    }
    ended = Transition(phase.DONE, "all steps are done, or an error ends the job")
    rows = {now: row if now is phase.DONE else row | {trigger.JOB_ENDED: ended} for now, row in table.items()}
    return MappingProxyType({now: MappingProxyType(row) for now, row in rows.items()})


TRANSITIONS = _table()


def next_phase(phase: CoordinatorPhase, trigger: PhaseTrigger) -> CoordinatorPhase:
    """Return the phase after `trigger`; a transition that the table lacks is a mistake of the coordinator."""
    assert trigger in TRANSITIONS[phase], f"phase {phase.name} has no transition for {trigger.name}"
    return TRANSITIONS[phase][trigger].phase


def transition_table() -> str:
    """Return the transitions as a Markdown table, for the documentation."""
    rows = [
        f"| {phase} | {trigger} | {to} | {reason} |"
        for phase, row in TRANSITIONS.items()
        for trigger, (to, reason) in row.items()
    ]
    return "\n".join(["| phase | trigger | next phase | reason |", "|---|---|---|---|", *rows, ""])
