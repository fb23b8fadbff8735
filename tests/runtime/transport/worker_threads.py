"""Workers as threads of one process, each with its own rendezvous, as real workers have."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from recycle.control.decide.epoch_store import EpochStore
from recycle.control.decide.messages import StoreEntry, StoreRequest
from recycle.core.cluster import Worker
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import row_programs
from recycle.runtime.boundary.boundary_spec import BoundarySpec, TensorSpec
from recycle.runtime.compute.state_digests import digest
from recycle.runtime.execute.trainer import Trainer
from recycle.runtime.job import Job
from recycle.runtime.launch.configure import worker_spec
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.protocol import Transport
from recycle.runtime.transport.rendezvous import Rendezvous
from recycle.runtime.transport.specs import GroupView, MessageLink, TransportSpec
from recycle.runtime.worker.epoch_setup import links_of, make_stage_state, make_trainer, partners_of, worker_program

PATIENCE_S = 30
TIMEOUT = timedelta(seconds=PATIENCE_S)


def rendezvous_of(num_workers: int, requests: list[tuple[int, StoreRequest]] | None = None) -> list[Rendezvous]:
    """The rendezvous of each worker, with the store of a coordinator; a connection is the number of the worker.

    `requests` gets every request with the number of its worker.
    """
    made: list[Rendezvous] = []
    store = EpochStore(num_workers, lambda number, entry: made[number].add_entry(entry.key, entry.value))
    lock = threading.Lock()

    def take(number: int, message: StoreEntry | StoreRequest) -> None:
        with lock:
            if requests is not None and isinstance(message, StoreRequest):
                requests.append((number, message))
            store.take(number, message)

    for number in range(num_workers):
        publish = partial(lambda number, key, value: take(number, StoreEntry(1, key, value)), number)
        made.append(Rendezvous(publish, partial(lambda number, keys: take(number, StoreRequest(1, keys)), number)))
    return made


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Call all in threads of their own, and return what they return; the error that came first is that of all."""
    with ThreadPoolExecutor(len(calls)) as pool:
        begun = [pool.submit(call) for call in calls]
        ended, _ = wait(begun, PATIENCE_S, FIRST_EXCEPTION)
        for one in ended:
            one.result()
        return [one.result(0) for one in begun]


def transport_spec(specs: Mapping[int, TensorSpec | BoundarySpec] | None = None, num_chains: int = 1) -> TransportSpec:
    """The spec of a transport for one tensor, or for nests, from each stage to the next."""
    made = {at: spec if isinstance(spec, BoundarySpec) else BoundarySpec.one_tensor(spec) for at, spec in (specs or {}).items()}
    return TransportSpec(made, num_chains, (), TIMEOUT)


MakeTransport = Callable[[Rendezvous, GroupView, TransportSpec, Collection[MessageLink]], Transport]


def over_gloo(store: Rendezvous, view: GroupView, spec: TransportSpec, links: Collection[MessageLink]) -> Transport:
    return GlooTransport(store, view, spec)


def train_in_threads(
    job: Job, make_transport: MakeTransport = over_gloo, leave: Callable[[Trainer], object] = lambda trainer: None
) -> list[str]:
    """Train with a thread for each worker; return the digests of all stages. `leave` is called at the end of each."""
    plan = job.plan
    assert isinstance(plan, Plan)
    spec, workers = worker_spec(job), [row.worker for row in plan.rows]
    transport_of = TransportSpec(spec.boundaries, spec.shape.num_chains, spec.ties, TIMEOUT)

    def train(worker: Worker, store: Rendezvous) -> str:
        program = worker_program(row_programs(plan)[worker], plan.problem.shape)
        view = GroupView(worker, workers, 1, partners_of(worker, program, {}))
        transport = make_transport(store, view, transport_of, links_of(program))
        try:
            trainer = make_trainer(spec, program, view, make_stage_state(spec, worker.stage), transport)
            assert trainer.train(job.steps, lambda *applied: None)
            leave(trainer)
            return digest(trainer.executor.stage.module)
        finally:
            transport.abort()
            transport.close()

    return at_once(*(lambda pair=pair: train(*pair) for pair in zip(workers, rendezvous_of(len(workers)), strict=True)))


@contextmanager
def connected(
    workers: Sequence[Worker],
    partners: Callable[[Worker], frozenset[Worker] | None] = lambda worker: None,
    requests: list[tuple[int, StoreRequest]] | None = None,
) -> Iterator[list[GlooTransport]]:
    """The transports of these workers in one epoch, each to be used by a thread of its own."""

    def connect(worker: Worker, store: Rendezvous) -> Callable[[], GlooTransport]:
        return lambda: GlooTransport(store, GroupView(worker, workers, 1, partners(worker)), transport_spec())

    transports = at_once(*(connect(*pair) for pair in zip(workers, rendezvous_of(len(workers), requests), strict=True)))
    try:
        yield transports
    finally:
        for each in transports:
            each.abort()
            each.close()
