"""The executor: one worker that plays its row. What to receive and to send follows from the plan's routes.

It knows no clock. An op waits for its message, runs, and sends on; the order of a legal plan has no cycle, so that no two workers
can wait for each other.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from recycle.core.cluster import Shape, Worker
from recycle.core.op import Kind
from recycle.core.plan import Row, microbatch_of
from recycle.core.routes import Routes
from recycle.runtime.seeds import seed_of
from recycle.runtime.stage import Stage


@dataclass(frozen=True, slots=True)
class Message:
    """What a tensor on its way is: the activation (F) or the gradient (I) of a chain, for a stage, in an iteration."""

    iteration: int
    kind: Kind
    stage: int
    chain: int


class Links(Protocol):
    """How workers reach each other."""

    def send(self, message: Message, tensor: Tensor, to: Worker) -> None:
        """Send without waiting for the receiver."""
        ...

    def receive(self, message: Message, sender: Worker) -> Tensor:
        """Return the tensor that `sender` sends or has sent."""
        ...


class Samples(Protocol):
    """Micro-batches by their address, the same for whoever asks."""

    def get(self, step: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]: ...


class Executor:
    """A worker with its stage. `losses` are those of the iteration, by chain, at the last stage."""

    def __init__(self, row: Row, shape: Shape, routes: Routes, stage: Stage, links: Links, samples: Samples, seed: int) -> None:
        self.row = row
        self.stage = stage
        self.losses: dict[int, float] = {}
        self.shape = shape
        self._routes, self._links, self._samples, self._seed = routes, links, samples, seed

    def run(self, iteration: int, kind: Kind, chain: int) -> None:
        """Run one op: receive what it needs, compute, send what it makes."""
        match kind:
            case Kind.F:
                self._forward(iteration, chain)
            case Kind.I:
                self._pass_back(iteration, chain, self.stage.backward_input(chain, self._gradient(iteration, chain)))
            case Kind.B:
                self._pass_back(iteration, chain, self.stage.backward(chain, self._gradient(iteration, chain)))
            case Kind.W:
                self.stage.backward_weight(chain)

    def _forward(self, iteration: int, chain: int) -> None:
        number, last = self.row.worker.stage, self.shape.num_stages - 1
        microbatch = microbatch_of(self.shape, chain)
        given, targets = None, None
        if number in (0, last):
            given, targets = self._samples.get(iteration, microbatch.pipeline, microbatch.index)
        if number > 0:
            given = self._links.receive(Message(iteration, Kind.F, number, chain), self._routes.worker(number - 1, chain))
        assert given is not None
        seed = seed_of(self._seed, iteration, microbatch.pipeline, microbatch.index, number)
        made = self.stage.forward(chain, given, seed, targets if number == last else None)
        if number == last:
            self.losses[chain] = float(made)
        else:
            self._links.send(Message(iteration, Kind.F, number + 1, chain), made, self._routes.worker(number + 1, chain))

    def _gradient(self, iteration: int, chain: int) -> Tensor | None:
        """The gradient of what the stage made; the loss, at the last one, has none but itself."""
        number = self.row.worker.stage
        if number == self.shape.num_stages - 1:
            return None
        return self._links.receive(Message(iteration, Kind.I, number, chain), self._routes.worker(number + 1, chain))

    def _pass_back(self, iteration: int, chain: int, gradient: Tensor | None) -> None:
        number = self.row.worker.stage
        if number > 0:
            assert gradient is not None
            self._links.send(Message(iteration, Kind.I, number - 1, chain), gradient, self._routes.worker(number - 1, chain))
