"""The phases of the coordinator, and the table of all allowed transitions between them."""

from collections.abc import Mapping
from enum import StrEnum
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
    MEMBER_LEAVES = "member leaves"
    PLAN_CHANGES = "plan changes"
    STOP_REQUESTED = "stop requested"
    EPOCH_BROKEN = "epoch broken"
    ALL_STOPPED = "all stopped"
    MEMBERS_CHANGED = "members changed"
    NO_PLAN = "no plan"
    JOB_ENDED = "job ended"


class Transition(NamedTuple):
    phase: CoordinatorPhase
    reason: str


_P, _T = CoordinatorPhase, PhaseTrigger
_BROKEN = Transition(_P.STOPPING, "a member is lost or has left the epoch: all others abort it and report their progress")
_STOPPED = Transition(_P.PLANNING, "every member has stopped: a plan for the live members is requested")
_ENDED = Transition(_P.DONE, "all steps are done, or an error ends the job")
TRANSITIONS: Mapping[CoordinatorPhase, Mapping[PhaseTrigger, Transition]] = {
    _P.FORMING: {
        _T.JOURNAL_FOUND: Transition(_P.RUNNING, "this coordinator replaces one that died in an epoch"),
        _T.EPOCH_STARTED: Transition(_P.RUNNING, "every row of the first plan has a member"),
        _T.JOB_ENDED: _ENDED,
    },
    _P.RUNNING: {
        _T.MEMBER_JOINED: Transition(_P.PAUSING, "a new member needs a place: all pause at an iteration boundary"),
        _T.MEMBER_LEAVES: Transition(_P.PAUSING, "a member was asked to leave: all pause at an iteration boundary"),
        _T.PLAN_CHANGES: Transition(_P.PAUSING, "another plan is better: all pause at an iteration boundary"),
        _T.STOP_REQUESTED: Transition(_P.PAUSING, "the job is to stop: all pause at an iteration boundary, to save it"),
        _T.EPOCH_BROKEN: _BROKEN,
        _T.JOB_ENDED: _ENDED,
    },
    _P.PAUSING: {_T.ALL_STOPPED: _STOPPED, _T.EPOCH_BROKEN: _BROKEN, _T.JOB_ENDED: _ENDED},
    _P.STOPPING: {_T.ALL_STOPPED: _STOPPED, _T.JOB_ENDED: _ENDED},
    _P.PLANNING: {
        _T.EPOCH_STARTED: Transition(_P.RUNNING, "the plan has come: every member gets its place and the first iteration"),
        _T.MEMBERS_CHANGED: Transition(_P.PLANNING, "the requested plan no longer fits the members: another is requested"),
        _T.NO_PLAN: Transition(_P.WAITING, "the live members cannot hold every stage: the job waits for new members"),
        _T.JOB_ENDED: _ENDED,
    },
    _P.WAITING: {
        _T.MEMBERS_CHANGED: Transition(_P.PLANNING, "a member joined or left: there may be a plan now"),
        _T.JOB_ENDED: _ENDED,
    },
    _P.DONE: {},
}


def next_phase(phase: CoordinatorPhase, trigger: PhaseTrigger) -> CoordinatorPhase:
    """Return the phase after `trigger`; a transition that the table lacks is a mistake of the coordinator."""
    assert trigger in TRANSITIONS[phase], f"phase {phase.name} has no transition for {trigger.name}"
    return TRANSITIONS[phase][trigger].phase
