"""What every store must do: the same tests run over the file and over etcd."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from recycle.control.decide.journal import JournalEntry
from recycle.control.store.protocol import Leader, Store
from recycle.core.errors import LeadershipLost

FIRST = JournalEntry(
    1, 0, {"W0_0": 1, "W0_1": 2}, "the plan", "the job began", 2, {"W0_0": ("here", 4711, "a"), "W0_1": ("there", 4712, "")}
)
SECOND = replace(
    FIRST,
    epoch=2,
    iteration=7,
    places={"W0_0": 1, "W0_1": 3},
    reason="its connection closed",
    last_number=3,
    reporters={6: [1, 3]},
)
MakeStore = Callable[[], Store]


class StoreContract:
    """Tests of a store; a subclass has a fixture `make`, which makes stores of one and the same job."""

    def test_who_campaigns_alone_leads_and_the_last_entry_is_the_one_that_was_appended_last(self, make: MakeStore) -> None:
        store = make()
        assert store.last() is None
        assert store.campaign() is None
        assert store.term == 1
        for entry in (FIRST, SECOND):
            store.append(entry)
            assert store.last() == entry
        store.renew()

    def test_one_leads_and_the_others_hear_who(self, make: MakeStore) -> None:
        leader, standby = make(), make()
        assert leader.campaign() is None
        found = standby.campaign()
        assert isinstance(found, Leader)
        assert found.term == leader.term
        with pytest.raises(LeadershipLost):
            standby.append(FIRST)
        assert leader.last() is None

    def test_every_campaign_that_is_won_has_a_higher_term_and_goes_on_with_the_journal(self, make: MakeStore) -> None:
        terms = []
        for epoch in (1, 2, 3):
            store = make()
            assert store.campaign() is None
            assert store.last() == (replace(FIRST, epoch=epoch - 1) if epoch > 1 else None)
            store.append(replace(FIRST, epoch=epoch))
            terms.append(store.term)
            store.resign()
        assert terms == [1, 2, 3]

    def test_a_store_refuses_the_entry_of_an_older_term(self, make: MakeStore) -> None:
        old, new = make(), make()
        assert old.campaign() is None
        old.append(FIRST)
        old.resign()
        assert new.campaign() is None
        new.append(SECOND)
        for attempt in (lambda: old.append(replace(FIRST, epoch=2)), old.discard):
            with pytest.raises(LeadershipLost):
                attempt()
        assert new.last() == SECOND
        new.append(replace(SECOND, epoch=3))

    def test_a_standby_that_watches_leads_soon_after_the_leader_resigned(self, make: MakeStore) -> None:
        leader, standby = make(), make()
        assert leader.campaign() is None
        assert standby.campaign() is not None
        leader.resign()
        standby.watch(0.3)
        assert standby.campaign() is None

    def test_an_entry_that_is_appended_again_is_there_once(self, make: MakeStore) -> None:
        store = make()
        store.campaign()
        store.append(FIRST)
        store.append(FIRST)
        store.append(SECOND)
        assert store.last() == SECOND

    def test_a_discarded_journal_is_gone_and_terms_go_on(self, make: MakeStore) -> None:
        store = make()
        store.campaign()
        store.append(FIRST)
        store.discard()
        assert store.last() is None
        store.append(SECOND)
        store.resign()
        other = make()
        assert other.campaign() is None
        assert (other.term, other.last()) == (2, SECOND)
