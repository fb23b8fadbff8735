"""Workers as threads of one process, which find each other as real ones do: by a store that each has its own end of."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from recycle.core.cluster import Worker
from recycle.runtime.transport.gloo import GlooTransport, GroupView
from recycle.runtime.transport.rendezvous import Rendezvous

PATIENCE_S = 30
TIMEOUT = timedelta(seconds=PATIENCE_S)


def ends(num_workers: int) -> list[Rendezvous]:
    """Each worker's end of a store: what one puts in, all others hear, as if the coordinator had passed it on."""
    made: list[Rendezvous] = []

    def passed_on(sender: int) -> Callable[[str, str], None]:
        def share(key: str, value: str) -> None:
            for number, other in enumerate(made):
                if number != sender:
                    other.hear(key, value)

        return share

    made += [Rendezvous(passed_on(number)) for number in range(num_workers)]
    return made


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Call all in threads of their own, and return what they return; the first error of one is that of all."""
    with ThreadPoolExecutor(len(calls)) as pool:
        begun = [pool.submit(call) for call in calls]
        return [one.result(PATIENCE_S) for one in begun]


@contextmanager
def linked(workers: Sequence[Worker]) -> Iterator[list[GlooTransport]]:
    """The links of these workers in one epoch, each to be used by a thread of its own."""

    def links_of(worker: Worker, store: Rendezvous) -> Callable[[], GlooTransport]:
        return lambda: GlooTransport(store, GroupView(worker, workers, epoch=1), {}, 1, (), TIMEOUT)

    links = at_once(*(links_of(*pair) for pair in zip(workers, ends(len(workers)), strict=True)))
    try:
        yield links
    finally:
        for each in links:
            each.abort()
            each.close()
