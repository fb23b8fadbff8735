"""`DataOptions`: how a job reads its data; `Padding`, if samples have different lengths."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recycle.core.errors import UserError

SHUFFLED, SEQUENTIAL = "shuffled", "sequential"
Collate = Callable[[Sequence[Any]], Any]
"""Makes a pair (inputs, targets), or a dict with an entry "labels", from the samples of a micro-batch."""
Sampler = Callable[[int, int], Iterable[int]]
"""Returns the numbers of the samples of a pass over the data, from the seed of the job and the number of the pass."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Samples of different lengths are padded at their end to the longest of their micro-batch.

    Attributes:
        max_length: No sample is longer. Memory is planned, and room for messages between stages is made, for this length.
        values: What fills the gap, by the name of the entry; "inputs" and "targets" are the names of those that have none. Other
            entries are filled with 0, and integer targets with -100, which torch's cross entropy leaves out.
        names: The entries that are padded; None is every tensor that has a dimension.
        multiple_of: Lengths are rounded up to a multiple of this.
        truncates: Whether longer samples are cut to `max_length`; if not, they are refused.
    """

    max_length: int
    values: Mapping[str, float] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    multiple_of: int = 1
    truncates: bool = False

    def __post_init__(self) -> None:
        refuse_count("the longest length of a sample", self.max_length, 1)
        refuse_count("the number of which lengths are multiples", self.multiple_of, 1)
        if self.max_length % self.multiple_of:
            raise UserError(
                f"max_length is {self.max_length}, but lengths are rounded up to multiples of {self.multiple_of}: make it one"
            )


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How the data of a job are read, and made into micro-batches.

    Attributes:
        loader_processes: Processes of each worker of the first and the last stage that make its micro-batches ahead of its ops;
            with 0 the worker reads between its ops.
        ahead: How many micro-batches each loader process makes ahead.
        timeout_s: The run ends if a worker waits for data, and no sample was made for so many seconds.
        collate: Makes a micro-batch from a list of samples: a pair (inputs, targets), or a dict with an entry "labels". None
            stacks their tensors, or pads them. If its micro-batches have different lengths, `padding` says the greatest.
        order: "shuffled" by the seed and the number of the pass over the data, "sequential", or a function from these two numbers
            to the numbers of the samples of that pass, such as a sampler of torch. A stream has its own order.
        padding: How samples of different lengths are padded; None refuses them.
        repeats: Whether a stream that has ended begins anew; if not, its end before the last step ends the run.

    Raises:
        UserError: An option has a value that cannot be used.
    """

    loader_processes: int = 0
    ahead: int = 2
    timeout_s: float = 300.0
    collate: Collate | None = None
    order: str | Sampler = SHUFFLED
    padding: Padding | None = None
    repeats: bool = False

    def __post_init__(self) -> None:
        refuse_count("the number of loader processes", self.loader_processes, 0)
        refuse_count("the number of micro-batches that a loader process makes ahead", self.ahead, 1)
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < math.inf:
            raise UserError(f"timeout_s of the data is {self.timeout_s!r}, but it must be a finite number of seconds above 0")
        if not callable(self.order) and self.order not in (SHUFFLED, SEQUENTIAL):
            raise UserError(f"the order of samples is {self.order!r}, but it must be {SHUFFLED}, {SEQUENTIAL} or a function")
        if self.collate is not None and not callable(self.collate):
            raise UserError(f"collate is a {type(self.collate).__name__}, but it must be a function of a list of samples")


def refuse_count(name: str, value: Any, least: int) -> None:
    """Raise if `value` is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} is {value!r}, but it must be a whole number of at least {least}")
