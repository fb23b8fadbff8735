"""A player: a worker of a crew that plays plans for measuring, each from the same weights on, for a few iterations.

It trains as `recycle.train` does, by the same trainer over the same links, but has no coordinator. Every play computes the same
iterations, so that the losses of two plans must agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recycle.core.cluster import Worker
from recycle.core.errors import WorkerFailed
from recycle.core.plans.plan import Plan
from recycle.profiling.worker_pool import TIMEOUT
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.execute.executor import Span, now_us
from recycle.runtime.transport.gloo import GlooTransport, GroupView
from recycle.runtime.transport.select import make_transport
from recycle.runtime.worker.epoch_setup import make_stage_state, make_trainer, worker_program
from recycle.runtime.worker.worker_spec import WorkerSpec

_NUM_PINGS = 50


@dataclass(frozen=True, slots=True)
class PlanRun:
    """What a worker did, iteration by iteration: its spans, by the machine's clock, and at the last stage the mean loss."""

    spans: Sequence[Sequence[Span]] = ()
    losses: Sequence[float] = ()


class WeightState(NamedTuple):
    """What a worker holds whatever is in flight, and what of it is reduced."""

    static_bytes: int
    gradient_bytes: int


class PlanRunner:
    """One worker. `number` tells apart what it plays, and is the same for all who play together."""

    def __init__(self, kit: WorkerSpec, store: Any) -> None:
        self._kit, self._store = kit, store

    def play(self, number: int, plan: Plan, seat: Worker, num_iterations: int) -> PlanRun:
        """Play a plan at a seat of it."""
        kit = self._kit
        device = _device(kit)
        address = GroupView(seat, [row.worker for row in plan.rows], number)
        footing = make_stage_state(kit, seat.stage, device=device)
        part = worker_program(plan, seat)
        links = make_transport(kit, self._store, address, part.turns, device)
        trainer = make_trainer(kit, part, address, footing, links)
        spans: list[Sequence[Span]] = []
        losses: list[float] = []

        def report(iteration: int, own: Mapping[int, float], ran: Sequence[Span], verdict: StepVerdict) -> None:
            spans.append(ran)
            losses.extend([sum(own.values()) / len(own)] if own else [])

        if not trainer.train(num_iterations, report):
            raise WorkerFailed(f"{seat} paused, though nobody asked it to")
        links.abort()
        links.close()
        return PlanRun(spans, losses)

    def state(self, stage: int) -> WeightState:
        """How large the state of a stage is; all but the sums is there twice, because a step can be taken back."""
        footing = make_stage_state(self._kit, stage, device=_device(self._kit))
        parameters = list(footing.stage.parameters())
        footing.stepper.step(0, [torch.zeros_like(parameter) for parameter in parameters], 1.0)
        states = footing.stepper.optimizer.state.values()
        optimizer_bytes = sum(value.nbytes for own in states for value in own.values() if isinstance(value, Tensor))
        gradient_bytes = footing.stage.sums.flat.nbytes
        parameter_bytes = sum(parameter.nbytes for parameter in parameters)
        return WeightState(2 * (parameter_bytes + optimizer_bytes) + gradient_bytes, gradient_bytes)

    def ping(self, own: Worker, workers: Sequence[Worker]) -> list[float]:
        """How long the smallest message takes to the next stage, in µs; every other stage asks."""
        links = GlooTransport(self._store, GroupView(own, workers, 0), {}, 1, (), TIMEOUT)
        other = Worker(own.pipeline, own.stage + 1 if own.stage % 2 == 0 else own.stage - 1)
        times_us: list[float] = []
        body = torch.zeros(1, dtype=torch.uint8)
        for number in range(_NUM_PINGS if other in workers else 0):
            begin_us = now_us()
            if own.stage % 2 == 0:
                links.send_bytes(other, body, number)
                links.receive_bytes(other, 1, number)
                times_us.append((now_us() - begin_us) / 2)
            else:
                links.receive_bytes(other, 1, number)
                links.send_bytes(other, body, number)
        links.abort()
        links.close()
        return times_us


def _device(kit: WorkerSpec) -> torch.device:
    """Where players compute: those of a GPU share one."""
    return torch.device("cuda", 0) if kit.options.device == "cuda" else torch.device("cpu")
