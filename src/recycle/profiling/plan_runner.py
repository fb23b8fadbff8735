"""PlanRunner: a worker of a pool that runs plans for measuring, each from the same weights on, for a few iterations.

It trains as `recycle.train` does, by the same trainer over the same transport, but without a coordinator. Every run computes the
same iterations, so that the losses of two plans must agree.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from recycle.core.cluster import Worker
from recycle.core.errors import WorkerFailed
from recycle.core.plans.plan import Plan
from recycle.core.plans.row_programs import row_programs
from recycle.profiling.emulated_device import EmulatedDevice
from recycle.profiling.worker_pool import TIMEOUT, MemberContext
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.compute.stage_bytes import state_bytes
from recycle.runtime.execute.spans import Span, now_us
from recycle.runtime.options import NCCL
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.gpu.nccl import prepare_process
from recycle.runtime.transport.specs import GroupView, TransportSpec
from recycle.runtime.worker.epoch_setup import connect, make_stage_state, make_trainer, partners_of, worker_program
from recycle.runtime.worker.worker_spec import WorkerSpec

_NUM_PINGS = 50


@dataclass(frozen=True, slots=True)
class PlanRun:
    """A worker's spans by iteration, in the machine's clock, and at the last stage the mean losses."""

    spans: Sequence[Sequence[Span]] = ()
    losses: Sequence[float] = ()


class StateBytes(NamedTuple):
    """The bytes that a worker holds whatever is in flight, and the bytes that its peers reduce."""

    static_bytes: int
    gradient_bytes: int


class PlanRunner:
    """A member of a pool. A request is one of its methods, with all other arguments bound.

    With a `device`, ops take the time that the emulated device of their worker takes for them.
    """

    def __init__(self, spec: WorkerSpec, context: MemberContext, device: EmulatedDevice | None = None) -> None:
        if spec.options.transport == NCCL:
            prepare_process()
        self._spec, self._context, self._emulated = spec, context, device
        # The workers on a GPU share one.
        self._device = torch.device("cuda", 0) if spec.options.device == "cuda" else torch.device("cpu")

    def answer(self, request: Callable[["PlanRunner"], Any]) -> Any:
        return request(self)

    def run(self, number: int, plan: Plan, num_iterations: int, place: Worker | None = None, speed: float = 1.0) -> PlanRun:
        """Run a plan at a place of it, by default the worker's own; a worker without a place does nothing.

        `number` is that of the run, the same for all workers that take part. Ops are slowed down to `speed`.
        """
        place = place or self._context.worker
        workers = [row.worker for row in plan.rows]
        if place not in workers:
            return PlanRun()
        spec, program = (
            replace(self._spec, shape=plan.problem.shape),
            worker_program(row_programs(plan)[place], plan.problem.shape),
        )
        view = GroupView(place, workers, number, partners_of(place, program, {}))
        state = make_stage_state(spec, place.stage, device=self._device)
        transport, _ = connect(spec, program, view, self._context.store, self._device)
        device_us = self._emulated.device_us(plan, place.stage) if self._emulated else None
        trainer = make_trainer(spec, program, view, state, transport, speed_in=lambda iteration: speed, device_us=device_us)
        spans: list[Sequence[Span]] = []
        losses: list[float] = []

        def on_applied(iteration: int, own: Mapping[int, float], ran: Sequence[Span], verdict: StepVerdict) -> None:
            spans.append(ran)
            losses.extend([sum(own.values()) / len(own)] if own else [])

        if not trainer.train(num_iterations, on_applied):
            raise WorkerFailed(f"{place} paused, though nobody asked it to")
        transport.abort()
        transport.close()
        return PlanRun(spans, losses)

    def state_bytes(self) -> StateBytes:
        """The size of the state of the worker's stage."""
        state = make_stage_state(self._spec, self._context.worker.stage, device=self._device)
        held = state_bytes(state.stage, self._spec.make_optimizer, self._spec.options.has_lean_steps)
        return StateBytes(held, state.stage.sums.flat.nbytes)

    def ping(self) -> list[float]:
        """The times of the smallest message to the next stage, in µs; workers of every other stage measure them."""
        own, workers, store = self._context
        other = Worker(own.pipeline, own.stage + 1 if own.stage % 2 == 0 else own.stage - 1)
        view = GroupView(own, workers, 0, frozenset({other} & set(workers)))
        groups = GlooGroups(store, view, TransportSpec({}, 1, (), TIMEOUT))
        times_us: list[float] = []
        body = torch.zeros(1, dtype=torch.uint8)
        for number in range(_NUM_PINGS if other in workers else 0):
            begin_us = now_us()
            if own.stage % 2 == 0:
                groups.send_bytes(other, body, number)
                groups.receive_bytes(other, 1, number)
                times_us.append((now_us() - begin_us) / 2)
            else:
                groups.receive_bytes(other, 1, number)
                groups.send_bytes(other, body, number)
        groups.abort()
        groups.close()
        return times_us
