"""The rehearsal: what is played is legal 1F1B, and what comes of it is a profile that plans can be made from."""

import multiprocessing

import pytest

import recycle
from recycle.core.cluster import Shape
from recycle.core.plans.rules import check
from recycle.core.profile import Profile
from recycle.profiling.rehearsal import Patience, rehearsal_plan, rehearse
from recycle.runtime.compute.stage_bytes import measure_bytes
from recycle.runtime.job import Job
from recycle.runtime.options import TrainOptions
from tests.plans import make_1f1b_plan
from tests.runtime.jobs import BATCH, Numbers, adamw, loss, make_stages, reduced_bytes

pytestmark = pytest.mark.timeout(240)
SHAPES = [(1, 1, 1), (1, 4, 2), (2, 2, 2), (3, 4, 6), (2, 3, 1), (4, 1, 3), (1, 5, 9)]


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_played_is_legal_and_in_the_order_of_1f1b(shape, is_split):
    plan = rehearsal_plan(Shape(*shape), is_split)
    assert check(plan) == []
    rows = {row.worker: row for row in plan.rows}
    for classic in make_1f1b_plan(*shape).rows:
        row = rows.pop(classic.worker)
        assert row.kinds == (classic.kinds.replace("B", "IW") if is_split else classic.kinds)
        whole = [chain for kind, chain in zip(row.kinds, row.chains, strict=True) if kind != "W"]
        assert whole == list(classic.chains)
    assert rows == {}


def test_its_first_stage_is_at_work_from_the_first_forward_pass_to_the_last_backward_pass_of_1f1b():
    assert rehearsal_plan(Shape(3, 4, 6), is_split=False).period_us == (6 + 4 - 1) * (1 + 2)  # M + S - 1 times F and B


def states_of(stages):
    return [{name: value.clone() for name, value in stage.state_dict().items()} for stage in stages]


def is_equal(one, other):
    return all(set(a) == set(b) and all(a[name].equal(b[name]) for name in a) for a, b in zip(one, other, strict=True))


def test_a_rehearsal_with_real_workers_gives_a_profile_that_can_be_kept_and_planned_with():
    stages, rounds = make_stages(2), []
    before = states_of(stages)
    job = Job(rehearsal_plan(Shape(2, 2, 2), True), stages, Numbers(), loss, adamw, 1)
    # Medians of real clocks are never perfectly stable: it ends with the last round.
    found = rehearse(job, "two layers", Patience(0.0, 1, 2), lambda number, change: rounds.append((number, change)))

    assert multiprocessing.active_children() == []
    assert is_equal(states_of(stages), before)
    assert [number for number, _ in rounds] == [1, 2]
    assert (rounds[0][1], rounds[1][1]) == (1.0, found.median_change)
    assert (found.num_rounds, found.is_stable) == (2, found.median_change == 0)

    profile = found.profile
    assert Profile.from_json(profile.to_json()) == profile
    sizes = [(stage.activation_bytes, stage.weight_held_bytes, stage.output_bytes) for stage in profile.stages]
    assert sizes == measure_bytes(stages, Numbers(), loss)
    assert (profile.taken.pipelines, profile.taken.samples, profile.taken.model) == (2, BATCH, "two layers")
    assert 4 * 2 * 2 <= len(profile.factors) <= 25  # of four workers in two runs of two rounds
    assert len(profile.contention) == 4
    assert list(profile.contention) == sorted(profile.contention)
    assert profile.reduce_us(0, 2) > 0
    for module, stage in zip(stages, profile.stages, strict=True):
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        # Weights and two moments are there twice, since a step can be taken back, and gradients as sums and as means.
        assert stage.gradient_bytes == reduced_bytes(module, 4)
        assert stage.static_bytes == pytest.approx(4 * num_parameters * 7 + stage.gradient_bytes, rel=0.02)

    plan = recycle.solve(recycle.Problem(recycle.Cluster.of(Shape(2, 2, 2), ()), profile), "greedy")
    assert check(plan) == []


def test_a_rehearsal_ends_as_soon_as_medians_move_no_more_than_they_may():
    job = Job(rehearsal_plan(Shape(1, 2, 1), True), make_stages(2), Numbers(), loss, adamw, 1)
    found = rehearse(job, "two layers", Patience(share=1.0, least_rounds=1, most_rounds=5))
    assert (found.num_rounds, found.is_stable) == (1, True)
    assert len(found.profile.contention) == 2  # with nobody else, and with one other
    assert found.profile.reduce_us(0, 1) == 0


def test_a_rehearsal_with_lean_steps_times_the_ops_behind_the_second_computation_of_a_step():
    options = TrainOptions(lean_steps=True)
    job = Job(rehearsal_plan(Shape(2, 2, 2), True), make_stages(2), Numbers(), loss, adamw, 1, options=options)
    profile = rehearse(job, "two layers", Patience(share=1.0, least_rounds=1, most_rounds=1)).profile
    assert all(min(stage.input_us, stage.weight_us, stage.optimizer_us) > 1 for stage in profile.stages)
