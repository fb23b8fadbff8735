"""Gloo loses errors, and destructors of groups do not end: nobody waits for that."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recycle.core.cluster import Worker
from recycle.runtime.transport import gloo_groups
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.specs import GroupView, TransportBroken, TransportSpec
from recycle.runtime.transport.wait_thread import GlooWork
from tests.warm_processes import warm_context

pytestmark = pytest.mark.timeout(60)


class Endless:
    """A group whose destructor waits for an event; `is_dropped` says that it has begun."""

    def __init__(self) -> None:
        self.goes_on, self.is_dropped = threading.Event(), threading.Event()

    def __del__(self) -> None:
        self.is_dropped.set()
        self.goes_on.wait(50)


def test_a_worker_leaves_an_epoch_whose_groups_cannot_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_groups, "_CLOSE_S", 0.1)
    view = GroupView(Worker(0, 0), [Worker(0, 0)])
    groups = GlooGroups(dist.HashStore(), view, TransportSpec({}, 1, (), timedelta(seconds=5)))
    endless = Endless()
    goes_on, is_dropped = endless.goes_on, endless.is_dropped
    groups._all = gloo_groups._Group(endless, ())
    del endless
    groups.close()  # it would wait for 50 s
    assert is_dropped.is_set()
    assert not goes_on.is_set()
    (closing,) = [thread for thread in threading.enumerate() if thread.name == "transport close"]
    goes_on.set()
    closing.join(20)
    assert not closing.is_alive()


BOTH, LARGE = [Worker(0, 0), Worker(1, 0)], torch.zeros(100_000_000, dtype=torch.uint8)


def groups_of(worker: Worker, store: Path) -> GlooGroups:
    return GlooGroups(dist.FileStore(str(store), 2), GroupView(worker, BOTH), TransportSpec({}, 1, (), timedelta(seconds=50)))


def begin(groups: GlooGroups, kind: str, other: Worker) -> object:
    if kind == "sum":
        return GlooWork(groups._sums[None].backend.allreduce([LARGE], groups._options), groups._waits)
    return (groups.begin_send if kind == "send" else groups.begin_receive)(LARGE, other, 7)


def begin_and_die(kind: str, store: Path) -> None:
    groups = groups_of(BOTH[1], store)
    begin(groups, kind, BOTH[0])
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_one_that_dies(kind: str, kind_of_other: str, store: Path) -> bool:
    """Wait for a worker that dies soon after it has begun; return whether that was in the middle of the tensor."""
    dying = warm_context().Process(target=begin_and_die, args=(kind_of_other, store))
    dying.start()
    groups = groups_of(BOTH[0], store)
    work = begin(groups, kind, BOTH[1])
    dying.join(30)
    assert dying.exitcode == -signal.SIGKILL
    threading.Timer(0.5, groups.abort).start()
    begun_s = time.monotonic()
    try:
        groups.wait(work, "W1_0")
    except TransportBroken:
        return True
    finally:
        assert time.monotonic() < begun_s + 20
        groups.abort()
        groups.close()
    return False


@pytest.mark.parametrize(("kind", "kind_of_other"), [("receive", "send"), ("send", "receive"), ("sum", "sum")])
def test_a_wait_for_a_worker_that_died_in_the_middle_of_a_tensor_ends_with_the_epoch(
    kind: str, kind_of_other: str, tmp_path: Path
) -> None:
    """Before there was a thread that waits, gloo kept the first two for 50 s."""
    assert any(wait_for_one_that_dies(kind, kind_of_other, tmp_path / str(number)) for number in range(5))


class SlowToAbort:
    """The connections of a group that is closed while another thread aborts it.

    `dropped_by` is the thread that runs its destructor.
    """

    def __init__(self) -> None:
        self.is_aborting, self.is_closed, self.dropped_by = threading.Event(), threading.Event(), list[str]()

    def __len__(self) -> int:
        self.is_aborting.set()
        self.is_closed.wait(0.3)
        return 0

    def __del__(self) -> None:
        self.dropped_by.append(threading.current_thread().name)


def test_the_thread_that_aborts_never_runs_a_destructor() -> None:
    """It is the one that talks with the coordinator."""
    view = GroupView(Worker(0, 0), [Worker(0, 0)])
    groups = GlooGroups(dist.HashStore(), view, TransportSpec({}, 1, (), timedelta(seconds=5)))
    slow = SlowToAbort()
    is_aborting, is_closed, dropped_by = slow.is_aborting, slow.is_closed, slow.dropped_by
    groups._all = gloo_groups._Group(None, slow)  # type: ignore[arg-type]
    del slow
    aborting = threading.Thread(target=groups.abort)
    aborting.start()
    assert is_aborting.wait(20)
    groups.close()
    is_closed.set()
    aborting.join(20)
    assert dropped_by == ["transport close"]
