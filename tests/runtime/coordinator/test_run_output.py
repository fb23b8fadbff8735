"""A disk, a journal or a launcher that stalls: the serving thread waits for none of them, and all is written in order."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from recycle.control.decide.journal import JournalEntry
from recycle.core.events.record import Warned
from recycle.runtime.checkpoint.writer import StageSaved
from recycle.runtime.coordinator.background import BackgroundJournal
from recycle.runtime.coordinator.config import EventsRecorded, FirstEpochFormed
from recycle.runtime.coordinator.run_output import RunOutput

pytestmark = pytest.mark.timeout(60)
PATIENCE_S = 20.0
EVENT, REPORT = Warned(5, "it is slow"), StageSaved(2, 0, "stage-0.safetensors", 10, "00")
Calls = SimpleQueue[Callable[[], None]]


class Stalled:
    """Something whose calls all wait until it goes on; `done` are the calls that have ended, each with its arguments."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.done: list[tuple[Any, ...]] = []
        self._serving = threading.current_thread()

    def call(self, name: str, result: object = None) -> Callable[..., Any]:
        def wait(*arguments: object) -> object:
            assert threading.current_thread() is not self._serving, f"the serving thread waits for {name}"
            assert self.goes_on.wait(PATIENCE_S)
            self.done.append((name, *arguments))
            return result

        return wait


def run_folder_on(disk: Stalled) -> Any:
    return SimpleNamespace(
        is_written=True,
        write=disk.call("write", "the disk is slow"),
        keep_plan=disk.call("keep_plan"),
        newest=disk.call("newest", (5, ["step 6 is torn"])),
        close=disk.call("close", "the disk is full"),
        checkpoints=SimpleNamespace(add_report=disk.call("add_report", ["complete"]), go_back=disk.call("go_back")),
    )


def serve(calls: Calls) -> None:
    while not calls.empty():
        calls.get()()


def test_the_serving_thread_waits_for_no_call_of_a_stalled_disk_and_all_are_done_in_order() -> None:
    disk, calls, heard, trained = Stalled(), Calls(), list[object](), Any
    output = RunOutput(run_folder_on(disk), SimpleNamespace(send=lambda notice: None), calls.put, heard.append)
    output.publish([EVENT], heard.append)
    output.keep_plan(3, lambda: "a plan")
    output.add_report(REPORT, heard.append)
    output.go_back(2, 4)
    output.find_checkpoint(heard.append)
    output.when_recorded(lambda: heard.append("recorded"))
    output.write_summary(trained, heard.append)  # type: ignore[arg-type]
    output.when_written(lambda: heard.append("written"))
    assert disk.done == []
    disk.goes_on.set()
    output.close()
    assert disk.done == [
        ("write", EVENT),
        ("keep_plan", 3, "a plan"),
        ("add_report", REPORT),
        ("go_back", 2, 4),
        ("newest",),
        ("close", trained),
    ]
    assert heard == []  # until the serving thread has time
    serve(calls)
    assert heard == [
        "the disk is slow",
        [EVENT],
        ["complete"],
        "step 6 is torn",
        5,
        "recorded",
        "the disk is full",
        "written",
    ]


def test_a_launcher_that_does_not_read_delays_neither_the_serving_thread_nor_the_disk() -> None:
    disk, launcher, calls, heard = Stalled(), Stalled(), Calls(), list[object]()
    disk.goes_on.set()
    output = RunOutput(run_folder_on(disk), SimpleNamespace(send=launcher.call("send")), calls.put, lambda sentence: None)
    output.notify(FirstEpochFormed(), lambda: heard.append("notified"))
    output.publish([EVENT], heard.append)
    serve(calls)  # the jobs of a turn are handed over at its end
    calls.get(timeout=PATIENCE_S)()
    assert (heard, launcher.done) == ([[EVENT]], [])
    launcher.goes_on.set()
    output.close()
    serve(calls)
    assert launcher.done == [("send", FirstEpochFormed()), ("send", EventsRecorded([EVENT]))]
    assert heard == [[EVENT], "notified"]


def test_the_serving_thread_waits_for_no_entry_of_a_stalled_journal_and_all_are_written_in_order() -> None:
    disk, calls, problems = Stalled(), Calls(), list[str | None]()
    kept: Any = SimpleNamespace(append=disk.call("append"))
    journal = BackgroundJournal(kept, calls.put, problems.append)
    entries = [JournalEntry(epoch, 0, {}, "", "a worker died", 0) for epoch in range(3)]
    for entry in entries:
        journal.append(entry)
    assert (journal.num_pending, disk.done) == (3, [])
    disk.goes_on.set()
    journal.close()
    assert (disk.done, journal.num_pending, problems) == ([("append", entry) for entry in entries], 3, [])
    serve(calls)
    assert (journal.num_pending, problems) == (0, [None] * 3)
