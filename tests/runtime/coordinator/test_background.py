"""The coordinator's slow work: it is done in order, and what comes of it reaches the serving thread."""

from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

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


def call_all_of(calls: SimpleQueue[Callable[[], None]]) -> None:
    while not calls.empty():
        calls.get()()


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


def test_the_jobs_of_one_turn_of_the_serving_thread_are_handed_over_and_answered_together() -> None:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    background, results = Background("test", calls.put, gathers=True), list[int]()
    for turn in range(3):
        for number in range(5):
            background.run(lambda number=number, turn=turn: 5 * turn + number, results.append)  # type: ignore[misc]
        assert (calls.qsize(), len(results)) == (1, 5 * turn)
        calls.get(timeout=10)()
        while len(results) < 5 * turn + 5:  # one call, or more if this machine is slow
            calls.get(timeout=10)()
    background.run(lambda: 15, results.append)
    background.close()  # even what was not handed over yet is done
    while not calls.empty():
        calls.get()()
    assert results == list(range(16))


def test_an_error_of_a_gathered_job_is_raised_by_the_serving_thread_after_the_results_before_it() -> None:
    calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
    background, results = Background("test", calls.put, gathers=True), list[int]()
    background.run(lambda: 1, results.append)
    background.run(lambda: 1 // 0, results.append)
    background.close()
    with pytest.raises(ZeroDivisionError):
        call_all_of(calls)
    assert results == [1]


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
        calls.get(timeout=10)()  # the job is handed over
        calls.get(timeout=10)()  # its result is there
        run.is_written = number > 0
    output.close()
    assert acknowledged == [2]
