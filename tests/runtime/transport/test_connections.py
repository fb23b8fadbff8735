"""Who is connected to whom: a worker to its partners, in the tree of votes and in rings of sums, however large the cluster."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch

from recycle.control.decide.messages import StoreRequest
from recycle.core.cluster import Worker
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import row_programs
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.specs import GroupView
from recycle.runtime.worker.epoch_setup import partners_of, worker_program
from tests.plans import make_1f1b_plan
from tests.processes import wait_for
from tests.runtime.transport.worker_threads import at_once, connected

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)
# Of a plan without failures: two neighbours, a parent and four children in the tree, two beside it in the ring of its peers.
MOST_CONNECTIONS = 2 + 5 + 2


def partners_in(plan: Plan) -> dict[Worker, frozenset[Worker]]:
    programs = {worker: worker_program(program, plan.problem.shape) for worker, program in row_programs(plan).items()}
    return {worker: partners_of(worker, program, {}) for worker, program in programs.items()}


def sockets() -> set[str]:
    """The sockets of this process, each by its own name."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {name for name in found if name.startswith("socket:")}


@pytest.mark.parametrize(("num_pipelines", "num_stages"), [(2, 2), (3, 4), (4, 4), (4, 8)])
def test_the_connections_of_a_worker_and_the_entries_that_it_reads_do_not_grow_with_the_cluster(
    num_pipelines: int, num_stages: int
) -> None:
    partners = partners_in(make_1f1b_plan(num_pipelines, num_stages, num_stages))
    workers, requests, before = sorted(partners), list[tuple[int, StoreRequest]](), sockets()
    views = [GroupView(worker, workers, 1, partners[worker]) for worker in workers]
    num_connections = [len(view.linked) + len(view.beside(view.peers)) for view in views]
    with connected(workers, partners.__getitem__, requests):
        # Each worker listens in two groups; both ends of a connection are in this process.
        expected = 2 * len(workers) + sum(num_connections)
        wait_for(lambda: len(sockets() - before) == expected, 20, lambda: f"{len(sockets() - before)} sockets, not {expected}")
    asked = defaultdict[int, list[StoreRequest]](list)
    for number, request in requests:
        asked[number].append(request)
    assert [sum(len(request.keys) for request in asked[number]) for number in range(len(workers))] == num_connections
    assert {len(own) for own in asked.values()} == {1}  # all in one message
    assert max(num_connections) <= MOST_CONNECTIONS


def test_connections_grow_with_the_partners_that_a_plan_gives_a_worker_also_at_the_size_of_a_large_cluster() -> None:
    workers = [Worker(pipeline, stage) for pipeline in range(32) for stage in range(64)]
    for own in (workers[0], workers[700], workers[-1]):
        beside = [Worker(own.pipeline, stage) for stage in (own.stage - 1, own.stage + 1) if 0 <= stage < 64]
        assert len(GroupView(own, workers, 1, frozenset(beside)).connected(())) <= MOST_CONNECTIONS


def test_a_plan_connects_both_ends_of_each_link_and_so_does_a_transfer() -> None:
    program = worker_program(row_programs(plan := make_1f1b_plan(2, 3, 3))[Worker(0, 1)], plan.problem.shape)
    sources = {"W0_1": "W1_1", "W1_2": "W0_2"}
    assert partners_of(Worker(0, 1), program, sources) == {Worker(0, 0), Worker(0, 2), Worker(1, 1)}
    partners = partners_in(plan)
    assert all(worker in partners[other] for worker, others in partners.items() for other in others)


def test_a_worker_sends_nothing_to_one_with_which_its_plan_exchanges_nothing() -> None:
    workers = [Worker(0, stage) for stage in range(7)]
    refused = pytest.raises(AssertionError, match="W0_5 is not connected to W0_6")
    with connected(workers, lambda worker: frozenset()) as transports, refused:
        transports[5].host.send_bytes(workers[6], torch.zeros(1, dtype=torch.uint8), 0)


@pytest.mark.parametrize("num_workers", [1, 2, 5, 6, 12, 23])
def test_all_workers_get_the_same_result_of_a_vote_which_has_each_number_as_it_was_put_in(num_workers: int) -> None:
    workers = [Worker(number, 0) for number in range(num_workers)]
    numbers = torch.rand(num_workers, dtype=torch.float64) * 1e-3 + 1e9 / 3

    def votes(number: int, transports: Sequence[Transport]) -> list[torch.Tensor]:
        found = []
        for round_ in range(3):
            values = torch.zeros(num_workers + 1, dtype=torch.float64)
            values[number], values[-1] = numbers[number] + round_, float(number == round_)
            host = transports[number].host
            host.wait(host.begin_vote(values), "all")
            found.append(values)
        return found

    with connected(workers, lambda worker: frozenset()) as transports:
        for found in at_once(*(lambda number=number: votes(number, transports) for number in range(num_workers))):
            for round_, values in enumerate(found):
                assert torch.equal(values[:-1], numbers + round_)
                assert values[-1] == (round_ < num_workers)


def test_a_worker_that_leaves_as_soon_as_it_has_the_result_keeps_it_from_nobody() -> None:
    workers = [Worker(number, 0) for number in range(8)]

    def vote_and_leave(transport: Transport) -> float:
        values = torch.ones(1, dtype=torch.float64)
        transport.host.wait(transport.host.begin_vote(values), "all")
        transport.abort()
        transport.close()
        return float(values)

    for _ in range(5):
        with connected(workers, lambda worker: frozenset()) as transports:
            assert at_once(*(lambda each=each: vote_and_leave(each) for each in transports)) == [8.0] * 8
