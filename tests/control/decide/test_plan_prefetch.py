"""Plans made ahead: ready when somebody dies, made at once when not, whatever happens to the process that makes them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import active_children, parent_process
from pathlib import Path

import pytest

import recycle
from recycle.control.decide.plan_prefetch import PlanPrefetch, likely_failures
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import FileProblem
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import NoWorkerLeft, PlanAssignment, PlanFolder, num_live_at, places_for
from recycle.core.plans.rules import check
from recycle.core.problem import Problem
from recycle.core.profile import Profile
from recycle.planner.live_planner import Planner
from tests.builders import as_early_as_possible, plan_of
from tests.processes import ends_with, is_there, until

pytestmark = pytest.mark.timeout(90)
SHAPE = Shape(4, 1, 2)


def dead(*names: str) -> frozenset[Worker]:
    return frozenset(map(Worker.parse, names))


def hand_made(failed: frozenset[Worker]) -> Plan:
    """A plan of one stage: the first live worker does what the dead would do."""
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
    """A source that writes down who asks what, and holds one question back until the test lets it go."""

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

    def asked(self) -> list[str]:
        return [names for _, _, names in self.lines()]

    def pids(self) -> list[int]:
        """The processes that were asked, in order."""
        return list(dict.fromkeys(int(pid) for pid, _, _ in self.lines()))

    def let_go(self) -> None:
        assert self.gate is not None
        self.gate.write_text("go")


@pytest.fixture
def source(tmp_path: Path) -> Scripted:
    log = tmp_path / "log"
    log.touch()
    return Scripted(log)


@pytest.fixture
def holding(tmp_path: Path) -> Scripted:
    """A source that holds back the question who plays when W0_0 is dead."""
    log, gate = tmp_path / "log", tmp_path / "gate"
    log.touch()
    os.mkfifo(gate)
    return Scripted(log, gate, dead("W0_0"))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def is_right(answer: PlanAssignment, failed: frozenset[Worker]) -> bool:
    return answer.plan.problem.cluster.failed == failed and check(answer.plan) == []


def test_next_are_one_more_failure_one_worker_back_and_the_same_again() -> None:
    assert likely_failures(dead("W1_0"), Shape(2, 2, 1)) == [
        dead("W1_0", "W0_0"),
        dead("W1_0", "W0_1"),
        dead("W1_0", "W1_1"),
        frozenset(),
        dead("W1_0"),
    ]


def test_what_may_happen_next_is_ready_when_it_happens(source: Scripted) -> None:
    with PlanPrefetch(source) as ahead:
        ahead.prepare(dead("W0_0"), SHAPE)
        assert until(lambda: ahead.num_ready == 5, 30)
        assert source.asked() == ["W0_0+W1_0", "W0_0+W2_0", "W0_0+W3_0", "none", "W0_0"]
        for failed in likely_failures(dead("W0_0"), SHAPE):
            assert is_right(ahead.answer(failed), failed)
        assert len(source.asked()) == 5
        (pid,) = source.pids()
        assert pid != os.getpid()


def test_it_says_when_the_planner_has_loaded_even_if_that_has_no_answer(source: Scripted) -> None:
    with PlanPrefetch(source) as ahead:
        assert not ahead.has_answers
        with pytest.raises(NoWorkerLeft):
            ahead.answer(frozenset(SHAPE.workers()))
        assert ahead.has_answers


def test_only_the_first_plan_is_made_at_the_cost_of_others(source: Scripted) -> None:
    with PlanPrefetch(source) as ahead:
        ahead.prepare(frozenset(), SHAPE)
        assert until(lambda: ahead.num_ready == 5, 30)
        own = str(os.getpriority(os.PRIO_PROCESS, 0))
        assert [nice for _, nice, _ in source.lines()] == [own, "19", "19", "19", "19"]


def test_what_is_ready_already_is_not_made_again(source: Scripted) -> None:
    with PlanPrefetch(source) as ahead:
        ahead.answer(dead("W0_0"))
        ahead.prepare(frozenset(), SHAPE)
        assert until(lambda: ahead.num_ready == 5, 30)
        assert source.asked() == ["W0_0", "W1_0", "W2_0", "W3_0", "none"]


def test_an_urgent_question_goes_before_those_that_wait(holding: Scripted, threads: ThreadPoolExecutor) -> None:
    with PlanPrefetch(holding) as ahead:
        ahead.prepare(frozenset(), SHAPE)
        assert until(lambda: holding.asked() == ["W0_0"], 30)
        urgent = threads.submit(ahead.answer, dead("W1_0", "W2_0"))
        assert until(lambda: bool(ahead._urgent), 10)
        holding.let_go()
        assert is_right(urgent.result(10), dead("W1_0", "W2_0"))
        assert until(lambda: ahead.num_ready == 5, 10)
        assert holding.asked() == ["W0_0", "W1_0+W2_0", "W1_0", "W2_0", "W3_0", "none"]


def test_questions_that_are_no_longer_next_are_dropped(holding: Scripted) -> None:
    with PlanPrefetch(holding) as ahead:
        ahead.prepare(frozenset(), SHAPE)
        assert until(lambda: holding.asked() == ["W0_0"], 30)
        ahead.prepare(dead("W3_0"), SHAPE)
        holding.let_go()
        assert until(lambda: ahead.num_ready == 5, 10)
        assert holding.asked() == ["W0_0", "W0_0+W3_0", "W1_0+W3_0", "W2_0+W3_0", "none", "W3_0"]


def test_many_who_ask_at_once_get_one_answer_for_each_question(source: Scripted, threads: ThreadPoolExecutor) -> None:
    with PlanPrefetch(source) as ahead:
        questions = [dead("W0_0"), dead("W1_0"), dead("W2_0")] * 8
        answers = list(threads.map(ahead.answer, questions))
        assert all(map(is_right, answers, questions))
        assert sorted(source.asked()) == ["W0_0", "W1_0", "W2_0"]


def test_an_answer_comes_although_the_process_was_killed_while_it_was_idle(source: Scripted) -> None:
    with PlanPrefetch(source) as ahead:
        ahead.answer(frozenset())
        (first,) = source.pids()
        os.kill(first, signal.SIGKILL)
        assert is_right(ahead.answer(dead("W1_0")), dead("W1_0"))
        assert source.pids()[0] == first
        assert len(set(source.pids()) - {os.getpid()}) == 2
        assert not is_there(first)


def test_an_answer_comes_although_the_process_was_killed_over_it(holding: Scripted, threads: ThreadPoolExecutor) -> None:
    with PlanPrefetch(holding) as ahead:
        coming = threads.submit(ahead.answer, dead("W0_0"))
        assert until(lambda: len(holding.pids()) == 1, 30)
        os.kill(holding.pids()[0], signal.SIGKILL)
        assert until(lambda: len(holding.pids()) == 2, 30)
        holding.let_go()
        assert is_right(coming.result(10), dead("W0_0"))
        assert os.getpid() not in holding.pids()


def test_a_question_that_kills_every_process_is_answered_in_this_one(tmp_path: Path) -> None:
    source = Scripted(tmp_path / "log", is_deadly=True)
    with PlanPrefetch(source) as ahead:
        assert is_right(ahead.answer(dead("W1_0")), dead("W1_0"))
        assert len(source.pids()) == 3
        assert source.pids()[-1] == os.getpid()


def test_that_no_worker_is_left_is_told_to_who_asks(source: Scripted) -> None:
    everybody = frozenset(SHAPE.workers())
    with PlanPrefetch(source) as ahead:
        ahead.prepare(everybody - dead("W0_0"), SHAPE)
        for _ in range(2):
            with pytest.raises(NoWorkerLeft, match="no worker is left for stage 0"):
                ahead.answer(everybody)
        assert is_right(ahead.answer(dead("W0_0")), dead("W0_0"))
        assert len(source.pids()) == 1


def test_what_went_wrong_once_may_go_right_when_asked_again(tmp_path: Path) -> None:
    folder = PlanFolder(tmp_path)
    with PlanPrefetch(folder) as ahead:
        with pytest.raises(FileProblem, match=r"save it as plan-W1_0.json"):
            ahead.answer(dead("W1_0"))
        hand_made(dead("W1_0")).save(folder.path(dead("W1_0")))
        assert is_right(ahead.answer(dead("W1_0")), dead("W1_0"))


class Unpicklable:
    """A source that cannot be sent to another process."""

    def __init__(self) -> None:
        self.own = lambda: None

    def answer(self, failed: frozenset[Worker]) -> PlanAssignment:
        raise AssertionError


def test_a_source_that_cannot_travel_is_reported_and_not_waited_for_in_vain() -> None:
    with PlanPrefetch(Unpicklable()) as ahead:
        for _ in range(2):
            with pytest.raises(Exception, match="pickle"):
                ahead.answer(frozenset())


def test_only_so_many_answers_are_kept_and_wanted_ones_first(source: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recycle.control.decide.plan_prefetch._MOST_ANSWERS", 5)
    with PlanPrefetch(source) as ahead:
        ahead.prepare(frozenset(), SHAPE)
        assert until(lambda: ahead.num_ready == 5, 30)
        ahead.answer(dead("W1_0", "W2_0"))
        assert ahead.num_ready == 5
        assert len(source.asked()) == 6
        ahead.answer(dead("W1_0"))
        assert len(source.asked()) == 6
        ahead.answer(dead("W1_0", "W2_0"))
        assert len(source.asked()) == 7


def test_of_huge_plans_fewer_are_kept(source: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recycle.control.decide.plan_prefetch._MOST_OPS", 2 * 3 * SHAPE.num_chains)
    with PlanPrefetch(source) as ahead:
        ahead.prepare(frozenset(), SHAPE)
        assert until(lambda: ahead.num_ready == 2, 30)
        ahead.answer(dead("W3_0"))
        assert source.asked() == ["W0_0", "W1_0", "W3_0"]


def test_closing_ends_the_process_at_once_and_tells_who_waits(holding: Scripted, threads: ThreadPoolExecutor) -> None:
    ahead = PlanPrefetch(holding)
    coming = threads.submit(ahead.answer, dead("W0_0"))
    assert until(lambda: len(holding.pids()) == 1, 30)
    ahead.close()
    with pytest.raises(CancelledError):
        coming.result(10)
    assert not is_there(holding.pids()[0])
    assert not any(child.name == "plans ahead" for child in active_children())
    with pytest.raises(CancelledError):
        ahead.answer(dead("W1_0"))
    ahead.close()


def test_closing_while_the_process_starts_leaves_none(source: Scripted) -> None:
    ahead = PlanPrefetch(source)
    ahead.prepare(frozenset(), SHAPE)
    ahead.close()
    assert not any(child.name == "plans ahead" for child in active_children())
    assert not any(map(is_there, source.pids()))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="asks Linux's /proc what is open")
def test_neither_a_killed_process_nor_a_closed_source_leaves_anything_open(source: Scripted) -> None:
    def live_through_a_kill() -> int:
        with PlanPrefetch(source) as ahead:
            ahead.answer(dead("W0_0"))
            os.kill(source.pids()[-1], signal.SIGKILL)
            ahead.answer(dead("W1_0"))
        return len(os.listdir("/proc/self/fd"))

    num_open = live_through_a_kill()  # the first time multiprocessing opens something of its own
    assert [live_through_a_kill() for _ in range(3)] == [num_open] * 3
    assert not any(map(is_there, source.pids()))


SCRIPT = """
import sys, threading
from pathlib import Path
from recycle.control.decide.plan_prefetch import Ahead
from recycle.core.cluster import Shape

class Told:
    def answer(self, failed):
        import os, threading
        with open(sys.argv[1], "a") as stream:
            stream.write(f"{os.getpid()}\\n")
        threading.Event().wait(60)

if __name__ == "__main__":
    Ahead(Told()).prepare(frozenset(), Shape(4, 1, 2))
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


def test_a_planner_has_a_legal_plan_ready_for_every_single_failure() -> None:
    problem = recycle.problem(3, 4, 6, costs=(10, 13, 9), comm=1, memory=6)
    with PlanPrefetch(Planner(problem)) as ahead:
        ahead.prepare(frozenset(), problem.shape)
        assert until(lambda: ahead.num_ready == 13, 60)
        for worker in problem.shape.workers():
            answer = ahead.answer(frozenset({worker}))
            assert check(answer.plan) == []
            assert worker not in answer.places.values()
