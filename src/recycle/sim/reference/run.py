"""A run of the reference: who is there, the meetings that make a configuration of them, and the steps done.

`reference` says what it is for; here is what its three systems share.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from recycle.core.events.trace import Trace
from recycle.sim.systems.published_costs import PublishedCosts

DEPTH = 12
READY_MS = 45_000
MOST_NODES = 30
_STANDSTILL_MS = 10**12


@dataclass(frozen=True, slots=True)
class Quirks:
    """Where the reference counts otherwise than its policies say.

    - `surplus_stop`: a second meeting does not replace the first; its end finds nobody waiting, and stops the job.
    - `steps_in_pause`: steps go on during a pause, and only the one under way at its end is lost.
    - `last_step_clock`: the average is taken from the end of the first pause to the end of the last step, not over the trace.
    - `unstable_ties`: what happens at one time, and is of one kind, is in the order that a binary heap gives.
    - `checkpoint_after_removal`: Varuna writes a checkpoint after the first step after a removal, too.
    - `late_checkpoint`: a checkpoint is paid once, but is complete only after twice its time.
    - `array_scan`: a checkpoint is torn if any removal stands before it in the heap's array, however late it comes.
    - `restart_by_nodes`: BERT-large restarts, but for the first time, in a time that depends on the nodes it had.
    - `idle_loss_slows`: Bamboo also slows down when it loses a node that holds no stage.
    """

    surplus_stop: bool = True
    steps_in_pause: bool = True
    last_step_clock: bool = True
    unstable_ties: bool = True
    checkpoint_after_removal: bool = True
    late_checkpoint: bool = True
    array_scan: bool = True
    restart_by_nodes: bool = True
    idle_loss_slows: bool = True


ALL_QUIRKS = Quirks()
NO_QUIRKS = Quirks(*[False] * 9)


class ReferenceSystem(IntEnum):
    """What happens, in the order in which it does at one time."""

    ADD = 0
    REMOVE = 1
    READY = 2
    MEETING_ENDS = 3
    REBALANCE_ENDS = 4
    STEP_ENDS = 5
    CHECKPOINT_ENDS = 6


_ENDS_OF_PAUSES = (ReferenceSystem.MEETING_ENDS, ReferenceSystem.REBALANCE_ENDS)


@dataclass(frozen=True, slots=True)
class ReferenceEntry:
    """Something that will happen, to a node or in a configuration. Only `key` is compared: time, kind, number if ties matter."""

    key: tuple[int, ...]
    node: str = ""
    configuration: int = 0

    def __lt__(self, other: "ReferenceEntry") -> bool:
        return self.key < other.key

    @property
    def at_ms(self) -> int:
        return self.key[0]

    @property
    def kind(self) -> int:
        return self.key[1]


class ReferenceRun:
    """What the three systems share: who is there, the meetings that make a configuration of them, and the steps done.

    A system says what a loss and a step's end do, and how long a pause is.
    """

    def __init__(self, costs: PublishedCosts, table: Sequence[float], trace: Trace, quirks: Quirks) -> None:
        self.costs, self.table, self.quirks = costs, table, quirks
        self.heap: list[ReferenceEntry] = []
        self.num_entries = self.configuration = 0
        for change in trace.changes:
            self.enter(change.at_us // 1000, ReferenceSystem.ADD if change.joins else ReferenceSystem.REMOVE, change.node)
        heapq.heapify(self.heap)  # changes nothing but the order of ties
        self.end_ms = trace.end_us // 1000
        self.is_ready: dict[str, bool] = {}
        self.status = "stopped"
        self.guests: list[str] = []
        self.num_pipelines = self.num_spare = self.step_ms = 0
        self.first_ms: int | None = None  # when the first configuration was made
        self.last_ms = 0  # when the last step, or the checkpoint after it, ended
        self.starts: list[int] = []  # of each step done; the time since the one before it counts to it
        self.is_credited: list[bool] = []
        self.last_step_ms = 0

    def pause_ms(self, kind: ReferenceSystem) -> int:
        raise NotImplementedError

    def lose(self, at_ms: int, node: str) -> None:
        raise NotImplementedError

    def finish_step(self, at_ms: int) -> None:
        raise NotImplementedError

    def average(self) -> float:
        """Live through the trace, and return the samples/s of the steps that were not taken back."""
        while self.heap:
            entry = heapq.heappop(self.heap)
            if entry.at_ms >= self.end_ms:
                break
            self.happen(entry)
        span_ms = self.last_step_ms - (self.first_ms or 0) if self.quirks.last_step_clock else self.end_ms
        return 1000 * self.costs.samples * sum(self.is_credited) / span_ms if self.starts else 0.0

    def happen(self, entry: ReferenceEntry) -> None:
        at_ms, node = entry.at_ms, entry.node
        if entry.kind == ReferenceSystem.ADD:
            self.is_ready[node] = False
            self.enter(at_ms + READY_MS, ReferenceSystem.READY, node)
        elif entry.kind == ReferenceSystem.REMOVE:
            self.is_ready.pop(node, None)
            self.lose(at_ms, node)
        elif entry.kind == ReferenceSystem.READY and node in self.is_ready:
            self.welcome(at_ms, node)
        elif entry.kind in _ENDS_OF_PAUSES:
            self.form(at_ms, ReferenceSystem(entry.kind))
        elif entry.kind == ReferenceSystem.STEP_ENDS and entry.configuration == self.configuration:
            self.finish_step(at_ms)

    def enter(self, at_ms: int, kind: ReferenceSystem, node: str = "") -> None:
        self.num_entries += 1
        key = (at_ms, kind) if self.quirks.unstable_ties else (at_ms, kind, self.num_entries)
        heapq.heappush(self.heap, ReferenceEntry(key, node, self.configuration))

    def welcome(self, at_ms: int, node: str) -> None:
        """A node is ready: it starts a meeting, takes part in the present one, or is spare."""
        self.is_ready[node] = True
        if self.status == "stopped":
            self.meet(at_ms)
        elif self.status == "meeting":
            self.guests.append(node)
        else:
            self.num_spare += 1

    def meet(self, at_ms: int, kind: ReferenceSystem = ReferenceSystem.MEETING_ENDS) -> None:
        """Begin a pause, at whose end those who are there now, or are ready by then, form a configuration."""
        self.status, self.guests = "meeting", [node for node, is_ready in self.is_ready.items() if is_ready]
        if not self.quirks.surplus_stop:
            self.heap = [entry for entry in self.heap if entry.kind not in _ENDS_OF_PAUSES]
            heapq.heapify(self.heap)
        if not self.quirks.steps_in_pause:
            self.configuration += 1
        self.enter(at_ms + self.pause_ms(kind), kind)

    def form(self, at_ms: int, kind: ReferenceSystem) -> None:
        """End a pause: train with as many pipelines as the guests make, or stop; meet again if one of them has left."""
        if any(node not in self.is_ready for node in self.guests):
            self.meet(at_ms, kind)
            return
        guests, self.guests = self.guests, []
        self.configuration += 1
        self.num_pipelines, self.num_spare = divmod(len(guests), DEPTH)
        self.status = "running" if self.num_pipelines else "stopped"
        self.seat(guests)
        if self.num_pipelines:
            if self.first_ms is None:
                self.first_ms = self.last_ms = at_ms
            self.step_ms = self.table_step_ms()
            self.enter(at_ms + self.step_ms, ReferenceSystem.STEP_ENDS)

    def seat(self, guests: list[str]) -> None:
        """Note who takes part in the new configuration."""

    def row(self) -> int:
        """Where the nodes that are ready stand in a table that begins with 30."""
        return min(max(0, MOST_NODES - sum(self.is_ready.values())), len(self.table) - 1)

    def table_step_ms(self) -> int:
        samples_per_s = self.table[self.row()]
        return max(1, int(self.costs.samples / samples_per_s * 1000)) if samples_per_s else _STANDSTILL_MS

    def credit(self, at_ms: int) -> None:
        self.starts.append(self.last_ms)
        self.is_credited.append(True)
        self.last_ms = self.last_step_ms = at_ms

    def take_back(self, first: int) -> None:
        """Give no credit for the steps from this number on."""
        self.is_credited[first:] = [False] * len(self.is_credited[first:])
