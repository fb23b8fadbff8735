"""Prefetched plans: ready when a worker dies, else made at once, whatever happens to the planning process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, parent_process
from pathlib import Path

import pytest

import recycle
from recycle.control.planning.kept_plans import pack_if_large
from recycle.control.planning.plan_prefetch import PlanPrefetch, likely_failures
from recycle.control.planning.planning_process import PlanningProcess
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import FileProblem
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import NoWorkerLeft, PlanAssignment, PlanFolder, num_live_at, places_for
from recycle.core.plans.rules import check
from recycle.core.plans.steady_period import steady_period_us, with_speeds
from recycle.core.problem import Problem
from recycle.core.profile import Profile
from recycle.planner.live_planner import Planner
from tests.builders import as_early_as_possible, dead, plan_of
from tests.processes import ends_with, is_there, wait_for
from tests.warm_processes import warm_context

pytestmark = pytest.mark.timeout(90)
SHAPE = Shape(4, 1, 2)


def hand_made(failed: frozenset[Worker]) -> Plan:
    """A plan of one stage: the first live worker runs the ops of the dead ones."""
    cluster = Cluster(SHAPE, failed)
    live = cluster.live_pipelines(0)
    orders: dict[Worker, list[Op]] = {worker: [] for worker in cluster.live_workers()}
    for home in range(SHAPE.num_pipelines):
        worker = Worker(home if home in live else live[0], 0)
        for index in range(SHAPE.num_microbatches):
            orders[worker] += [Op(0, kind, MicroBatch(home, index)) for kind in (Kind.F, Kind.B)]
    problem = Problem(cluster, Profile.uniform(1, 1, 1, 1))
    return plan_of(problem, as_early_as_possible(problem, orders))


@dataclass(frozen=True)
class Scripted:
    """A source that logs each request with its process, and holds one request back until the test releases it."""

    log: Path
    gate: Path | None = None
    held: frozenset[Worker] | None = None
    is_deadly: bool = False

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        names = "+".join(map(str, sorted(failed))) or "none"
        with self.log.open("a") as stream:
            stream.write(f"{os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)} {names}\n")
        if self.is_deadly and parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.gate is not None and failed == self.held:
            self.gate.read_text()  # from a named pipe: it lasts until the test has written
        num_live_at(SHAPE, failed)
        plan = hand_made(failed)
        return PlanAssignment(plan, places_for(plan.problem.cluster, failed), "made by hand")

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.log.read_text().splitlines()]

    def requests(self) -> list[str]:
        return [names for _, _, names in self.lines()]

    def pids(self) -> list[int]:
        """The processes that planned, in order."""
        return list(dict.fromkeys(int(pid) for pid, _, _ in self.lines()))

    def release(self) -> None:
        assert self.gate is not None
        self.gate.write_text("go")


@pytest.fixture
def source(tmp_path: Path) -> Scripted:
    log = tmp_path / "log"
    log.touch()
    return Scripted(log)


@pytest.fixture
def holding(tmp_path: Path) -> Scripted:
    """A source that holds back the plan for W0_0 dead."""
    log, gate = tmp_path / "log", tmp_path / "gate"
    log.touch()
    os.mkfifo(gate)
    return Scripted(log, gate, dead("W0_0"))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def warm_prefetch(source: Scripted) -> PlanPrefetch:
    """A prefetch whose first planning process starts fast, because it is forked from a server."""
    return PlanPrefetch(source, PlanningProcess(warm_context()))  # type: ignore[arg-type]


def num_ready(prefetch: PlanPrefetch) -> int:
    """The number of prefetched plans that are ready."""
    with prefetch._changed:
        return sum(failed in prefetch._kept for failed in prefetch._wanted)


def answer(prefetch: PlanPrefetch, failed: frozenset[Worker]) -> PlanAssignment:
    return prefetch.request(failed).result(60)


def is_right(assignment: PlanAssignment, failed: frozenset[Worker]) -> bool:
    return assignment.plan.problem.cluster.failed == failed and check(assignment.plan) == []


def test_likely_are_one_more_failure_one_return_and_the_same_set() -> None:
    assert likely_failures(dead("W1_0"), Shape(2, 2, 1)) == [
        dead("W1_0", "W0_0"),
        dead("W1_0", "W0_1"),
        dead("W1_0", "W1_1"),
        frozenset(),
        dead("W1_0"),
    ]


def test_likely_failures_have_their_plans_ready(source: Scripted) -> None:
    with closing(warm_prefetch(source)) as prefetch:
        prefetch.prepare(dead("W0_0"), SHAPE)
        wait_for(lambda: num_ready(prefetch) == 5, 30)
        assert source.requests() == ["W0_0+W1_0", "W0_0+W2_0", "W0_0+W3_0", "none", "W0_0"]
        for failed in likely_failures(dead("W0_0"), SHAPE):
            assert is_right(answer(prefetch, failed), failed)
        assert len(source.requests()) == 5
        (pid,) = source.pids()
        assert pid != os.getpid()


def test_the_planner_is_loaded_after_a_first_request_even_without_a_plan(source: Scripted) -> None:
    with closing(warm_prefetch(source)) as prefetch:
        assert not prefetch.is_loaded
        with pytest.raises(NoWorkerLeft):
            answer(prefetch, frozenset(SHAPE.workers()))
        assert prefetch.is_loaded


def test_only_the_first_plan_is_made_at_normal_priority(source: Scripted) -> None:
    with closing(warm_prefetch(source)) as prefetch:
        prefetch.prepare(frozenset(), SHAPE)
        wait_for(lambda: num_ready(prefetch) == 5, 30)
        own = str(os.getpriority(os.PRIO_PROCESS, 0))
        assert [nice for _, nice, _ in source.lines()] == [own, "19", "19", "19", "19"]


def test_a_plan_that_is_ready_is_not_made_again(source: Scripted) -> None:
    with closing(warm_prefetch(source)) as prefetch:
        answer(prefetch, dead("W0_0"))
        prefetch.prepare(frozenset(), SHAPE)
        wait_for(lambda: num_ready(prefetch) == 5, 30)
        assert source.requests() == ["W0_0", "W1_0", "W2_0", "W3_0", "none"]


def test_an_urgent_request_goes_before_prefetching(holding: Scripted) -> None:
    with closing(warm_prefetch(holding)) as prefetch:
        prefetch.prepare(frozenset(), SHAPE)
        wait_for(lambda: holding.requests() == ["W0_0"], 30)
        urgent = prefetch.request(dead("W1_0", "W2_0"))
        wait_for(lambda: bool(prefetch._urgent), 10)
        holding.release()
        assert is_right(urgent.result(10), dead("W1_0", "W2_0"))
        wait_for(lambda: num_ready(prefetch) == 5, 10)
        assert holding.requests() == ["W0_0", "W1_0+W2_0", "W1_0", "W2_0", "W3_0", "none"]


def test_failures_that_are_no_longer_likely_are_dropped(holding: Scripted) -> None:
    with closing(warm_prefetch(holding)) as prefetch:
        prefetch.prepare(frozenset(), SHAPE)
        wait_for(lambda: holding.requests() == ["W0_0"], 30)
        prefetch.prepare(dead("W3_0"), SHAPE)
        holding.release()
        wait_for(lambda: num_ready(prefetch) == 5, 10)
        assert holding.requests() == ["W0_0", "W0_0+W3_0", "W1_0+W3_0", "W2_0+W3_0", "none", "W3_0"]


def test_simultaneous_requests_for_the_same_failures_make_one_plan(source: Scripted, threads: ThreadPoolExecutor) -> None:
    with closing(warm_prefetch(source)) as prefetch:
        requested = [dead("W0_0"), dead("W1_0"), dead("W2_0")] * 8
        answers = list(threads.map(partial(answer, prefetch), requested))
        assert all(map(is_right, answers, requested))
        assert sorted(source.requests()) == ["W0_0", "W1_0", "W2_0"]


def test_a_plan_comes_although_the_idle_process_was_killed(source: Scripted) -> None:
    with closing(warm_prefetch(source)) as prefetch:
        answer(prefetch, frozenset())
        (first,) = source.pids()
        os.kill(first, signal.SIGKILL)
        assert is_right(answer(prefetch, dead("W1_0")), dead("W1_0"))
        assert source.pids()[0] == first
        assert len(set(source.pids()) - {os.getpid()}) == 2
        assert not is_there(first)


def test_a_plan_comes_although_the_planning_process_was_killed(holding: Scripted) -> None:
    with closing(warm_prefetch(holding)) as prefetch:
        future = prefetch.request(dead("W0_0"))
        wait_for(lambda: len(holding.pids()) == 1, 30)
        os.kill(holding.pids()[0], signal.SIGKILL)
        wait_for(lambda: len(holding.pids()) == 2, 30)
        holding.release()
        assert is_right(future.result(10), dead("W0_0"))
        assert os.getpid() not in holding.pids()


def test_a_request_that_kills_every_process_is_planned_in_this_one(tmp_path: Path) -> None:
    source = Scripted(tmp_path / "log", is_deadly=True)
    with closing(warm_prefetch(source)) as prefetch:
        assert is_right(answer(prefetch, dead("W1_0")), dead("W1_0"))
        assert len(source.pids()) == 3
        assert source.pids()[-1] == os.getpid()


def test_a_set_of_failures_without_a_plan_raises_in_the_requesting_thread(source: Scripted) -> None:
    everybody = frozenset(SHAPE.workers())
    with closing(warm_prefetch(source)) as prefetch:
        prefetch.prepare(everybody - dead("W0_0"), SHAPE)
        for _ in range(2):
            with pytest.raises(NoWorkerLeft, match="no worker is left for stage 0"):
                answer(prefetch, everybody)
        assert is_right(answer(prefetch, dead("W0_0")), dead("W0_0"))
        assert len(source.pids()) == 1


def test_a_request_that_failed_once_may_succeed_later(tmp_path: Path) -> None:
    folder = PlanFolder(tmp_path)
    with closing(PlanPrefetch(folder)) as prefetch:
        with pytest.raises(FileProblem, match=r"save it as plan-W1_0.json"):
            answer(prefetch, dead("W1_0"))
        hand_made(dead("W1_0")).save(folder.path(dead("W1_0")))
        assert is_right(answer(prefetch, dead("W1_0")), dead("W1_0"))


class Unpicklable:
    """A source that cannot be sent to another process."""

    def __init__(self) -> None:
        self.own = lambda: None

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        raise AssertionError


def test_a_source_that_cannot_be_pickled_raises_instead_of_waiting() -> None:
    with closing(PlanPrefetch(Unpicklable())) as prefetch:
        for _ in range(2):
            with pytest.raises(Exception, match="pickle"):
                answer(prefetch, frozenset())


def test_the_number_of_kept_plans_is_limited_and_likely_ones_are_kept_first(
    source: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recycle.control.planning.plan_prefetch._MOST_PLANS", 5)
    with closing(warm_prefetch(source)) as prefetch:
        prefetch.prepare(frozenset(), SHAPE)
        wait_for(lambda: num_ready(prefetch) == 5, 30)
        answer(prefetch, dead("W1_0", "W2_0"))
        assert num_ready(prefetch) == 5
        assert len(source.requests()) == 6
        answer(prefetch, dead("W1_0"))
        assert len(source.requests()) == 6
        answer(prefetch, dead("W1_0", "W2_0"))
        assert len(source.requests()) == 7


def test_of_huge_plans_fewer_are_kept(source: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recycle.control.planning.plan_prefetch._MOST_OPS", 2 * 3 * SHAPE.num_chains)
    with closing(warm_prefetch(source)) as prefetch:
        prefetch.prepare(frozenset(), SHAPE)
        wait_for(lambda: num_ready(prefetch) == 2, 30)
        assert len(source.requests()) == 2


@pytest.mark.parametrize("is_packed", [False, True])
def test_if_not_all_plans_can_be_kept_one_worker_stands_for_its_peers(
    source: Scripted, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    monkeypatch.setattr("recycle.control.planning.plan_prefetch._MOST_PLANS", 2)
    monkeypatch.setattr("recycle.control.planning.kept_plans._MOST_OPS_UNPACKED", 0 if is_packed else 1000)
    with closing(warm_prefetch(source)) as prefetch:
        prefetch.prepare(frozenset(), SHAPE)
        wait_for(lambda: num_ready(prefetch) == 2, 30)
        num, made = len(source.requests()), source.answer(dead("W3_0")).with_texts()
        with prefetch._changed:  # as the planning process would have packed it
            prefetch._kept[dead("W3_0")] = pack_if_large(made)
        assert answer(prefetch, dead("W3_0")) == made
        found = answer(prefetch, dead("W1_0"))
        assert found.written == made.written
        assert set(found.places.values()) == set(SHAPE.workers()) - dead("W1_0")
        assert set(found.places) == set(found.plan.problem.cluster.live_workers())
        assert all(place.stage == now.stage for place, now in found.moves)
        assert len(source.requests()) == num + 1


def test_closing_ends_the_process_at_once_and_cancels_requests(holding: Scripted) -> None:
    prefetch = PlanPrefetch(holding)
    future = prefetch.request(dead("W0_0"))
    wait_for(lambda: len(holding.pids()) == 1, 30)
    prefetch.close()
    with pytest.raises(CancelledError):
        future.result(10)
    assert not is_there(holding.pids()[0])
    assert not any(child.name == "plan prefetch" for child in active_children())
    with pytest.raises(CancelledError):
        answer(prefetch, dead("W1_0"))
    prefetch.close()


def test_closing_while_the_process_starts_leaves_none(source: Scripted) -> None:
    prefetch = PlanPrefetch(source)
    prefetch.prepare(frozenset(), SHAPE)
    prefetch.close()
    assert not any(child.name == "plan prefetch" for child in active_children())
    assert not any(map(is_there, source.pids()))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="asks Linux's /proc what is open")
def test_neither_a_killed_process_nor_a_closed_source_leaves_anything_open(source: Scripted) -> None:
    def survive_a_kill() -> int:
        with closing(warm_prefetch(source)) as prefetch:
            answer(prefetch, dead("W0_0"))
            os.kill(source.pids()[-1], signal.SIGKILL)
            answer(prefetch, dead("W1_0"))
        return len(os.listdir("/proc/self/fd"))

    num_open = survive_a_kill()  # the first time multiprocessing opens something of its own
    assert [survive_a_kill() for _ in range(3)] == [num_open] * 3
    assert not any(map(is_there, source.pids()))


SCRIPT = """
import sys, threading
from pathlib import Path
from recycle.control.planning.plan_prefetch import PlanPrefetch
from recycle.core.cluster import Shape

