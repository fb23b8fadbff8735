"""The store in a file: the contract of every store, and lines and files that are cut short, full or unreadable."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from recycle.control.store.file_store import FileStore
from recycle.core.errors import FileProblem, LeadershipLost
from tests.control.store.contract import FIRST, SECOND, MakeStore, StoreContract


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def make(path: Path) -> MakeStore:
    return lambda: FileStore(path)


class TestContract(StoreContract):
    pass


def led(path: Path) -> FileStore:
    store = FileStore(path)
    assert store.campaign() is None
    return store


@pytest.mark.parametrize("num_cut", [2, 10, 100])
def test_a_line_that_was_cut_short_counts_as_not_written(path: Path, num_cut: int) -> None:
    journal = led(path)
    journal.append(FIRST)
    journal.append(SECOND)
    path.write_bytes(path.read_bytes()[:-num_cut])
    assert journal.last() == FIRST


@pytest.mark.parametrize("num_cut", [1, 2, 10, 100])
def test_what_is_written_after_a_line_that_was_cut_short_is_found(path: Path, num_cut: int) -> None:
    journal = led(path)
    journal.append(FIRST)
    journal.append(SECOND)
    path.write_bytes(path.read_bytes()[:-num_cut])
    third = replace(SECOND, epoch=3)
    journal.append(third)
    assert journal.last() == third


def test_an_empty_journal_and_one_of_a_broken_line_have_no_last_entry(path: Path) -> None:
    path.write_bytes(b"")
    assert FileStore(path).last() is None
    path.write_bytes(b'{"epoch": 1, "itera')
    assert FileStore(path).last() is None


def test_bytes_of_something_else_are_passed_over(path: Path) -> None:
    journal = led(path)
    journal.append(FIRST)
    path.write_bytes(path.read_bytes() + b'\x00\xff\x00\n[1]\n7\n{"epoch": 9}\n')
    assert journal.last() == FIRST


def test_after_an_entry_that_could_not_be_written_no_older_one_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = led(path)
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
        led(tmp_path / "nowhere" / "journal.jsonl").append(FIRST)
    with pytest.raises(FileProblem, match="cannot read"):
        led(tmp_path).append(FIRST)


def test_a_journal_that_cannot_be_read_says_so_and_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="cannot read"):
        FileStore(tmp_path).last()


def test_no_file_stays_open(path: Path) -> None:
    journal = led(path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        journal.append(FIRST)
        journal.last()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_that_cannot_be_written_is_led_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    first = led(path)
    first.append(FIRST)
    first.resign()
    monkeypatch.setattr(os, "fsync", full)
    second = led(path)
    assert (second.term, second.last()) == (2, FIRST)


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_cannot_be_emptied_is_replaced_and_the_lock_is_that_of_the_new_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = led(path)
    store.append(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(os, "truncate", refuse)
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(FileProblem, match="cannot write"):
            store.append(SECOND)
    assert (store.last(), FileStore(path).last()) == (None, None)
    assert FileStore(path).campaign() is not None  # a lock on the removed file would keep nobody away
    store.append(SECOND)
    store.resign()
    other = FileStore(path)
    assert other.campaign() is None
    assert (other.term, other.last()) == (2, SECOND)


def test_another_process_may_have_the_file_that_was_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = led(path), FileStore(path)
    unlink = Path.unlink

    def lose(file: Path, missing_ok: bool = False) -> None:
        unlink(file, missing_ok)
        assert other.campaign() is None

    monkeypatch.setattr(os, "truncate", refuse)
    monkeypatch.setattr(Path, "unlink", lose)
    with pytest.raises(LeadershipLost, match="another process has it now"):
        store.discard()
    with pytest.raises(LeadershipLost):
        store.append(FIRST)


def test_an_entry_that_is_over_and_can_be_neither_emptied_nor_removed_is_named_and_kept_from_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = led(path)
    store.append(FIRST)
    monkeypatch.setattr(os, "truncate", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(FileProblem, match=r"can be neither emptied \(Input/output error\) nor removed: remove it before"):
        store.discard()
    assert FileStore(path).campaign() is not None
    store.append(SECOND)  # the job goes on
    assert store.last() == SECOND


def test_the_term_outlives_an_entry_that_could_not_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = led(path)
    store.resign()
    store = led(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(FileProblem):
            store.append(FIRST)
    store.resign()
    assert led(path).term == 3
