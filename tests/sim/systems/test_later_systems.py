"""ElasWave, Odyssey and ResiHP: their steps, choices and pauses against cases that are worked out by hand."""

from dataclasses import replace

import pytest

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.planner.model.lower_bound import lower_bound
from recycle.planner.solve import solve
from recycle.sim.job import SimulatedJob
from recycle.sim.policy import ChangeKind, Loss, Members, MembershipChange
from recycle.sim.systems.constants import ElasWaveConstants, OdysseyConstants, ResiHPConstants
from recycle.sim.systems.elaswave import ElasWave
from recycle.sim.systems.odyssey import Odyssey, OdysseyRerouting, Way, rerouted_us, rerouting_estimate_us
from recycle.sim.systems.resihp import ResiHP

SECOND = 1_000_000
DAY = 86_400 * SECOND
MODEL = "layers=32,hidden=2048,heads=16,sequence=2048,vocabulary=1"
JOB = SimulatedJob.of(MODEL, "a100-80", Shape(4, 8, 32))


def members(*dead, job=JOB, slow=(), links=()):
    live = frozenset(job.shape.workers()) - set(dead)
    return Members(job.shape, live, 0, tuple(slow), tuple(links))


def lost(*workers, job=JOB):
    return MembershipChange(60 * SECOND, members(*workers, job=job), workers)


def finish_us(counts, job=JOB):
    """The reduction and the optimizer step of the slowest stage."""
    profile = job.profile()
    return max(profile.reduce_us(stage, num) + profile.stages[stage].optimizer_us for stage, num in enumerate(counts))


def travel_us(job=JOB):
    return 2 * sum(job.profile().comm_us(stage) for stage in range(job.shape.num_stages - 1))


def kept(system, *dead, job=JOB):
    whole, after = system.begin(members(job=job)), system.begin(members(*dead, job=job))
    return after.steady_state.samples_per_s / whole.steady_state.samples_per_s


# ElasWave


def test_elaswave_is_fault_free_1f1b_while_nobody_is_dead():
    system = ElasWave(JOB, ElasWaveConstants())
    stage = JOB.profile().stages[3]
    step, _ = system.step_us(JOB.base_layers, (4,) * 8)
    slot = stage.forward_us + stage.fused_us
    assert step == pytest.approx((32 + 8 - 1) * slot + travel_us() + finish_us((4,) * 8), rel=0.002)


def test_elaswave_loses_what_one_layer_more_costs():
    """Of 4 layers a stage, the stage with 3 of 4 workers gives one away: 3 * 4/3 = 4 there, 5 at a neighbour."""
    system = ElasWave(JOB, ElasWaveConstants())
    assert system.split((4, 4, 3, 4, 4, 4, 4, 4)) in ((4, 5, 3, 4, 4, 4, 4, 4), (4, 4, 3, 5, 4, 4, 4, 4))
    # M - 1 slots of 5 layers and one of each stage, of which one has 5, over M + S - 1 slots of 4.
    assert kept(system, Worker(1, 2)) == pytest.approx(4 * 39 / (31 * 5 + 33), rel=0.01)


def test_elaswave_with_raised_clocks_is_faster_but_not_faster_than_without_failure():
    system = ElasWave(JOB, ElasWaveConstants(clock_percent=110))
    usual = kept(ElasWave(JOB, ElasWaveConstants()), Worker(1, 2))
    assert usual < kept(system, Worker(1, 2)) <= 1


def test_elaswave_pauses_for_detection_repair_and_half_of_the_copy():
    system = ElasWave(JOB, ElasWaveConstants())
    first = system.begin(members())
    decision = system.change(lost(Worker(1, 2)), first.state)
    copy_us = JOB.profile().peer_link.time_us(JOB.layer_state_bytes)
    assert {pause.cause: pause.time_us for pause in decision.pauses} == {
        "detect": SECOND,
        "repair": SECOND,
        "transfer": round(copy_us * 0.49),
    }
    assert decision.loses is Loss.STEP


def test_elaswave_gives_the_layers_of_a_stage_without_workers_to_others():
    system = ElasWave(JOB, ElasWaveConstants())
    split = system.split((4, 4, 0, 4, 4, 4, 4, 4))
    assert split[2] == 0
    assert sum(split) == 32
    assert max(split) == 5


# Odyssey


def test_the_published_estimate_of_the_worked_example_is_36_slots():
    """D=3, S=4, M=6, one dead: 9 slots and 6 * 1/2 more, of a forward and a backward of three units."""
    job = SimulatedJob.of("layers=4,hidden=512,heads=8,sequence=512,vocabulary=1", "a100-80", Shape(3, 4, 6))
    slot = max(stage.forward_us + stage.fused_us for stage in job.profile().stages)
    estimate = rerouting_estimate_us(job, (3, 3, 2, 3)) - finish_us((3, 3, 2, 3), job)
    assert estimate / slot * 3 == pytest.approx(36)
    # Four dead, one in each stage: the estimate adds up what happens at the same time.
    four = rerouting_estimate_us(job, (2, 2, 2, 2)) - finish_us((2, 2, 2, 2), job)
    assert four / slot * 3 == pytest.approx(27 + 4 * 9)


