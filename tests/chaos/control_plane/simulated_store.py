"""A replicated store under the virtual clock: one state for all coordinators, and what each of them sees of it.

It does what `EtcdStore` does of a real etcd (tests/control/store has the contract of both): a lease, terms, an append that is
refused if another coordinator leads. Requests and answers are lost by chance, and it may be away for a while.
"""

from dataclasses import dataclass, field
from random import Random

from recycle.control.decide.journal import JournalEntry
from recycle.control.store.protocol import Leader, StoreAway
from recycle.core.errors import LeadershipLost
from tests.chaos.control_plane.virtual import CLOCK
from tests.control.decide.coordinator_harness import LEASE_S


@dataclass
class SimulatedEtcd:
    """The state of the store: who leads until when, the last term, and every entry with its term."""

    random: Random
    leader: "SimulatedStore | None" = None
    until_us: int = 0
    term: int = 0
    is_away: bool = False
    loses: float = 0.0
    entries: list[tuple[int, JournalEntry]] = field(default_factory=list)

    def refuse_if_away(self) -> None:
        if self.is_away:
            raise StoreAway("it is away")
        if self.leader is not None and CLOCK.now_us >= self.until_us:
            self.leader = None

    def lose(self, what: str) -> None:
        if self.random.random() < self.loses:
            raise StoreAway(f"the {what} is lost")


class SimulatedStore:
    """The store as one coordinator process sees it."""

    lease_s = LEASE_S

    def __init__(self, etcd: SimulatedEtcd) -> None:
        self._etcd, self.term, self._own_term = etcd, 0, 0

    def campaign(self) -> Leader | None:
        leader = self._campaign(None)
        self.term = self.term or self._own_term
        return leader

    def _campaign(self, expected_term: int | None) -> Leader | None:
        etcd = self._etcd
        etcd.refuse_if_away()
        if etcd.leader not in (None, self):
            return Leader(etcd.term, "another")
        if etcd.leader is None:
            if expected_term not in (None, etcd.term):
                return Leader(etcd.term, "another, which has ended")
            etcd.term += 1
            self._own_term, etcd.leader = etcd.term, self
        etcd.until_us = CLOCK.now_us + round(LEASE_S * 1e6)
        return None

    def renew(self) -> None:
        self._etcd.lose("request")
        if self._campaign(self._own_term) is not None:
            raise LeadershipLost("another coordinator leads")
        self._etcd.lose("answer")

    def append(self, entry: JournalEntry) -> None:
        self._etcd.lose("request")
        self._etcd.refuse_if_away()
        if self._etcd.leader is None and self._etcd.term == self._own_term:
            raise StoreAway("the lease has expired")
        if self._etcd.leader is not self:
            raise LeadershipLost("another coordinator leads")
        if self._etcd.entries[-1:] != [(self.term, entry)]:
            assert not self._etcd.entries or entry.epoch > self._etcd.entries[-1][1].epoch, "an older entry follows a newer one"
            self._etcd.entries.append((self.term, entry))
        self._etcd.lose("answer")

    def last(self) -> JournalEntry | None:
        return self._etcd.entries[-1][1] if self._etcd.entries else None

    def watch(self, timeout_s: float) -> None:
        pass

    def discard(self) -> None:
        assert self._etcd.leader is self
        self._etcd.entries.clear()

    def resign(self) -> None:
        if self._etcd.leader is self:
            self._etcd.leader = None
