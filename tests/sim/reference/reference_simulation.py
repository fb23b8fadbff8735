"""ReferenceSimulation: the event loop, the rendezvous and the step accounting of the Oobleck authors' simulator.

`reference_policies` has the three systems that share it.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from recycle.core.events.trace import Trace
from tests.sim.reference.published_costs import PublishedCosts

DEPTH = 12
READY_MS = 45_000
MOST_NODES = 30
_STANDSTILL_MS = 10**12


@dataclass(frozen=True, slots=True)
class Deviations:
    """Switches: where the reference simulator counts differently from the policies that it describes.

    - `second_pause_stops`: a second rendezvous does not replace the first; its end finds no participants, and stops the job.
    - `steps_in_pause`: steps go on during a pause, and only the step in flight at its end is lost.
    - `average_to_last_step`: the average is from the end of the first pause to the end of the last step, not over the trace.
    - `unstable_ties`: events of one time and one kind come in the order that a binary heap gives.
    - `checkpoint_after_removal`: Varuna writes a checkpoint after the first step after a removal, too.
    - `late_checkpoint`: a checkpoint is paid once, but is complete only after twice its time.
    - `heap_array_scan`: a checkpoint is interrupted if any removal stands before it in the heap's array, however late it comes.
    - `torn_checkpoint_shifts`: an interrupted checkpoint writes ten zeros over the rates of the last ten steps. If fewer steps
      are complete, the list of rates gets longer than that of the steps, and later steps count at the rates of earlier ones.
    - `lost_steps_count`: steps that were rolled back still count towards the ten until Varuna's next checkpoint.
    - `restart_by_nodes`: BERT-large restarts, but for the first time, in a time that depends on the nodes it had.
    - `spare_loss_slows`: Bamboo also slows down when it loses a node that holds no stage.
    """

    second_pause_stops: bool = True
    steps_in_pause: bool = True
    average_to_last_step: bool = True
    unstable_ties: bool = True
    checkpoint_after_removal: bool = True
    late_checkpoint: bool = True
    heap_array_scan: bool = True
    torn_checkpoint_shifts: bool = True
    lost_steps_count: bool = True
    restart_by_nodes: bool = True
    spare_loss_slows: bool = True


ALL_DEVIATIONS = Deviations()
NO_DEVIATIONS = Deviations(*[False] * 11)


class EventKind(IntEnum):
    """The kinds of events, in the order in which they are handled at one time."""

    ADD = 0
    REMOVE = 1
    READY = 2
    RENDEZVOUS_ENDS = 3
    REBALANCE_ENDS = 4
    STEP_ENDS = 5
    CHECKPOINT_ENDS = 6


_ENDS_OF_PAUSES = (EventKind.RENDEZVOUS_ENDS, EventKind.REBALANCE_ENDS)


@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """An event of a node or of a configuration. Only `key` is compared: time, kind, and a number if ties matter."""

    key: tuple[int, ...]
    node: str = ""
    configuration: int = 0

    def __lt__(self, other: "QueuedEvent") -> bool:
        return self.key < other.key

    @property
    def at_ms(self) -> int:
        return self.key[0]

    @property
    def kind(self) -> int:
        return self.key[1]


class ReferenceSimulation:
    """The live nodes, the rendezvous that forms a configuration of them, and the completed steps.

    A subclass says what a removal and the end of a step do, and how long a pause is.
    """

    def __init__(self, costs: PublishedCosts, table: Sequence[float], trace: Trace, deviations: Deviations) -> None:
        self.costs, self.table, self.deviations = costs, table, deviations
        self.heap: list[QueuedEvent] = []
        self.num_scheduled = self.configuration = 0
        for change in trace.changes:
            self.schedule(change.at_us // 1000, EventKind.ADD if change.joins else EventKind.REMOVE, change.node)
        heapq.heapify(self.heap)  # changes nothing but the order of ties
        self.end_ms = trace.end_us // 1000
        self.is_ready: dict[str, bool] = {}
        self.status = "stopped"
        self.participants: list[str] = []
        self.num_pipelines = self.num_spare = self.step_ms = 0
        self.first_ms: int | None = None  # when the first configuration was made
        self.last_ms = 0  # when the last step, or the checkpoint after it, ended
        self.starts: list[int] = []  # of each completed step, which is when the step before it ended
        self.times_ms: list[int] = []  # of each completed step, since its start
        self.rates_ms: list[int] = []  # the time in which a step's samples count as done; 0 if they count for nothing
        self.last_step_ms = 0

    def pause_ms(self, kind: EventKind) -> int:
        raise NotImplementedError

    def remove(self, at_ms: int, node: str) -> None:
        raise NotImplementedError

    def finish_step(self, at_ms: int) -> None:
        raise NotImplementedError

    def average(self) -> float:
        """Simulate the trace, and return the samples/s of the steps that were not rolled back."""
        while self.heap:
            event = heapq.heappop(self.heap)
            if event.at_ms >= self.end_ms:
                break
            self.handle(event)
        span_ms = self.last_step_ms - (self.first_ms or 0) if self.deviations.average_to_last_step else self.end_ms
        if not self.starts:
            return 0.0
        # Without a shift, every step that counts has its own time as its rate, and counts once.
        num_steps = sum(time_ms / rate_ms for time_ms, rate_ms in zip(self.times_ms, self.rates_ms, strict=False) if rate_ms)
        return 1000 * self.costs.samples * num_steps / span_ms

    def handle(self, event: QueuedEvent) -> None:
        at_ms, node = event.at_ms, event.node
        if event.kind == EventKind.ADD:
            self.is_ready[node] = False
            self.schedule(at_ms + READY_MS, EventKind.READY, node)
        elif event.kind == EventKind.REMOVE:
            self.is_ready.pop(node, None)
            self.remove(at_ms, node)
        elif event.kind == EventKind.READY and node in self.is_ready:
            self.node_is_ready(at_ms, node)
        elif event.kind in _ENDS_OF_PAUSES:
            self.end_rendezvous(at_ms, EventKind(event.kind))
        elif event.kind == EventKind.STEP_ENDS and event.configuration == self.configuration:
            self.finish_step(at_ms)

    def schedule(self, at_ms: int, kind: EventKind, node: str = "") -> None:
        self.num_scheduled += 1
        key = (at_ms, kind) if self.deviations.unstable_ties else (at_ms, kind, self.num_scheduled)
        heapq.heappush(self.heap, QueuedEvent(key, node, self.configuration))

    def node_is_ready(self, at_ms: int, node: str) -> None:
        """Let a ready node start a rendezvous, take part in the present one, or be spare."""
        self.is_ready[node] = True
        if self.status == "stopped":
            self.start_rendezvous(at_ms)
        elif self.status == "rendezvous":
            self.participants.append(node)
        else:
            self.num_spare += 1

    def start_rendezvous(self, at_ms: int, kind: EventKind = EventKind.RENDEZVOUS_ENDS) -> None:
        """Begin a pause. At its end the nodes that are ready now, or become ready by then, form a configuration."""
        self.status, self.participants = "rendezvous", [node for node, is_ready in self.is_ready.items() if is_ready]
        if not self.deviations.second_pause_stops:
            self.heap = [event for event in self.heap if event.kind not in _ENDS_OF_PAUSES]
            heapq.heapify(self.heap)
        if not self.deviations.steps_in_pause:
            self.configuration += 1
        self.schedule(at_ms + self.pause_ms(kind), kind)

    def end_rendezvous(self, at_ms: int, kind: EventKind) -> None:
        """End a pause: train with as many pipelines as the participants fill, or stop; repeat it if a participant has left."""
        if any(node not in self.is_ready for node in self.participants):
            self.start_rendezvous(at_ms, kind)
            return
        participants, self.participants = self.participants, []
        self.configuration += 1
        self.num_pipelines, self.num_spare = divmod(len(participants), DEPTH)
        self.status = "running" if self.num_pipelines else "stopped"
        self.assign_stages(participants)
        if self.num_pipelines:
            if self.first_ms is None:
                self.first_ms = self.last_ms = at_ms
            self.step_ms = self.table_step_ms()
            self.schedule(at_ms + self.step_ms, EventKind.STEP_ENDS)

    def assign_stages(self, participants: list[str]) -> None:
        """Note the participants of the new configuration."""

    def table_index(self) -> int:
        """The index of the number of ready nodes in a table that begins with 30 nodes."""
        return min(max(0, MOST_NODES - sum(self.is_ready.values())), len(self.table) - 1)

    def table_step_ms(self) -> int:
        samples_per_s = self.table[self.table_index()]
        return max(1, int(self.costs.samples / samples_per_s * 1000)) if samples_per_s else _STANDSTILL_MS

    def credit(self, at_ms: int) -> None:
        self.starts.append(self.last_ms)
        self.times_ms.append(at_ms - self.last_ms)
        self.rates_ms.append(at_ms - self.last_ms)
        self.last_ms = self.last_step_ms = at_ms

    def roll_back(self, first: int) -> None:
        """Give no credit for the steps from this number on."""
        self.rates_ms[first:] = [0] * len(self.rates_ms[first:])
