"""The path that determines when an iteration is complete."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recycle.core.op import Op
from recycle.core.plans.plan import Plan
from recycle.core.profile import Link, Profile, StageProfile
from recycle.sim.replay.critical_path import critical_path
from recycle.sim.replay.replay import Conditions, replay
from tests.builders import make_plan, make_problem
from tests.plans import make_1f1b_plan
from tests.random_plans import legal_plans

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def two_stages() -> Plan:
    """F 1, B 2, a message 3, no reduction (one pipeline), a step of 5: 0F 1F 1B 0B and the step, and one idle slot before 0B."""
    stage = StageProfile(1, 1, 1, fused_us=2, optimizer_us=5)
    problem = replace(make_problem(1, 2, 1), profile=Profile((stage, stage), Link(3)))
    return make_plan(problem, {"W0_0": "0:0F0 11:0B0", "W0_1": "4:1F0 5:1B0"})


def test_the_path_goes_down_the_stages_and_back_to_the_last_step() -> None:
    path = critical_path(replay(two_stages(), Conditions(3)), 1)
    assert [(segment.kind, segment.start_us - 18, segment.end_us - 18) for segment in path.segments] == [
        ("F", 0, 1),
        ("transfer", 1, 4),
        ("F", 4, 5),
        ("B", 5, 7),
        ("transfer", 7, 10),
        ("wait", 10, 11),
        ("B", 11, 13),
        ("optimizer", 13, 18),
    ]
    assert path.length_us == 18
    assert path.by_kind == {"F": 2, "B": 4, "transfer": 6, "optimizer": 5, "wait": 1}
    assert [str(worker) for worker in path.workers] == ["W0_0", "W0_1"]
    assert [segment.label for segment in path.segments[:2]] == ["0F0@0", "0F0@0 to 1F0@0"]


def test_an_eager_path_has_no_wait_for_a_planned_start() -> None:
    path = critical_path(replay(two_stages(), Conditions(3, eager=True)), 1)
    assert path.by_kind == {"F": 2, "B": 4, "transfer": 6, "optimizer": 5}


def test_a_synchronous_path_ends_with_the_longest_step_after_the_last_reduction() -> None:
    stages = tuple(StageProfile(1, 1, 1, fused_us=2, optimizer_us=step) for step in (1, 7))
    problem = replace(make_problem(1, 2, 1, techniques="none"), profile=Profile(stages))
    plan = make_plan(problem, {"W0_0": "0:0F0 4:0B0", "W0_1": "1:1F0 2:1B0"})
    path = critical_path(replay(plan, Conditions(1)), 0)
    assert [segment.label for segment in path.segments] == ["0F0@0", "1F0@0", "1B0@0", "0B0@0", "step of stage 1"]


def test_the_path_of_classic_1f1b_has_no_bubble() -> None:
    path = critical_path(replay(make_1f1b_plan(), Conditions(2)), 1)
    assert path.length_us == 27
    assert set(path.by_kind) == {"F", "B"}


@QUICK
@given(plan=legal_plans(), jitter=st.sampled_from([0.0, 0.3]), eager=st.booleans(), contention=st.booleans())
def test_legs_follow_each_other_without_a_gap_up_to_the_end_of_the_iteration(
    plan: Plan, jitter: float, eager: bool, contention: bool
) -> None:
    result = replay(plan, Conditions(2, jitter=jitter, eager=eager, contention=contention))
    path = critical_path(result, 1)
    assert all(before.end_us == after.start_us for before, after in pairwise(path.segments))
    assert path.segments[-1].end_us == result.completions_us[1]
    assert sum(path.by_kind.values()) == path.length_us
    assert not (eager and "wait" in path.by_kind)


@QUICK
@given(plan=legal_plans(), jitter=st.sampled_from([0.0, 0.3]))
def test_every_op_on_the_path_ran_then_and_shares_its_worker_or_its_micro_batch_with_the_next(plan: Plan, jitter: float) -> None:
    result = replay(plan, Conditions(2, jitter=jitter))
    ran = {(event.worker, event.op): (event.start_us, event.end_us) for event in result.events([1])}
    ops = [segment for segment in critical_path(result, 1).segments if segment.worker is not None]
    for segment in ops:
        assert ran[str(segment.worker), segment.label] == (segment.start_us, segment.end_us)
    for before, after in pairwise(ops):
        assert before.worker == after.worker or Op.parse(before.label).microbatch == Op.parse(after.label).microbatch
