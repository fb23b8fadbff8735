"""The store of an epoch: entries go to those who ask for them, once, whoever comes first."""

from recycle.control.decide.epoch_store import EpochStore
from recycle.control.decide.messages import StoreEntry, StoreRequest

READY = [StoreEntry(3, f"ready/W{number}_0", f"host{number}") for number in range(3)]


class Sent(list[tuple[int, StoreEntry]]):
    """A store of three members, and what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.store = EpochStore(3, lambda connection, entry: self.append((connection, entry)))

    def ask(self, connection: int, *keys: str) -> None:
        self.store.take(connection, StoreRequest(3, keys))

    def put(self, *entries: StoreEntry) -> None:
        for entry in entries:
            self.store.take(None, entry)


def test_an_entry_goes_to_those_who_have_asked_for_it_and_to_nobody_else() -> None:
    sent, a, b = Sent(), StoreEntry(3, "a", "x"), StoreEntry(3, "b", "y")
    sent.ask(7, "a", "b")
    sent.ask(8, "b")
    assert sent == []
    sent.put(a)
    assert sent == [(7, a)]
    sent.put(b, StoreEntry(3, "c", "z"))
    assert sent == [(7, a), (7, b), (8, b)]


def test_who_asks_late_has_the_answer_at_once_and_once() -> None:
    sent, entry = Sent(), StoreEntry(3, "a", "x")
    sent.put(entry)
    sent.ask(7, "a", "b")
    assert sent == [(7, entry)]
    sent.put(entry)  # it is set again, after a reconnect
    assert sent == [(7, entry)]


def test_the_entries_of_all_members_are_one_answer_without_their_values() -> None:
    sent, of_all = Sent(), StoreEntry(3, "ready/*", "")
    sent.ask(7, "ready/*")
    sent.put(READY[0], READY[0], READY[1], StoreEntry(3, "other/W0_0", ""))
    assert sent == []
    sent.put(READY[2])
    assert sent == [(7, of_all)]
    sent.ask(8, "ready/*", "ready/W1_0")
    assert sent[1:] == [(8, of_all), (8, READY[1])]
