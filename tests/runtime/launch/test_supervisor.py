"""A supervisor keeps a worker on every slot, whatever launches it: here a launcher without processes, which a test scripts."""

from collections.abc import Sequence

import pytest

from recycle.runtime.launch import restart_policy, supervisor
from recycle.runtime.launch.supervisor import EndKind, Launcher, Supervisor, WorkerEnd, WorkerSlot

SLOTS = [WorkerSlot(0), WorkerSlot(1, "GPU-7")]
FAILED, LOST = (EndKind.FAILED, "failed with exit code 3"), (EndKind.LOST, "is lost")


class ScriptedLauncher:
    """A launcher whose workers end as `end` says."""

    def __init__(self) -> None:
        self.started: list[WorkerSlot] = []
        self.cannot_start: set[WorkerSlot] = set()
        self.waits_s: list[float] = []
        self._ends: list[WorkerEnd] = []

    def start(self, slot: WorkerSlot) -> None:
        if slot in self.cannot_start:
            raise OSError(24, "Too many open files")
        self.started.append(slot)

    def wait(self, timeout_s: float) -> Sequence[WorkerEnd]:
        assert timeout_s >= 0
        self.waits_s.append(timeout_s)
        ends, self._ends = self._ends, []
        return ends

    def end(self) -> None: ...

    def ends(self, slot: WorkerSlot, kind: EndKind, how: str = "") -> None:
        self._ends.append(WorkerEnd(slot, kind, how))


class Harness:
    def __init__(self, restarts: int = 2) -> None:
        self.launcher, self.said = ScriptedLauncher(), list[str]()
        seam: Launcher = self.launcher
        self.supervisor = Supervisor(seam, SLOTS, restarts, self.said.append, "it comes back in {} s")
        self.step()

    def step(self) -> None:
        self.supervisor.step(0.0)

    def end(self, slot: WorkerSlot, kind: EndKind, how: str = "") -> None:
        """Have a worker end, and what is due be started."""
        self.launcher.ends(slot, kind, how)
        self.step()
        self.step()


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Harness:
    monkeypatch.setattr(restart_policy, "_FIRST_S", 0.0)
    monkeypatch.setattr(supervisor, "_LEFT_S", 0.0)
    return Harness()


def test_a_worker_that_fails_too_often_is_set_aside_and_named(harness: Harness) -> None:
    for _ in range(3):
        harness.end(SLOTS[1], *FAILED)
    assert harness.launcher.started == [*SLOTS, SLOTS[1], SLOTS[1]]
    assert harness.said == [
        *["worker 1 on GPU-7 failed with exit code 3; it comes back in 0 s"] * 2,
        "worker 1 on GPU-7 failed with exit code 3, too often within an hour: it is set aside, and the job goes on without it",
    ]
    assert harness.supervisor.last_failure == "worker 1 on GPU-7 failed with exit code 3"
    assert (harness.supervisor.num_left, harness.supervisor.running) == (1, {SLOTS[0]})
    assert not harness.supervisor.is_done


def test_one_that_is_lost_with_its_machine_comes_back_however_often(harness: Harness) -> None:
    for _ in range(20):
        harness.end(SLOTS[0], *LOST)
    assert harness.launcher.started.count(SLOTS[0]) == 21
    assert harness.supervisor.num_left == 2


def test_another_one_takes_the_place_of_one_that_left(harness: Harness) -> None:
    harness.end(SLOTS[0], EndKind.LEFT)
    assert harness.launcher.started == [*SLOTS, SLOTS[0]]
    assert harness.said == []


def test_one_that_is_refused_does_not_come_back(harness: Harness) -> None:
    harness.end(SLOTS[0], EndKind.REFUSED)
    assert harness.launcher.started == SLOTS
    assert harness.said == ["worker 0 was refused, and is not started again"]
    harness.end(SLOTS[1], EndKind.REFUSED)
    assert harness.supervisor.is_done
    assert not harness.supervisor.is_over


def test_when_the_job_is_over_nobody_is_started_and_those_that_run_are_waited_for(harness: Harness) -> None:
    harness.launcher.ends(SLOTS[0], EndKind.OVER)
    harness.step()
    assert harness.supervisor.is_over
    assert not harness.supervisor.is_done
    harness.end(SLOTS[1], *FAILED)
    assert harness.launcher.started == SLOTS
    assert harness.supervisor.is_done


def test_one_that_cannot_be_started_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "_FIRST_S", 0.0)
    harness = Harness(restarts=3)
    harness.launcher.cannot_start.add(SLOTS[0])
    harness.end(SLOTS[0], *FAILED)
    assert "worker 0 could not be started (Too many open files); it comes back in 0 s" in harness.said
    harness.launcher.cannot_start.clear()
    harness.step()
    assert harness.supervisor.running == set(SLOTS)


def test_nobody_comes_back_after_a_stop(harness: Harness) -> None:
    harness.supervisor.stop_restarts()
    harness.end(SLOTS[0], *FAILED)
    harness.end(SLOTS[1], *LOST)
    assert (harness.launcher.started, harness.said) == (SLOTS, [])
    assert harness.supervisor.is_done


@pytest.mark.parametrize("how", ["stopped", "over"])
def test_a_worker_that_was_due_when_nothing_is_started_any_more_keeps_nobody_awake(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(restart_policy, "_FIRST_S", 0.0)
    harness = Harness()
    harness.launcher.ends(SLOTS[0], *FAILED)
    if how == "over":
        harness.launcher.ends(SLOTS[1], EndKind.OVER)
    else:
        harness.supervisor.stop_restarts()
    harness.step()
    harness.launcher.waits_s.clear()
    harness.supervisor.step(5.0)
    assert harness.launcher.waits_s == [5.0]
    assert harness.launcher.started == SLOTS
