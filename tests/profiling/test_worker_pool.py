"""A worker pool: every member answers, an error in one member is reported, and no process outlives the pool."""

import gc
import multiprocessing
import os
from multiprocessing import parent_process

import pytest

from recycle.core.cluster import Worker
from recycle.core.errors import WorkerFailed
from recycle.profiling.machine import usable_cores
from recycle.profiling.worker_pool import worker_pool
from tests.processes import is_there

pytestmark = pytest.mark.timeout(180)
WORKERS = [Worker(0, 0), Worker(0, 1), Worker(1, 0)]


class Echo:
    """A member that says who it is, and does on one of the workers what it is asked to."""

    def __init__(self, context):
        self.context, self.num_answers = context, 0

    def answer(self, request):
        what, worker = request
        self.num_answers += 1
        if worker == self.context.worker and what == "raise":
            raise RuntimeError("the needle is off the scale")
        if worker == self.context.worker and what == "end":
            os._exit(7)
        assert parent_process() is not None
        assert gc.get_freeze_count() > len(gc.get_objects())  # collections do not look at torch's modules
        return self.context.rank, os.getpid(), self.num_answers, self._met() if what == "meet" else []

    def _met(self):
        """What all members have left at the store; who comes first waits there."""
        self.context.store.set(str(self.context.worker), f"{self.context.rank} was here")
        return [self.context.store.get(str(other)).decode() for other in self.context.workers]


def refuse(context):
    raise RuntimeError(f"{context.worker} cannot be made")


def test_all_answer_each_in_a_process_of_its_own_which_ends_with_the_pool():
    with worker_pool(WORKERS, Echo) as pool:
        first, second = pool.ask(("hello", None)), pool.ask(("meet", None))
        assert set(first) == set(second) == set(WORKERS)
        assert [first[worker][0] for worker in WORKERS] == [0, 1, 2]
        pids = {worker: pid for worker, (_, pid, _, _) in first.items()}
        assert len({*pids.values(), os.getpid()}) == 4
        assert {worker: pid for worker, (_, pid, _, _) in second.items()} == pids
        assert {num for _, _, num, _ in second.values()} == {2}  # the member that was made once answers again
        assert [met for _, _, _, met in second.values()] == [["0 was here", "1 was here", "2 was here"]] * 3
    assert not any(map(is_there, pids.values()))
    assert multiprocessing.active_children() == []


class SaysCores:
    def __init__(self, context):
        self.context = context

    def answer(self, request):
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        return {core for thread in threads for core in os.sched_getaffinity(thread)}


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_each_worker_with_a_core_of_its_own_runs_there_with_all_of_its_threads():
    one, other = usable_cores()[:2]
    choices, asked = [[one, other], [other, one], []], []

    def choose(num_workers):
        asked.append(num_workers)
        return choices.pop(0)

    with worker_pool(WORKERS[:2], SaysCores, choose_cores=choose) as pool:
        assert pool.ask(None) == {WORKERS[0]: {one}, WORKERS[1]: {other}}
        assert pool.ask(None) == {WORKERS[0]: {other}, WORKERS[1]: {one}}
    assert asked == [2, 2, 0]


def ask(request, pids, make=Echo):
    """Send the request to a pool that answered before, with these process ids."""
    with worker_pool(WORKERS, make) as pool:
        pids += [pid for _, pid, _, _ in pool.ask(("hello", None)).values()]
        pool.ask(request)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("raise", Worker(0, 1)), r"(?s)W0_1 failed while it was measured:\nTraceback.*needle is off the scale"),
        (("end", Worker(1, 0)), "W1_0 ended with exit code 7 while it was measured"),
    ],
)
def test_a_member_that_fails_is_named_with_its_traceback_and_all_end(asked, message):
    pids = []
    with pytest.raises(WorkerFailed, match=message):
        ask(asked, pids)
    assert len(pids) == 3
    assert not any(map(is_there, pids))


def test_a_member_that_cannot_be_made_is_reported_with_the_first_answer():
    with pytest.raises(WorkerFailed, match=r"(?s)W\d_\d failed while it was measured:\nTraceback.*W\d_\d cannot be made"):
        ask(("hello", None), [], make=refuse)
    assert multiprocessing.active_children() == []