def test_a_rerouted_step_takes_the_most_loaded_stage_and_never_longer_than_the_estimate():
    stage = JOB.profile().stages[3]
    slot = stage.forward_us + stage.fused_us
    # 128 micro-batches on three workers are 43 on the busiest, and one slot for each of the seven other stages.
    after_us = travel_us() + finish_us((4, 4, 3, 4, 4, 4, 4, 4))
    assert rerouted_us(JOB, (4, 4, 3, 4, 4, 4, 4, 4)) == pytest.approx((43 + 7) * slot + after_us, rel=0.001)
    for counts in ((4, 4, 3, 4, 4, 4, 4, 4), (3, 3, 3, 4, 4, 4, 4, 4), (2, 4, 3, 4, 4, 1, 4, 4)):
        assert rerouted_us(JOB, counts) <= rerouting_estimate_us(JOB, counts) * 1.02  # which has no messages


def test_odyssey_takes_the_way_that_is_worth_most_until_the_next_failure():
    quick, lasting = Way("quick", 10.0, 10.0, 0), Way("lasting", 8.0, 8.0, 100 * SECOND)
    assert max((quick, lasting), key=lambda way: way.worth(400 * SECOND)) is quick  # 1/10 beside 1/8 * 3/4
    assert max((quick, lasting), key=lambda way: way.worth(600 * SECOND)) is lasting  # 1/8 * 5/6


def test_odyssey_is_at_least_as_fast_as_re_routing_by_its_own_estimate():
    system, rerouting = Odyssey(JOB, OdysseyConstants(), DAY), OdysseyRerouting(JOB, OdysseyConstants())
    dead = [Worker(1, 2), Worker(0, 4), Worker(3, 6)]
    for number in range(4):
        one, other = (each.begin(members(*dead[:number])).steady_state for each in (system, rerouting))
        assert one.samples_per_s >= other.samples_per_s


def test_odyssey_goes_on_without_a_stage():
    workers = [Worker(pipeline, 2) for pipeline in range(4)]
    assert not Odyssey(JOB, OdysseyConstants(), DAY).begin(members(*workers)).steady_state.is_down
    assert OdysseyRerouting(JOB, OdysseyConstants()).begin(members(*workers)).steady_state.is_down


# ResiHP


def test_resihp_takes_the_bound_of_whole_layers_and_plans_come_close_to_it():
    system = ResiHP(JOB, ResiHPConstants())
    speeds = ((1.0,) * 4, (1.0,) * 4, (1.0,) * 3, *(((1.0,) * 4,) * 5))
    split = system.split(speeds)
    dead = frozenset({Worker(3, 2)})
    problem = replace(JOB.problem_of(JOB.profile_of(split)), cluster=Cluster(JOB.shape, dead))
    timing = system.timing(split, speeds)
    assert timing.period_us == lower_bound(problem)
    plan = solve(problem, "greedy", 60, 1_500_000)
    assert timing.period_us <= plan.period_us <= timing.period_us * 1.02


def test_resihp_loses_what_one_layer_more_costs():
    assert kept(ResiHP(JOB, ResiHPConstants()), Worker(1, 2)) == pytest.approx(4 / 5, rel=0.02)


def test_resihp_keeps_half_of_a_worker_that_lost_one_gpu():
    """Of 8 GPUs 4 go on: the stage has 3.5 of 4 workers' speed."""
    job = SimulatedJob.of(MODEL, "a100-80", Shape(4, 8, 32), tensor_parallel=8)
    whole, partly = (ResiHP(job, ResiHPConstants(gpu_failures=value)) for value in (False, True))
    assert partly._speeds(members(Worker(1, 2), job=job), ())[2] == (0.5, 1.0, 1.0, 1.0)
    assert kept(whole, Worker(1, 2), job=job) < kept(partly, Worker(1, 2), job=job) < 1


def test_resihp_waits_for_a_slow_worker_until_it_is_sure_and_then_repartitions():
    system = ResiHP(JOB, ResiHPConstants())
    first = system.begin(members())
    step = first.steady_state
    slow = members(slow=[(Worker(1, 2), 0.5)])
    waiting = system.change(MembershipChange(60 * SECOND, slow, kind=ChangeKind.SPEEDS), first.state)
    assert waiting.steady_state.step_us == round(step.step_us * (1 + step.busy_share))
    assert waiting.review_us == 10 * waiting.steady_state.step_us
    after = system.change(MembershipChange(90 * SECOND, slow, kind=ChangeKind.REVIEW), waiting.state)
    # A stage with 3.5 of 4: 3 layers there, 5 at another, or all stay and it takes 8/7.
    assert after.steady_state.step_us == pytest.approx(step.step_us * 8 / 7, rel=0.02)
    assert [pause.cause for pause in after.pauses] == ["regroup", "plan"]


def test_resihp_ignores_a_worker_that_is_slower_by_less_than_a_quarter():
    system = ResiHP(JOB, ResiHPConstants())
    first = system.begin(members())
    slow = members(slow=[(Worker(1, 2), 0.9)])
    assert system.change(MembershipChange(60 * SECOND, slow, kind=ChangeKind.SPEEDS), first.state).review_us == 0