class Blocked:
    def answer(self, failed):
        import os, threading
        with open(sys.argv[1], "a") as stream:
            stream.write(f"{os.getpid()}\\n")
        threading.Event().wait(60)

if __name__ == "__main__":
    PlanPrefetch(Blocked()).prepare(frozenset(), Shape(4, 1, 2))
    threading.Event().wait(60)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="asks Linux's /proc who is there")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_process_is_left_behind_however_its_parent_ends(end: signal.Signals, tmp_path: Path) -> None:
    script, pids = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    pids.touch()
    parent = subprocess.Popen([sys.executable, str(script), str(pids)], stderr=subprocess.DEVNULL, start_new_session=True)
    assert ends_with(parent, pids, 1, end)


FORKED = """
import os, sys
from contextlib import closing
from multiprocessing import get_context
from recycle.control.planning.plan_prefetch import PlanPrefetch
from recycle.control.planning.planning_process import PlanningProcess

class Lists:
    def answer(self, failed):
        raise ValueError(" ".join(os.readlink(f"/proc/{os.getpid()}/fd/{fd}") for fd in map(int, fds()) if fd > 2))

def fds():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(fd))
        except OSError:
            continue
        found.append(fd)
    return found

if __name__ == "__main__":
    reader, writer = os.pipe()
    with closing(PlanPrefetch(Lists(), PlanningProcess(get_context("fork")))) as prefetch:
        problem = prefetch.request(frozenset()).exception(60)
        assert isinstance(problem, ValueError), problem
        print(os.readlink(f"/proc/self/fd/{writer}") in str(problem).split(), len(str(problem).split()))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="asks Linux's /proc for the open files")
def test_a_forked_planning_process_keeps_no_file_of_its_parent_open(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORKED)
    ran = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "False 2\n"  # its pipe, and the one that closes with its parent


def test_a_planner_has_a_legal_plan_ready_for_every_single_failure() -> None:
    problem = recycle.problem(3, 4, 6, costs=(10, 13, 9), comm=1, memory=6)
    with closing(PlanPrefetch(Planner(problem))) as prefetch:
        prefetch.prepare(frozenset(), problem.shape)
        wait_for(lambda: num_ready(prefetch) == 13, 60)
        for worker in problem.shape.workers():
            assignment = answer(prefetch, frozenset({worker}))
            assert check(assignment.plan) == []
            assert worker not in assignment.places.values()


def test_plans_for_speeds_are_kept_by_their_speeds() -> None:
    problem = recycle.problem(3, 2, 4, costs="10,13,9")
    slow = ((Worker(1, 1), 0.5),)
    with closing(PlanPrefetch(Planner(problem), PlanningProcess(warm_context()))) as prefetch:
        equal = prefetch.request(frozenset(), ()).result(60).plan
        for_slow = prefetch.request(frozenset(), slow).result(60).plan
        assert (equal.problem.speeds, for_slow.problem.speeds) == ((), slow)
        prefetch.prepare(frozenset(), problem.shape, slow)
        after = prefetch.request(dead("W0_0"), slow).result(60).plan
        assert after.problem.speeds == slow
        present = with_speeds(equal, slow)
        assert prefetch.compare([present, for_slow]).result(60) == [steady_period_us(present), steady_period_us(for_slow)]


def test_plans_are_compared_although_the_planning_process_was_killed(source: Scripted) -> None:
    plan = hand_made(frozenset())
    with closing(warm_prefetch(source)) as prefetch:
        answer(prefetch, frozenset())
        for child in active_children():
            if child.name == "plan prefetch":
                child.kill()
        assert prefetch.compare([plan]).result(60) == [steady_period_us(plan)]
    assert prefetch.compare([plan]).cancelled()


def test_a_source_that_knows_no_speeds_plans_as_if_all_were_equal(source: Scripted) -> None:
    with closing(warm_prefetch(source)) as prefetch:
        assert prefetch.request(frozenset(), ((Worker(0, 0), 0.5),)).result(60).plan == hand_made(frozenset())
