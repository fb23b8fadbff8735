"""A measured profile: what it says, that it leaves no trace, and that plans made with it keep their promise of memory."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import recycle
from recycle.core.cluster import Shape
from recycle.core.profile import Profile, StageProfile
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.runtime.compute.activation_memory import ActivationMeter, planned_peak_bytes
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.compute.stage_costs import measure_bytes, measure_stages
from tests.runtime.jobs import BATCH, WIDTH, Numbers, adamw, loss, make_stages
from tests.runtime.reference_executor import ReferenceExecutor

torch.set_num_threads(1)
HIDDEN_BYTES = 4 * BATCH * 5 * WIDTH


class Scripted:
    """A clock that is read before and after every op, and says that each took the next of these times."""

    def __init__(self, *times_us):
        self._times, self._now, self._num_reads = itertools.cycle(times_us), 0.0, 0

    def __call__(self):
        self._num_reads += 1
        if self._num_reads % 2 == 0:
            self._now += next(self._times)
        return self._now


def test_a_profile_has_the_median_time_of_every_op():
    # Two stages; a go is two F, I and W of the last stage, I and W of the first, two F, two B, and two steps.
    first_go = [99] * 12
    goes = [[10 + n, 20, 30 + n, 5, 31 - n, 6, 10 + n, 20, 37 + n, 35 - n, 8, 9] for n in range(3)]
    clock = Scripted(*first_go, *itertools.chain(*goes))
    profile = measure_stages(make_stages(2), Numbers(), loss, num_repeats=3, make_optimizer=adamw, clock_us=clock)
    first, last = profile.stages
    assert (first.forward_us, first.input_us, first.weight_us, first.fused_us, first.optimizer_us) == (11, 30, 6, 34, 8)
    assert (last.forward_us, last.input_us, last.weight_us, last.fused_us, last.optimizer_us) == (20, 31, 5, 38, 9)
    assert profile.name.startswith("measured on ")
    assert profile.name.endswith(" cores, links as if they were free")
    assert [profile.comm_us(0), profile.reduce_us(0, 2)] == [1, 1]  # the least that a message of any size takes


def test_no_op_takes_no_time_and_a_whole_backward_pass_is_no_shorter_than_its_first_part():
    stage = measure_stages(make_stages(1), Numbers(), loss, num_repeats=1, clock_us=Scripted(0.2, 7, 0.1, 0.3, 4)).stages[0]
    assert (stage.forward_us, stage.input_us, stage.weight_us, stage.fused_us, stage.optimizer_us) == (1, 7, 1, 7, 0)


def test_a_profile_measured_by_a_real_clock_can_be_planned_with():
    profile = measure_stages(make_stages(2), Numbers(), loss, num_repeats=1, make_optimizer=adamw)
    assert all(stage.optimizer_us > 0 for stage in profile.stages)
    assert Profile.from_json(profile.to_json()) == profile
    shape = Shape(2, 2, 3)
    plan = recycle.solve(recycle.Problem(recycle.Cluster.of(shape, ()), profile), "greedy")
    assert recycle.check(plan) == []


@pytest.mark.parametrize(
    ("is_exact", "sum_dtype", "number_bytes"), [(False, torch.float32, 4), (False, torch.float64, 8), (True, torch.float32, 8)]
)
def test_a_profile_knows_the_bytes_of_parameters_and_of_what_peers_reduce(is_exact, sum_dtype, number_bytes):
    stages = make_stages(2)
    profile = measure_stages(stages, Numbers(), loss, num_repeats=1, is_exact=is_exact, sum_dtype=sum_dtype)
    for module, stage in zip(stages, profile.stages, strict=True):
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        assert stage.static_bytes == 4 * num_parameters
        assert stage.gradient_bytes == pytest.approx(number_bytes * num_parameters, rel=0.01)


def test_bytes_are_the_same_each_time_and_those_of_the_profile():
    stages = make_stages(3, dropout=0.1)
    once, again = (measure_bytes(stages, Numbers(), loss) for _ in range(2))
    assert once == again
    profile = measure_stages(stages, Numbers(), loss, num_repeats=1)
    assert once == [(stage.activation_bytes, stage.weight_held_bytes, stage.output_bytes) for stage in profile.stages]
    assert [output for _, _, output in once] == [HIDDEN_BYTES, HIDDEN_BYTES, 4]
    assert all(0 < rest < activation for activation, rest, _ in once)


def test_bytes_of_linears_can_be_counted_by_hand():
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    first, last = measure_bytes(stages, Numbers(), loss)
    # After I both inputs and both gradients are there. F stored the input, what tanh made, and the output: less than that.
    assert first == (4 * HIDDEN_BYTES, 4 * HIDDEN_BYTES, HIDDEN_BYTES)
    # The last stage's F keeps the targets, too, and the loss, whose storage torch makes as large as what it is the mean of.
    assert last == (5 * HIDDEN_BYTES, 4 * HIDDEN_BYTES, 4)


class Again(nn.Module):
    """A stage that computes its activations again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_where_w_needs_more_than_f_stored_f_is_said_to_take_as_much():
    for activation, rest, _ in measure_bytes([Again(), Again(), Again()], Numbers(), loss):
        assert activation >= rest
        assert StageProfile(1, 1, 1, 2, activation_bytes=activation, weight_held_bytes=rest).weight_held_bytes == 4 * HIDDEN_BYTES


