"""In one process: layers that move between stages again and again, at random, with workers that die, change no bit."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from random import Random

import pytest
import torch
from torch import Tensor, nn

from recycle.control.decide.messages import LayerTransfer
from recycle.control.decide.place_assignment import layer_transfers
from recycle.core.cluster import Shape, Worker
from recycle.core.layers import StageLayers
from recycle.core.plans.plan_source import PlanAssignment
from recycle.runtime.boundary.boundary_spec import BoundarySpec, TensorSpec
from recycle.runtime.checkpoint.compatibility import fingerprint_of_layers, refuse_foreign
from recycle.runtime.checkpoint.files import Checkpoint
from recycle.runtime.checkpoint.layer_names import find_layer_names
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.compute.tied_parameters import find_ties
from recycle.runtime.execute.stage_state import StageState
from recycle.runtime.job import Job
from recycle.runtime.options import TrainOptions
from recycle.runtime.worker.moved_layers import KeptLayers, ReceivedLayers, moved_stages, spec_with_layers
from recycle.runtime.worker.worker_spec import WorkerSpec
from tests.runtime.execute.test_shapes import LAYERS, NUM_CHAINS, Text, gpt, next_byte_loss, repeated
from tests.runtime.jobs import adamw, greedy_plan, sgd
from tests.runtime.random_layers import random_counts
from tests.runtime.reference_executor import ReferenceExecutor

pytestmark = pytest.mark.timeout(120)
SHAPE, STEPS = (3, 2), 5
Make = Callable[[int], list[nn.Module]]
Held = Mapping[Worker, KeptLayers]


class Wire:
    """What a worker of this process sends and receives: every message waits for its receiver."""

    def __init__(self, own: Worker, sent: dict[tuple[Worker, Worker], deque[Tensor]]) -> None:
        self._own, self._sent = own, sent

    def send_bytes(self, receiver: Worker, body: Tensor, tag: int) -> None:
        self._sent[self._own, receiver].append(body.clone())

    def receive_bytes(self, sender: Worker, size_bytes: int, tag: int) -> Tensor:
        body = self._sent[sender, self._own].popleft()
        assert len(body) == size_bytes
        return body


class MovingJob:
    """A job in one process whose layers may be at other stages after any step."""

    def __init__(self, make: Make, shared: int, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
        self._make, self._shared, self._make_optimizer = make, shared, make_optimizer
        self.num_layers = sum(map(len, find_layer_names(make(SHAPE[1])).stages))
        self.executor: ReferenceExecutor
        self.layers: StageLayers

    def start(self, counts: tuple[int, ...], dead: Sequence[str]) -> None:
        """Make new workers, with the weights that the model begins with."""
        held = moved_stages(self._make(SHAPE[1]), counts, self._shared)
        plan = greedy_plan((*SHAPE, NUM_CHAINS // SHAPE[0]), fail=",".join(dead))
        samples = MicroBatches(Text(16), plan.problem.shape, microbatch=2, seed=1)
        self.executor = ReferenceExecutor(
            plan, held, samples, next_byte_loss, self._make_optimizer, seed=3, is_exact=True, max_norm=0.05
        )
        self.layers = StageLayers(counts, self._shared)

    def states(self, num_steps: int) -> dict[Worker, StageState]:
        shape = self.executor.plan.problem.shape
        return {
            worker: StageState(executor.stage, self.executor._steppers[worker], shape, (), None, num_steps)
            for worker, executor in self.executor.workers.items()
        }

    def keep(self, num_steps: int, also: Held | None = None) -> dict[Worker, KeptLayers]:
        own = [range(start, stop) for start, stop in pairwise((0, *accumulate(self.layers.counts)))]
        return {
            worker: KeptLayers.of(state, self.layers.held(worker.stage), own[worker.stage], (also or {}).get(worker))
            for worker, state in self.states(num_steps).items()
        }

    def transfer(self, kept: Held, num_steps: int) -> None:
        """Give all new workers the state of their layers; those that are in `kept` have some."""
        plan = self.executor.plan
        places = {row.worker: row.worker for row in plan.rows}
        assignment = PlanAssignment(plan, places, "")
        transfers = layer_transfers(assignment, {worker: each.layers for worker, each in kept.items()}, self.layers)
        assert transfers is not None
        sent: dict[tuple[Worker, Worker], deque[Tensor]] = defaultdict(deque)
        wires = {worker: Wire(worker, sent) for worker in places}
        own = [range(start, stop) for start, stop in pairwise((0, *accumulate(self.layers.counts)))]
        for each in transfers:
            sender = Worker.parse(each.sender)
            kept[sender].send(wires[sender], each)  # type: ignore[arg-type]
        for worker, state in self.states(num_steps).items():
            received = ReceivedLayers(kept.get(worker))
            for each in transfers:
                if each.receiver == str(worker):
                    received.receive(wires[worker], each)  # type: ignore[arg-type]
            received.put_into(state, own[worker.stage])
        assert not any(sent.values())


@cache
def undisturbed(make: Make, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> str:
    job = MovingJob(make, 0, make_optimizer)
    job.start((2, job.num_layers - 2), ())
    for step in range(STEPS):
        job.executor.iterate(step)
    return job.executor.weights_sha256()


def random_dead(random: Random) -> list[str]:
    """Some dead workers; every stage keeps one."""
    return [f"W{random.randrange(SHAPE[0])}_{stage}" for stage in range(SHAPE[1]) if random.random() < 0.6]


@pytest.mark.parametrize("make", [gpt, repeated])
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
@pytest.mark.parametrize("seed", range(3))
def test_random_layers_and_failures_come_to_the_same_weights(
    make: Make, make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], seed: int
) -> None:
    random = Random(f"{make.__name__} {seed}")
    shared = seed % 2
    job = MovingJob(make, shared, make_optimizer)
    job.start(random_counts(job.num_layers, SHAPE[1], 1, random), ())
    for step in range(STEPS):
        job.executor.iterate(step)
        kept, dead = job.keep(step + 1), random_dead(random)
        live = {worker: each for worker, each in kept.items() if str(worker) not in dead}
        if random.random() < 0.5 and len(live) > 2:  # one joins anew, without any state; its peers have theirs
            newcomer = next((w for w in live if sum(other.stage == w.stage for other in live) > 1), None)
            live = {worker: each for worker, each in live.items() if worker != newcomer}
        job.start(random_counts(job.num_layers, SHAPE[1], 1, random), dead)
        job.transfer(live, step + 1)
    assert job.executor.weights_sha256() == undisturbed(make, make_optimizer)


def test_a_transfer_that_was_broken_off_for_some_loses_nothing() -> None:
    random = Random(5)
    job = MovingJob(gpt, 1, adamw)
    job.start((3, LAYERS - 3), ())
    for step in range(STEPS):
        job.executor.iterate(step)
        before = job.keep(step + 1)
        job.start(random_counts(job.num_layers, SHAPE[1], 1, random), ())
        job.transfer(before, step + 1)
        done = {worker for worker in before if random.random() < 0.5}
        both = job.keep(step + 1, before)
        assert all(both[worker].layers >= each.layers for worker, each in before.items())
        kept = {worker: both[worker] if worker in done else before[worker] for worker in before}
        dead = random_dead(random)
        job.start(random_counts(job.num_layers, SHAPE[1], 1, random), dead)
        job.transfer({worker: each for worker, each in kept.items() if str(worker) not in dead}, step + 1)
    assert job.executor.weights_sha256() == undisturbed(gpt, adamw)


def transfers_of(held: Mapping[str, set[int]], counts: tuple[int, ...], shared: int = 0) -> tuple[LayerTransfer, ...] | None:
    plan = greedy_plan((3, 2, 2), fail=",".join(str(w) for w in Shape(3, 2, 2).workers() if str(w) not in held))
    assignment = PlanAssignment(plan, {row.worker: row.worker for row in plan.rows}, "")
    return layer_transfers(assignment, {Worker.parse(at): layers for at, layers in held.items()}, StageLayers(counts, shared))


def test_holders_of_a_layer_take_turns_in_sending_it() -> None:
    first, second = {0, 1}, {2, 3}
    held = {"W0_0": first, "W1_0": first, "W2_0": first, "W0_1": second, "W2_1": second}
    assert transfers_of(held, (3, 1)) == (
        LayerTransfer("W0_0", "W0_1", 2, 3),
        LayerTransfer("W1_0", "W2_1", 2, 3),
        LayerTransfer("W2_0", "W0_1", 2, 3),
    )
    assert transfers_of(held, (2, 2)) == ()


def test_a_layer_that_nobody_holds_cannot_be_transferred() -> None:
    assert transfers_of({"W0_0": {0, 1}, "W0_1": {3}}, (3, 1)) is None
    assert transfers_of({"W0_0": {0, 1}, "W0_1": {1, 3}}, (3, 1)) is None
    assert transfers_of({"W0_0": {0, 1}, "W0_1": {2, 3}, "W1_1": set()}, (2, 2)) == (LayerTransfer("W1_1", "W0_1", 2, 4),)


@pytest.mark.parametrize("make", [gpt, repeated])
def test_names_and_fingerprint_of_moved_layers_are_those_of_stages_that_were_cut_so(make: Make) -> None:
    stages = make(2)
    names = find_layer_names(stages)
    plan = greedy_plan((2, 2, 2))
    job = Job(plan, stages, Text(16), next_byte_loss, adamw, 1, 1, options=TrainOptions(is_exact=True))
    counts = (1, len(names.model) - 1)
    spec = WorkerSpec(
        plan.problem.shape, stages.__getitem__, {}, (), job.microbatches, next_byte_loss, adamw, 1, job.options, layers=names
    )
    between = [BoundarySpec.one_tensor(TensorSpec((number,), torch.float32)) for number in range(len(names.model) - 1)]
    moved = spec_with_layers(replace(spec, make_model=lambda: stages, layer_specs=between), counts)
    assert moved.layers is not None
    assert moved.boundaries == {0: between[0]}
    cut = moved_stages(stages, counts, 0)
    found = find_layer_names(cut)
    assert (moved.layers.stages, moved.layers.ties) == (found.stages, found.ties)
    assert moved.ties == find_ties(cut)
    fingerprint = fingerprint_of_layers(job.fingerprint(), counts)
    again = replace(job, stages=cut).fingerprint()
    assert fingerprint["model"] == again["model"]
    refuse_foreign(Checkpoint(1, None, (), fingerprint), job.fingerprint())  # type: ignore[arg-type]
    refuse_foreign(Checkpoint(1, None, (), fingerprint), again)  # type: ignore[arg-type]
