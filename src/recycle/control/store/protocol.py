"""`Store`: the journal of a job, and the right to write it. One coordinator leads; the others are standbys.

Every campaign that is won has a higher term than all before it. Only the leader appends to the journal: the store refuses the
entry of a coordinator that no longer leads, however late that coordinator learns of it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from recycle.control.decide.journal import JournalEntry
from recycle.core.errors import UserError

Result = TypeVar("Result")
_RETRY_S = 0.5


class StoreAway(Exception):
    """The store does not answer now, and why; it may answer later."""


class StoreRefused(StoreAway):
    """The store answers, and does not let this coordinator in: another try alone does not help."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The coordinator that leads: its term, and a name by which a person finds it."""

    term: int
    name: str


class Store(Protocol):
    """The journal and the leader of one job. Methods raise StoreAway if the store does not answer; none of them waits for long.

    `term` is that of the campaign which this coordinator won, 0 before. Leadership ends `lease_s` after it was last renewed; if
    that is 0, it lasts as long as the process.
    """

    lease_s: float
    term: int

    def campaign(self) -> Leader | None:
        """Lead if nobody does. Return the coordinator that leads instead, None if this one leads now."""

    def renew(self) -> None:
        """Go on leading. Raises LeadershipLost if another coordinator leads, or has led since this one did."""

    def append(self, entry: JournalEntry) -> None:
        """Store an entry durably before returning. Raises LeadershipLost; FileProblem if it cannot be written here."""

    def last(self) -> JournalEntry | None:
        """The last entry of any leader."""

    def watch(self, timeout_s: float) -> None:
        """Return when the leader may have changed, or after this time."""

    def discard(self) -> None:
        """Remove the journal of a former job; terms go on. Raises LeadershipLost."""

    def resign(self) -> None:
        """Stop leading, so that another coordinator can lead at once. An error is not raised: the lease ends anyway."""


def ask_until_answered(ask: Callable[[], Result], say: Callable[[str], object] = lambda sentence: None) -> Result:
    """Return the store's answer, however long that takes; `say` gets one sentence about what is waited for.

    Raises UserError if the store does not let this coordinator in.
    """
    is_told = False
    while True:
        try:
            return ask()
        except StoreRefused as problem:
            raise UserError(f"the store does not let this coordinator in: {problem}") from None
        except StoreAway as problem:
            if not is_told:
                is_told = True
                say(f"the store does not answer, and is asked again: {problem}")
            time.sleep(_RETRY_S)
