"""The journal: what was written is there for the next coordinator, however the last one ended."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from recycle.control.decide.journal import FileJournal, Journal, JournalEntry
from recycle.core.errors import FileProblem
from tests.control.decide.coordinator_harness import MemoryJournal

FIRST = JournalEntry(
    1, 0, {"W0_0": 1, "W0_1": 2}, "the plan", "the job began", 2, {"W0_0": ("here", 4711), "W0_1": ("there", 4712)}
)
SECOND = replace(FIRST, epoch=2, iteration=7, places={"W0_0": 1, "W0_1": 3}, reason="its connection closed", last_number=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_the_last_entry_is_the_one_that_was_written_last(kind: str, path: Path) -> None:
    journal: Journal = FileJournal(path) if kind == "file" else MemoryJournal()
    assert journal.last() is None
    journal.append(FIRST)
    assert journal.last() == FIRST
    journal.append(SECOND)
    assert journal.last() == SECOND


def test_another_journal_of_the_same_file_goes_on(path: Path) -> None:
    FileJournal(path).append(FIRST)
    FileJournal(path).append(SECOND)
    assert FileJournal(path).last() == SECOND
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("num_cut", [2, 10, 100])
def test_a_line_that_was_cut_short_counts_as_not_written(path: Path, num_cut: int) -> None:
    journal = FileJournal(path)
    journal.append(FIRST)
    journal.append(SECOND)
    path.write_bytes(path.read_bytes()[:-num_cut])
    assert journal.last() == FIRST


@pytest.mark.parametrize("num_cut", [1, 2, 10, 100])
def test_what_is_written_after_a_line_that_was_cut_short_is_found(path: Path, num_cut: int) -> None:
    journal = FileJournal(path)
    journal.append(FIRST)
    journal.append(SECOND)
    path.write_bytes(path.read_bytes()[:-num_cut])
    third = replace(SECOND, epoch=3)
    journal.append(third)
    assert journal.last() == third


def test_an_empty_journal_and_one_of_a_broken_line_have_no_last_entry(path: Path) -> None:
    path.write_bytes(b"")
    assert FileJournal(path).last() is None
    path.write_bytes(b'{"epoch": 1, "itera')
    assert FileJournal(path).last() is None


def test_bytes_of_something_else_are_passed_over(path: Path) -> None:
    journal = FileJournal(path)
    journal.append(FIRST)
    path.write_bytes(path.read_bytes() + b'\x00\xff\x00\n[1]\n7\n{"epoch": 9}\n')
    assert journal.last() == FIRST


def test_after_an_entry_that_could_not_be_written_no_older_one_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = FileJournal(path)
    journal.append(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FileProblem, match="No space left on device"):
            journal.append(SECOND)
    assert journal.last() is None
    journal.append(SECOND)
    assert journal.last() == SECOND


def test_a_journal_that_cannot_be_written_says_so_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"cannot write .*nowhere.*: No such file or directory"):
        FileJournal(tmp_path / "nowhere" / "journal.jsonl").append(FIRST)
    with pytest.raises(FileProblem, match="Is a directory"):
        FileJournal(tmp_path).append(FIRST)


def test_a_journal_that_cannot_be_read_says_so_and_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="cannot read"):
        FileJournal(tmp_path).last()


def test_no_file_stays_open(path: Path) -> None:
    journal = FileJournal(path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        journal.append(FIRST)
        journal.last()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
