"""A profile measured in one process: the times and sizes that it has, and that measuring leaves no trace."""

import copy
import itertools

import pytest
import torch
from torch import nn

import recycle
from recycle.core.cluster import Shape
from recycle.core.profile import Profile
from recycle.profiling.rehearsal import rehearsal_plan
from recycle.profiling.stage_times import measure_stages
from recycle.runtime.compute.stage_bytes import measure_bytes
from recycle.runtime.job import Job
from recycle.runtime.options import TrainOptions
from tests.runtime.jobs import WIDTH, Numbers, adamw, loss, make_stages, reduced_bytes

torch.set_num_threads(1)


class ScriptedClock:
    """A clock that is read before and after every op; each op takes the next of these times."""

    def __init__(self, *times_us):
        self._times, self._now, self._num_reads = itertools.cycle(times_us), 0.0, 0

    def __call__(self):
        self._num_reads += 1
        if self._num_reads % 2 == 0:
            self._now += next(self._times)
        return self._now


def job_of(stages, **options):
    """A job of these stages; its plan plays no part in measuring."""
    plan = rehearsal_plan(Shape(1, len(stages), 1), is_split=True)
    return Job(plan, stages, Numbers(), loss, adamw, steps=1, options=TrainOptions(**options))


def test_a_profile_has_the_median_time_of_every_op():
    # Two stages; a pass is two F, I and W of the last stage, I and W of the first, two F, two B, and two steps.
    first_pass = [99] * 12
    passes = [[10 + n, 20, 30 + n, 5, 31 - n, 6, 10 + n, 20, 37 + n, 35 - n, 8, 9] for n in range(3)]
    clock = ScriptedClock(*first_pass, *itertools.chain(*passes))
    profile = measure_stages(job_of(make_stages(2)), num_repeats=3, clock_us=clock)
    first, last = profile.stages
    assert (first.forward_us, first.input_us, first.weight_us, first.fused_us, first.optimizer_us) == (11, 30, 6, 34, 8)
    assert (last.forward_us, last.input_us, last.weight_us, last.fused_us, last.optimizer_us) == (20, 31, 5, 38, 9)
    assert profile.name.startswith("measured on ")
    assert profile.name.endswith(" cores, links as if they were free")
    assert [profile.comm_us(0), profile.reduce_us(0, 2)] == [1, 1]  # the least that a message of any size takes


def test_no_op_takes_no_time_and_a_whole_backward_pass_is_no_shorter_than_its_first_part():
    clock = ScriptedClock(0.2, 7, 0.1, 0.3, 4, 0.4)
    stage = measure_stages(job_of(make_stages(1)), num_repeats=1, clock_us=clock).stages[0]
    assert (stage.forward_us, stage.input_us, stage.weight_us, stage.fused_us, stage.optimizer_us) == (1, 7, 1, 7, 0)


def test_a_profile_measured_by_a_real_clock_can_be_planned_with():
    profile = measure_stages(job_of(make_stages(2)), num_repeats=1)
    assert all(stage.optimizer_us > 0 for stage in profile.stages)
    assert Profile.from_json(profile.to_json()) == profile
    shape = Shape(2, 2, 3)
    plan = recycle.solve(recycle.Problem(recycle.Cluster.of(shape, ()), profile), "greedy")
    assert recycle.check(plan) == []


@pytest.mark.parametrize("lean_steps", [None, True])
@pytest.mark.parametrize(
    ("is_exact", "sum_dtype", "number_bytes"), [(False, torch.float32, 4), (False, torch.float64, 8), (True, torch.float32, 8)]
)
def test_a_profile_knows_the_bytes_of_the_state_and_of_what_peers_reduce(is_exact, sum_dtype, number_bytes, lean_steps):
    stages = make_stages(2)
    job = job_of(stages, is_exact=is_exact, sum_dtype=sum_dtype, lean_steps=lean_steps)
    profile = measure_stages(job, num_repeats=1)
    for module, stage in zip(stages, profile.stages, strict=True):
        weights = sum(parameter.nbytes for parameter in module.parameters())
        state = 2 * weights + 4 * len(list(module.parameters()))  # two moments, and a count of steps for each tensor
        copies = weights if lean_steps else weights + state  # since a step can be taken back
        means = weights  # for the step
        sums = reduced_bytes(module, number_bytes) - 256
        assert stage.static_bytes == weights + state + copies + means + sums
        assert stage.gradient_bytes == reduced_bytes(module, number_bytes)


def test_the_profile_has_the_bytes_that_are_measured_without_a_clock():
    stages = make_stages(3, dropout=0.1)
    profile = measure_stages(job_of(stages), num_repeats=1)
    sizes = [(stage.activation_bytes, stage.weight_held_bytes, stage.output_bytes) for stage in profile.stages]
    assert measure_bytes(stages, Numbers(), loss) == sizes


class Batched(nn.Module):
    """A stage with parameters, buffers that change, and dropout."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(nn.Flatten(), nn.Linear(5 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
        self.back = nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, x):
        return self.back(self.parts(x)).view_as(x)


@pytest.mark.parametrize(
    "measure", [lambda stages: measure_stages(job_of(stages), 2), lambda stages: measure_bytes(stages, Numbers(), loss)]
)
def test_measuring_leaves_no_trace(measure):
    stages = [Batched(), Batched()]
    for parameter in stages[0].parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    before = copy.deepcopy([stage.state_dict() for stage in stages])
    forwards = [dict(vars(part)) for stage in stages for part in stage.modules()]
    torch.manual_seed(21)
    state = torch.get_rng_state()
    measure(stages)
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
        measure_stages(job_of(make_stages(1)), num_repeats=num_repeats)
