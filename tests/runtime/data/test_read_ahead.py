"""Loader processes: they make the same micro-batches as the worker itself, ahead of it, and never outlive it."""

import multiprocessing
import os
import signal
import socket
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from recycle.core.cluster import Shape
from recycle.core.errors import DataFailed
from recycle.host.process_lifetime import process_state
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.data import read_ahead
from recycle.runtime.data.data_options import DataOptions
from recycle.runtime.data.read_ahead import DirectReader, LoaderDied, ReadAhead
from tests.processes import depends_on_load

torch.set_num_threads(1)
SHAPE = Shape(2, 2, 3)
PLACES = [(0, 0), (1, 2), (0, 1)]


class Drawn:
    """Samples that are drawn from the global generators, and say in which process they were made."""

    fingerprint = "drawn"

    def __len__(self):
        return 40

    def __getitem__(self, number):
        return torch.rand(3), torch.tensor([number, os.getpid()])


class Trouble(Drawn):
    """A dataset that does something at one sample."""

    def __init__(self, at, what):
        self.at, self.what = at, what

    def __getitem__(self, number):
        if number == self.at:
            self.what()
        return super().__getitem__(number)


class Slow(Drawn):
    def __getitem__(self, number):
        time.sleep(0.1)
        return super().__getitem__(number)


def trouble(what):
    """The dataset that does `what` at the first sample of the second place in the first step."""
    at = MicroBatches(Drawn(), SHAPE, 2, 5).numbers(0, *PLACES[1])[0]
    return Trouble(at, what)


@contextmanager
def reading(dataset, processes=2, steps=range(4), on_wait=lambda has_moved: None, **options):
    options = DataOptions(loader_processes=processes, **options)
    reader = ReadAhead(MicroBatches(dataset, SHAPE, 2, 5), options, PLACES, steps, (True, True), None, on_wait)
    try:
        yield reader
    finally:
        reader.close()


def addresses(steps):
    return [(step, *place) for step in steps for place in PLACES]


@pytest.mark.parametrize("processes", [1, 3])
def test_loader_processes_make_what_the_worker_itself_would_make(processes):
    own = DirectReader(MicroBatches(Drawn(), SHAPE, 2, 5))
    with reading(Drawn(), processes, range(3, 6)) as reader:
        pids = set()
        for address in addresses(range(3, 6)):
            (made, about), (expected, of_own) = reader.get(*address), own.get(*address)
            assert torch.equal(made, expected)
            assert torch.equal(about[:, 0], of_own[:, 0])
            pids |= set(about[:, 1].tolist())
    assert len(pids) == processes
    assert os.getpid() not in pids


def test_only_what_a_stage_needs_travels():
    batches = MicroBatches(Drawn(), SHAPE, 2, 5)
    for takes in ((True, False), (False, True)):
        reader = ReadAhead(batches, DataOptions(1), PLACES, range(1), takes, None, lambda has_moved: None)
        assert tuple(part is not None for part in reader.get(0, *PLACES[0])) == takes
        reader.close()


def test_samples_are_made_ahead():
    """With two processes that make two micro-batches each ahead, a worker that computes longer never waits."""
    with reading(Slow(), 2, range(3)) as reader:
        reader.get(*addresses(range(3))[0])
        waited_us = reader.waited_us
        for address in addresses(range(3))[1:]:
            time.sleep(0.3)
            reader.get(*address)
        with depends_on_load():
            assert reader.waited_us - waited_us < 0.5 * 8 * 0.2e6


def test_a_sample_that_raises_is_named():
    def fail():
        raise OSError("the disk is gone")

    data = trouble(fail)
    with reading(data) as reader:
        reader.get(0, *PLACES[0])
        sentence = rf"^sample {data.at} of the dataset raised OSError in test_read_ahead.py, line \d+: the disk is gone; mend"
        with pytest.raises(DataFailed, match=sentence):
            reader.get(0, *PLACES[1])