class Slices:
    """Micro-batches that look at one large tensor."""

    def __init__(self):
        self.data = torch.randn(1000, 5, WIDTH)

    def get(self, step, pipeline, index):
        start = BATCH * (step + pipeline + index)
        return self.data[start : start + BATCH], self.data[start : start + BATCH]


def test_a_micro_batch_that_is_a_view_of_the_data_set_counts_for_itself_alone():
    stages = make_stages(2)
    assert measure_bytes(stages, Slices(), loss) == measure_bytes(stages, Numbers(), loss)


class Batched(nn.Module):
    """A stage with parameters, buffers that change, and dropout."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Flatten(), nn.Linear(5 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.back = nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, x):
        return self.back(self.parts(x)).view_as(x)


@pytest.mark.parametrize("call", [measure_stages, measure_bytes])
def test_measuring_leaves_no_trace(call):
    stages = [Batched(), Batched()]
    for parameter in stages[0].parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = copy.deepcopy([stage.state_dict() for stage in stages])
    forwards = [dict(vars(part)) for stage in stages for part in stage.modules()]
    torch.manual_seed(21)
    state = torch.get_rng_state()
    call(stages, Numbers(), loss, **({"num_repeats": 2, "make_optimizer": adamw} if call is measure_stages else {}))
    assert torch.equal(torch.get_rng_state(), state)
    for stage, old in zip(stages, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in stage.state_dict().items())
        assert stage.training
    assert all(torch.equal(parameter.grad, torch.full_like(parameter, 3.0)) for parameter in stages[0].parameters())
    assert all(parameter.grad is None for parameter in stages[1].parameters())
    assert [vars(part).keys() for stage in stages for part in stage.modules()] == [own.keys() for own in forwards]


@pytest.mark.parametrize("num_repeats", [0, -1, 1.5, True])
def test_a_number_of_repeats_that_cannot_be_is_refused(num_repeats):
    with pytest.raises(recycle.UserError, match=f"num_repeats is {num_repeats}"):
        measure_stages(make_stages(1), Numbers(), loss, num_repeats=num_repeats)


SHAPE = (3, 4, 4)
PLANS = {
    "1F1B": {"techniques": "none", "memory": "4,3,2,1"},
    "zero bubble with the memory of 2S micro-batches": {"memory": 8},
    "one dead": {"fail": "W1_2"},
    "one dead, 1F1B": {"fail": "W1_2", "techniques": "adaptive", "memory": 6},
    "two dead in one stage": {"fail": "W0_1,W2_1"},
}
CONFIG = GptConfig(context=16, width=32, num_heads=2, num_layers=4, dropout=0.1)
MODELS = {
    "transformer": (lambda: make_stages(4), lambda shape: Numbers(), loss),
    "GPT": (lambda: gpt_stages(CONFIG, 4, seed=1), lambda shape: MicroBatches(Text(16), shape, 2, seed=1), next_byte_loss),
}


def plan(options):
    return recycle.solve(recycle.problem(*SHAPE, costs=(10, 13, 9), comm=1, **options), "greedy")


def peaks(made, stages, samples, own_loss):
    """The measured and the planned peak of every worker."""
    job = ReferenceExecutor(made, stages, samples, own_loss, adamw)
    for executor in job.workers.values():
        executor.stage.meter = ActivationMeter(executor.stage.module)
    job.iterate(0)
    sizes = measure_bytes(stages, samples, own_loss)
    profiles = [StageProfile(1, 1, 1, 2, activation_bytes=whole, weight_held_bytes=rest) for whole, rest, _ in sizes]
    planned = {row.worker: planned_peak_bytes(row, profiles[row.worker.stage]) for row in made.rows}
    assert all(executor.stage.meter.held_bytes == 0 for executor in job.workers.values())
    return {worker: (executor.stage.meter.peak_bytes, planned[worker]) for worker, executor in job.workers.items()}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_every_worker_holds_at_its_peak_what_its_plan_says(name, model):
    made = plan(PLANS[name])
    make, make_samples, own_loss = MODELS[model]
    found = peaks(made, make(), make_samples(made.problem.shape), own_loss)
    assert {worker: measured for worker, (measured, _) in found.items()} == {
        row.worker: found[row.worker][1] for row in made.rows
    }
    assert len(set(found.values())) > 2  # stages differ, and so do their peaks


def test_a_worker_holds_no_more_than_planned_where_i_takes_memory():
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    found = peaks(plan(PLANS["zero bubble with the memory of 2S micro-batches"]), stages, Numbers(), loss)
    assert all(0.7 * planned < measured <= planned for measured, planned in found.values()), found
