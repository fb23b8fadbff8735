"""`Acknowledgements` of worker reports: sent when the record is on disk, together, and not while members wait for an epoch."""

from collections.abc import Callable
from functools import partial

from recycle.control.decide.messages import Ack


class Acknowledgements:
    """Gathers acknowledgements until `send_due`. A later one to a member replaces an earlier one, since it includes that.

    `when_recorded` calls a function when everything so far is on disk: reports that are not, another coordinator must get again.
    """

    def __init__(self, when_recorded: Callable[[Callable[[], None]], None], send: Callable[[int, Ack], None]) -> None:
        self._when_recorded, self._send = when_recorded, send
        self._due: dict[int, Ack] = {}

    def add(self, member: int, ack: Ack) -> None:
        self._when_recorded(partial(self._recorded, member, ack))

    def _recorded(self, member: int, ack: Ack) -> None:
        self._due[member] = ack

    def send_due(self) -> None:
        due, self._due = self._due, {}
        for member, ack in due.items():
            self._send(member, ack)
