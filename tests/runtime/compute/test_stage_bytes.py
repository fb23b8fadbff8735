"""The bytes of stages: what they are, and that plans made with them keep their promise of memory."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recycle.core.plans.memory_use import memory_use
from recycle.core.profile import Profile, StageProfile
from recycle.models.gpt import GptConfig, gpt_stages, next_byte_loss
from recycle.models.text import Text
from recycle.runtime.compute.activation_memory import ActivationMeter
from recycle.runtime.compute.microbatches import MicroBatches
from recycle.runtime.compute.stage_bytes import measure_bytes
from tests.runtime.jobs import BATCH, WIDTH, Numbers, adamw, greedy_plan, loss, make_stages
from tests.runtime.reference_executor import ReferenceExecutor

torch.set_num_threads(1)
HIDDEN_BYTES = 4 * BATCH * 5 * WIDTH


def test_bytes_are_the_same_each_time():
    once, again = (measure_bytes(make_stages(3, dropout=0.1), Numbers(), loss) for _ in range(2))
    assert once == again
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
    return greedy_plan(SHAPE, comm=1, **options)


def peaks(made, stages, samples, own_loss):
    """The measured and the planned peak of every worker."""
    job = ReferenceExecutor(made, stages, samples, own_loss, adamw)
    for executor in job.workers.values():
        executor.stage.meter = ActivationMeter(executor.stage.module)
    job.iterate(0)
    sizes = measure_bytes(stages, samples, own_loss)
    profiles = (StageProfile(1, 1, 1, 2, activation_bytes=whole, weight_held_bytes=rest) for whole, rest, _ in sizes)
    planned = memory_use(made, Profile(tuple(profiles)))
    assert all(executor.stage.meter.held_bytes == 0 for executor in job.workers.values())
    return {
        worker: (executor.stage.meter.peak_bytes, planned[worker].activation_bytes) for worker, executor in job.workers.items()
    }


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
