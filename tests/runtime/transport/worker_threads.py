"""Workers as threads of one process, each with its own rendezvous, as real workers have."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from recycle.core.cluster import Worker
from recycle.runtime.transport.gloo import GlooTransport
from recycle.runtime.transport.rendezvous import Rendezvous
from recycle.runtime.transport.specs import GroupView, TensorSpec, TransportSpec

PATIENCE_S = 30
TIMEOUT = timedelta(seconds=PATIENCE_S)


def rendezvous_of(num_workers: int) -> list[Rendezvous]:
    """The rendezvous of each worker: an entry of one reaches all others, as if the coordinator had forwarded it."""
    made: list[Rendezvous] = []

    def publish_from(sender: int) -> Callable[[str, str], None]:
        def publish(key: str, value: str) -> None:
            for number, other in enumerate(made):
                if number != sender:
                    other.add_entry(key, value)

        return publish

    made += [Rendezvous(publish_from(number)) for number in range(num_workers)]
    return made


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Call all in threads of their own, and return what they return; the first error of one is that of all."""
    with ThreadPoolExecutor(len(calls)) as pool:
        begun = [pool.submit(call) for call in calls]
        return [one.result(PATIENCE_S) for one in begun]


def transport_spec(tensor_specs: Mapping[int, TensorSpec] | None = None, num_chains: int = 1) -> TransportSpec:
    return TransportSpec(tensor_specs or {}, num_chains, (), TIMEOUT)


@contextmanager
def connected(workers: Sequence[Worker]) -> Iterator[list[GlooTransport]]:
    """The transports of these workers in one epoch, each to be used by a thread of its own."""

    def connect(worker: Worker, store: Rendezvous) -> Callable[[], GlooTransport]:
        return lambda: GlooTransport(store, GroupView(worker, workers, epoch=1), transport_spec())

    transports = at_once(*(connect(*pair) for pair in zip(workers, rendezvous_of(len(workers)), strict=True)))
    try:
        yield transports
    finally:
        for each in transports:
            each.abort()
            each.close()