def test_a_sample_that_never_comes_is_named_after_the_deadline():
    data = trouble(lambda: time.sleep(1000))
    with reading(data, timeout_s=1.0) as reader:
        reader.get(0, *PLACES[0])
        sentence = (
            rf"no sample was made for \d s, and a worker waits for micro-batch 2 of pipeline 1 in step 1 \(samples {data.at}, "
        )
        with pytest.raises(DataFailed, match=sentence):
            reader.get(0, *PLACES[1])


def test_processes_of_which_nothing_comes_are_started_again(monkeypatch, tmp_path):
    """As one does that was forked while another thread held a lock."""

    def stand_still_at_first():
        if not (tmp_path / "begun").exists():
            (tmp_path / "begun").touch()
            time.sleep(1000)

    monkeypatch.setattr(read_ahead, "_PATIENCE_S", 1.0)
    own = MicroBatches(Drawn(), SHAPE, 2, 5)
    with reading(trouble(stand_still_at_first), processes=2) as reader:
        for address in addresses(range(3)):
            assert torch.equal(reader.get(*address)[0], own.get(*address)[0])


def test_a_loader_process_that_is_killed_is_noticed_at_once():
    data = trouble(lambda: os.kill(os.getpid(), signal.SIGKILL))
    with reading(data, timeout_s=60) as reader:
        start_s = time.monotonic()
        with pytest.raises(LoaderDied, match=r"loader process \d+ was killed by SIGKILL: is the machine out of memory\?"):
            [reader.get(0, *place) for place in PLACES[:2]]  # processes work ahead: the first one may not arrive either
        with depends_on_load():
            assert time.monotonic() - start_s < 30, "it waited until its time was over"


def test_a_wait_ends_when_the_epoch_does():
    class Over(Exception):
        pass

    def stop(has_moved):
        raise Over

    data = Trouble(MicroBatches(Drawn(), SHAPE, 2, 5).numbers(0, *PLACES[0])[0], lambda: time.sleep(1000))
    with reading(data, on_wait=stop) as reader, pytest.raises(Over):
        reader.get(0, *PLACES[0])


def files_of(pid):
    """What the file descriptors of a process are."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(path))
    return found


def has_gone(pid):
    return process_state(pid) in ("", "Z")


def wait_until(holds, timeout_s=20.0):
    end_s = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.01)
    return holds()


def test_closing_ends_the_processes_even_in_the_middle_of_a_sample():
    with reading(trouble(lambda: time.sleep(1000)), 2) as reader:
        reader.get(0, *PLACES[0])
        pids = [child.pid for child in reader._processes.children]
    assert len(pids) == 2
    assert wait_until(lambda: all(map(has_gone, pids)))


def _be_worker(connection, kept):
    """A worker whose loader processes are busy, until it is killed."""
    reader = ReadAhead(
        MicroBatches(trouble(_hold_all), SHAPE, 2, 5),
        DataOptions(2),
        PLACES,
        range(4),
        (True, True),
        None,
        lambda has_moved: None,
    )
    reader.get(0, *PLACES[0])
    connection.send([child.pid for child in reader._processes.children])
    reader.get(0, *PLACES[1])


def _hold_all():
    """Code in which no other Python thread runs."""
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


def test_loader_processes_die_with_a_worker_that_is_killed_and_hold_none_of_its_connections():
    own, theirs = socket.socketpair()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=_be_worker, args=(sender, theirs))
    worker.start()
    number = os.fstat(theirs.fileno()).st_ino
    theirs.close()
    pids = receiver.recv()
    assert not any(map(has_gone, pids))
    assert f"socket:[{number}]" in files_of(worker.pid)
    assert wait_until(lambda: all(f"socket:[{number}]" not in files_of(pid) for pid in pids))
    worker.kill()
    worker.join()
    own.settimeout(5)
    assert own.recv(1) == b"", "the connection of a dead worker is closed"
    assert wait_until(lambda: all(map(has_gone, pids)))
