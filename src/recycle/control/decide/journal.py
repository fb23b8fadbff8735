"""The coordinator's journal: one entry an epoch, stored before any member acts on it, so that a new coordinator can take over.

`control/store` has the stores that keep it: a file, or etcd.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """An epoch: the member number at each place, the first iteration, the packed plan, and the last member number given out.

    `processes` has host, process id and start of the member at each place: a coordinator that takes over can fence it, and no
    later process with that id. `origin` is that of `StartEpoch`. `reporters` has, for each earlier iteration that is not in the
    record yet, the members that must still report it. `only_saves` is that of `StartEpoch`.
    """

    epoch: int
    iteration: int
    places: Mapping[str, int]
    plan: str
    reason: str
    last_number: int
    processes: Mapping[str, tuple[str, int, str]] = field(default_factory=dict)
    origin: int = 1
    reporters: Mapping[int, Sequence[int]] = field(default_factory=dict)
    only_saves: bool = False


class Journal(Protocol):
    """What the coordinator asks of its journal. `term` is the term in which this coordinator leads, for `lease_s` at a time.

    It leads for good if `lease_s` is 0.
    """

    @property
    def term(self) -> int: ...

    @property
    def lease_s(self) -> float: ...

    def append(self, entry: JournalEntry) -> None:
        """Store an entry; no message that rests on it leaves before it is stored."""

    def last(self) -> JournalEntry | None: ...


def entry_to_json(entry: JournalEntry) -> dict[str, Any]:
    return asdict(entry)


def entry_from_json(values: Mapping[str, Any]) -> JournalEntry:
    """The entry of `entry_to_json`. Raises ValueError, TypeError or AttributeError for anything else."""
    return _entry(**values)


def _entry(processes: Mapping[str, Any], reporters: Mapping[str, Any], **values: Any) -> JournalEntry:
    """Return an entry from its JSON, which has lists for tuples, and text for numbers that are keys."""
    late = {int(iteration): numbers for iteration, numbers in reporters.items()}
    return JournalEntry(**values, processes={place: tuple(each) for place, each in processes.items()}, reporters=late)
