"""Fencing: the coordinator makes sure that a member which it gives up does nothing any more, before others take over its work.

A member on this machine is killed. A member on another machine is fenced by the end of its epoch: nobody uses its messages.
"""

import os
import signal

from recycle.control.decide.members import Member
from recycle.control.net.handshake import this_host
from recycle.host.process_lifetime import process_start, process_state

_RUNNING = ("R", "S", "D")


def is_on_this_machine(member: Member) -> bool:
    """Whether the coordinator sees the member's process: on the same machine, and in the same namespace of process ids."""
    return member.host == this_host() and member.pid > 0


def identify(member: Member) -> None:
    """Note when the member's process started, so that a later process with its id is never killed in its place."""
    member.started = process_start(member.pid) if is_on_this_machine(member) else ""


def is_running(member: Member) -> bool:
    """Whether the member's process is seen running, and not stopped."""
    return is_on_this_machine(member) and process_state(member.pid) in _RUNNING


def fence(member: Member) -> None:
    """Kill a member on this machine, and no other process that has its id now."""
    if is_on_this_machine(member) and member.started == process_start(member.pid):
        try:
            os.kill(member.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
