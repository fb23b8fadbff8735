"""`Pace`: what a worker says about the time of its ops in an iteration, in a few numbers: nobody has to read the ops."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median_low

from recycle.core.op import Kind

Pace = Mapping[str, tuple[int, int]]
"""By class of ops: how many the worker ran, and their median time in µs. A median ignores single ops that were held up."""


def op_class(kind: Kind, layers: range | None) -> str:
    """The class of an op: its kind, and the layers that it computes if they are not those of its stage in every micro-batch.

    Peers that run ops of one class compute the same.
    """
    return kind.value if layers is None else f"{kind.value}:{layers.start}-{layers.stop}"


def parse_class(text: str) -> tuple[Kind, range | None]:
    """Return kind and layers of an `op_class`."""
    letter, _, layers = text.partition(":")
    if not layers:
        return Kind(letter), None
    first, end = layers.split("-")
    return Kind(letter), range(int(first), int(end))


def pace_of(ran: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """The pace of ops that are given as their class and their time in µs."""
    times_us: dict[str, list[int]] = defaultdict(list)
    for each, took_us in ran:
        times_us[each].append(took_us)
    return {each: (len(times), median_low(times)) for each, times in times_us.items()}
