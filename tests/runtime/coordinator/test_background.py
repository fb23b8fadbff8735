"""The coordinator's slow work: it is done in order, and what comes of it reaches the serving thread."""

from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

from recycle.control.decide.journal import JournalEntry
from recycle.core.errors import FileProblem
from recycle.runtime.coordinator.background import Background, BackgroundJournal
from recycle.runtime.coordinator.run_output import RunOutput

ENTRY = JournalEntry(1, 0, {}, "", "the job began", 0)


class FullJournal:
    def append(self, entry: JournalEntry) -> None:
        raise FileProblem("the disk is full")

    def last(self) -> JournalEntry | None:
        return None


def test_jobs_are_done_in_order_and_the_serving_thread_gets_their_results() -> None:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    background, done, results = Background("test", calls.put), list[int](), list[int]()
    for number in range(20):
        background.run(lambda number=number: done.append(number) or number, results.append)  # type: ignore[func-returns-value]
    background.close()
    assert (done, results) == (list(range(20)), [])
    while not calls.empty():
        calls.get()()
    assert results == list(range(20))


def test_an_entry_that_cannot_be_written_is_reported_and_is_pending_no_longer() -> None:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    problems: list[str | None] = []
    journal = BackgroundJournal(FullJournal(), calls.put, problems.append)
    journal.append(ENTRY)
    assert journal.num_pending == 1
    calls.get(timeout=10)()
    assert (journal.num_pending, problems) == (0, ["the disk is full"])
    journal.close()


def test_what_waits_for_room_on_the_disk_is_not_acknowledged_until_a_later_call_finds_it_written() -> None:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    run: Any = SimpleNamespace(is_written=False)
    output, acknowledged = RunOutput(run, SimpleNamespace(send=None), calls.put, print), list[int]()
    for number in range(3):
        output.when_recorded(lambda number=number: acknowledged.append(number))  # type: ignore[misc]
        calls.get(timeout=10)()
        run.is_written = number > 0
    output.close()
    assert acknowledged == [2]
