"""Plans replayed for several iterations: exactly as written if legal, late if not, and every microsecond accounted for."""

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

import recycle
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.core.events.record import OpRan
from recycle.core.op import Op
from recycle.core.plans.plan import Plan
from recycle.core.problem import Memory, Problem
from recycle.core.profile import Link, Profile, StageProfile
from recycle.sim.replay.replay import Conditions, replay
from recycle.sim.replay.replay_result import ReplayResult
from recycle.sim.replay.time_shares import memory_curve, peak_memory, stage_intervals_us, time_shares
from tests.builders import make_plan, make_problem, moved, plan_of, timed_of, without
from tests.planner.strategies import problems
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan
from tests.random_plans import legal_plans
from tests.slow_check import broken_rules, peak_held

QUICK = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
Ran = dict[tuple[int, str, str], tuple[int, int]]


def ran(result: ReplayResult) -> Ran:
    """When each op, reduction and step ran, by iteration, worker and name."""
    return {(event.iteration, event.worker, event.op): (event.start_us, event.end_us) for event in result.events()}


def lateness_us(plan: Plan, result: ReplayResult) -> int:
    """How much later than planned the worst op starts."""
    times = ran(result)
    return max(
        times[iteration, str(slot.worker), str(slot.op)][0] - slot.start_us - iteration * plan.period_us
        for iteration in range(result.num_iterations)
        for slot in plan.all_slots()
    )


def assert_exact(plan: Plan) -> None:
    result = replay(plan, Conditions(3))
    assert result.periods_us == [plan.period_us] * 3
    assert result.steady_period_us == plan.period_us
    times = ran(result)
    for iteration in range(3):
        for slot in plan.all_slots():
            shift = iteration * plan.period_us
            assert times[iteration, str(slot.worker), str(slot.op)] == (slot.start_us + shift, slot.end_us + shift)


@QUICK
@given(plan=legal_plans())
def test_a_legal_plan_is_replayed_exactly_as_it_is_written(plan: Plan) -> None:
    assert_exact(plan)


@settings(QUICK, max_examples=40)
@given(problem=problems())
def test_what_the_planner_makes_is_replayed_exactly_as_it_is_written(problem: Problem) -> None:
    assert_exact(recycle.solve(problem, "greedy", 0.5, 20_000))


@QUICK
@given(plan=legal_plans())
def test_eager_iterations_never_take_longer_than_planned(plan: Plan) -> None:
    result = replay(plan, Conditions(4, eager=True))
    event("shorter" if result.steady_period_us < plan.period_us else "as planned")
    assert max(result.periods_us) <= plan.period_us
    assert lateness_us(plan, result) <= 0


def test_an_eager_replay_leaves_out_idle_time_that_nothing_asks_for() -> None:
    problem = make_problem(1, 1, 2, techniques="none")
    plan = make_plan(problem, {"W0_0": "0:0F0 3:0B0 7:0F1 8:0B1"})
    assert plan.period_us == 10
    assert replay(plan, Conditions(3, eager=True)).periods_us == [6, 6, 6]


def test_a_stage_reduces_steps_and_starts_its_next_iteration_alone_when_staggered() -> None:
    """F 1, B 2, a message 3; two peers reduce in 4 and step in 5: stage 0 is busy from 0 to 20, stage 1 from 4 to 16."""
    stage = StageProfile(1, 1, 1, fused_us=2, optimizer_us=5, gradient_bytes=4)
    profile = Profile((stage, stage), Link(3), Link(0, 1.0))
    problem = make_problem(2, 2, 1)
    plan = make_plan(
        replace(problem, profile=profile),
        {"W0_0": "0:0F0 10:0B0", "W0_1": "4:1F0 5:1B0", "W1_0": "0:0F0 10:0B0", "W1_1": "4:1F0 5:1B0"},
    )
    assert plan.period_us == 21
    times = ran(replay(plan, Conditions(2, eager=True)))
    assert times[0, "W0_1", "1B0@0"] == (5, 7)
    assert times[0, "W1_1", "reduce"] == (7, 11)
    assert times[0, "W1_1", "optimizer"] == (11, 16)
    assert times[0, "W0_0", "0B0@0"] == (10, 12)
    assert times[0, "W0_0", "reduce"] == (12, 16)
    assert times[0, "W0_0", "optimizer"] == (16, 21)
    assert times[1, "W1_0", "0F0@1"] == (21, 22)
    assert times[1, "W1_1", "1F0@1"] == (25, 26)


def test_synchronous_stages_step_together_and_start_again_after_the_longest_step() -> None:
    """Stage 1 ends its gradients at 4, stage 0 at 6; both step from 6, for 1 and for 7."""
    stages = tuple(StageProfile(1, 1, 1, fused_us=2, optimizer_us=step) for step in (1, 7))
    problem = replace(make_problem(1, 2, 1, techniques="none"), profile=Profile(stages))
    plan = make_plan(problem, {"W0_0": "0:0F0 4:0B0", "W0_1": "1:1F0 2:1B0"})
    times = ran(replay(plan, Conditions(2, eager=True)))
    assert times[0, "W0_0", "optimizer"] == (6, 7)
    assert times[0, "W0_1", "optimizer"] == (6, 13)
    assert times[1, "W0_0", "0F0@0"] == (13, 14)
    assert plan.period_us == 13


@st.composite
def broken_plans(draw: st.DrawFn) -> Plan:
    """A legal plan of which one op was moved to where it, or one that waits for it, cannot be in time."""
    plan = draw(legal_plans())
    slot = draw(st.sampled_from(list(plan.all_slots())))
    broken = moved(plan, str(slot.op), draw(st.integers(0, plan.period_us)))
    assume(broken_rules(broken) & {"order", "one op at a time"})
    return broken


@QUICK
@given(plan=broken_plans())
def test_a_plan_that_asks_for_too_much_is_late(plan: Plan) -> None:
    assert lateness_us(plan, replay(plan, Conditions(2))) > 0


@QUICK
@given(plan=legal_plans(), less=st.integers(1, 5))
def test_a_plan_that_claims_too_short_a_period_is_late_in_the_second_iteration(plan: Plan, less: int) -> None:
    assume(plan.period_us > less)
    claimed = replace(plan, period_us=plan.period_us - less)
    result = replay(claimed, Conditions(2))
    assert lateness_us(claimed, result) > 0
    assert lateness_us(claimed, replay(claimed, Conditions(1))) == 0


def test_a_plan_whose_rows_wait_for_each_other_is_refused_in_a_sentence() -> None:
    problem = make_problem(1, 2, 2, techniques="none")
    plan = make_plan(problem, {"W0_0": "0:0F0 1:0B0 3:0F1 4:0B1", "W0_1": "0:1F1 1:1B1 3:1F0 4:1B0"})
    with pytest.raises(UserError, match="W0_0 waits for ever to start 0B0@0, because rows wait for each other; recycle check"):
        replay(plan)


def test_a_plan_that_lacks_an_op_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="0B0@0 waits for 0F0@0, which nobody runs; recycle check"):
        replay(without(make_1f1b_plan(1, 2, 2), "0F0@0"))


def test_a_plan_with_an_op_twice_or_in_the_wrong_row_is_refused_in_a_sentence() -> None:
    timed = timed_of(make_1f1b_plan(2, 1, 1))
    stray = (9, Op.parse("0F0@0"))
    doubled = {**timed, Worker(1, 0): [*timed[Worker(1, 0)], stray]}
    with pytest.raises(UserError, match="0F0@0 is there twice"):
        replay(plan_of(make_problem(2, 1, 1), doubled))
    elsewhere = {**doubled, Worker(0, 0): timed[Worker(0, 0)][1:]}
    with pytest.raises(UserError, match="0B0@0 needs 0F0@0 before it in the same row"):
        replay(plan_of(make_problem(2, 1, 1), elsewhere))


def test_jitter_depends_on_the_seed_and_on_nothing_else() -> None:
    plan = make_1f1b_plan(profile=costly_profile(4))
    first, again, other = (replay(plan, Conditions(3, jitter=0.05, seed=seed)) for seed in (1, 1, 2))
    assert list(first.events()) == list(again.events())
    assert list(first.events()) != list(other.events())


def test_an_op_takes_the_same_time_whatever_happens_around_it() -> None:
    """Paced or eager, with few or many iterations, beside slow workers: the order of events has no say."""
    plan = make_1f1b_plan(profile=costly_profile(4))
    slow = {Worker(1, 2): 3.0}
    runs = [
        replay(plan, Conditions(num, jitter=0.2, eager=eager, slow=slow)) for num, eager in ((2, False), (2, True), (4, True))
    ]
    lengths = [{key: end - start for key, (start, end) in ran(result).items() if key[0] < 2} for result in runs]
    assert lengths[0] == lengths[1] == lengths[2]


def test_jitter_has_the_deviation_that_was_asked_for_and_no_more_than_three_of_them() -> None:
    plan = make_1f1b_plan(8, 4, 32, Profile.uniform(4, 100_000, 100_000, 100_000))
    factors = [
        (event.end_us - event.start_us) / (100_000 if "F" in event.op else 200_000)
        for event in replay(plan, Conditions(5, jitter=0.05)).events()
    ]
    assert np.mean(factors) == pytest.approx(1, abs=0.002)
    assert np.std(factors) == pytest.approx(0.05, rel=0.03)
    assert 0.85 <= min(factors) < 0.86
    assert 1.14 < max(factors) <= 1.15


def test_an_op_takes_at_least_a_microsecond() -> None:
    result = replay(make_1f1b_plan(), Conditions(5, jitter=1.0))
    assert min(event.end_us - event.start_us for event in result.events()) == 1


def test_a_slow_worker_takes_its_factor_longer_and_delays_the_others() -> None:
    plan = make_1f1b_plan(profile=costly_profile(4))
    result = replay(plan, Conditions(3, slow={Worker(0, 1): 1.5}))
    times = ran(result)
    assert times[0, "W0_1", "1F0@0"] == (6240, 6240 + 9300)
    assert {end - start for (_, worker, op), (start, end) in times.items() if worker == "W1_1" and "F" in op} == {6200}
    assert result.periods_us[0] > plan.period_us


def contended(latency_us: int) -> Plan:
    """Two micro-batches, F takes 1, and each message holds its link for 10."""
    stage = StageProfile(1, 1, 1, fused_us=2, output_bytes=10)
    problem = replace(make_problem(1, 2, 2, techniques="none"), profile=Profile((stage, stage), Link(latency_us, 1.0)))
    return make_plan(problem, {"W0_0": "0:0F0 1:0F1 50:0B0 60:0B1", "W0_1": "20:1F0 21:1F1 22:1B0 24:1B1"})


@pytest.mark.parametrize("latency_us", [0, 5])
def test_messages_on_a_link_go_one_after_another_and_their_latency_overlaps(latency_us: int) -> None:
    plan = contended(latency_us)
    free, shared = (ran(replay(plan, Conditions(1, eager=True, contention=on))) for on in (False, True))
    assert free[0, "W0_1", "1F1@0"][0] == max(12 + latency_us, 21)
    # The first leaves at 1; the second follows it at 11 and holds the link until 21.
    assert shared[0, "W0_1", "1F1@0"][0] == 21 + latency_us
    assert shared[0, "W0_1", "1F0@0"] == free[0, "W0_1", "1F0@0"]


def test_a_message_waits_for_the_link_into_its_receiver_too() -> None:
    """W0_1 is alone at its stage: what both of its neighbours send at 1 comes one after another."""
    stage = StageProfile(1, 1, 1, fused_us=2, output_bytes=10)
    problem = replace(make_problem(2, 2, 1, failed=["W1_1"]), profile=Profile((stage, stage)))
    plan = make_plan(
        problem, {"W0_0": "0:0F0 40:0B0", "W0_1": "11:1F0 12:1F0@1 20:1B0 22:1B0@1", "W1_0": "0:0F0 40:0B0"}, period_us=42
    )
    times = ran(replay(plan, Conditions(1, contention=True)))
    assert times[0, "W0_1", "1F0@0"][0] == 11
    assert times[0, "W0_1", "1F0@1"][0] == 21
    # Of two ops that end at the same time, the one of the earlier row is handled first.
    reordered = ran(replay(replace(plan, rows=plan.rows[::-1]), Conditions(1, contention=True)))
    assert reordered[0, "W0_1", "1F0@0"][0] == 21


@QUICK
@given(plan=legal_plans())
def test_contention_only_ever_delays(plan: Plan) -> None:
    shared, free = (replay(plan, Conditions(2, contention=on)) for on in (True, False))
    assert all(late >= early for late, early in zip(shared.completions_us, free.completions_us, strict=True))


@QUICK
@given(plan=legal_plans(), jitter=st.sampled_from([0.0, 0.3]), eager=st.booleans(), num=st.integers(1, 4))
def test_every_microsecond_of_a_worker_is_busy_or_bubble_or_reduction_or_step(
    plan: Plan, jitter: float, eager: bool, num: int
) -> None:
    result = replay(plan, Conditions(num, jitter=jitter, eager=eager))
    windows = stage_intervals_us(result)
    spans = defaultdict(list)
    for ran_op in result.events():
        spans[ran_op.worker].append(ran_op)
    for share in time_shares(result):
        first, last = int(windows[0, share.worker.stage, 0]), int(windows[-1, share.worker.stage, 1])
        sums = _by_counting(spans[str(share.worker)], first, last)
        assert (share.busy_us, share.reduce_us, share.optimizer_us, share.bubble_us) == sums
        assert share.span_us == last - first


def _by_counting(events: list[OpRan], first_us: int, last_us: int) -> tuple[int, int, int, int]:
    """Busy, reduction, step and idle time, by painting every microsecond once."""
    paint = ["idle"] * (last_us - first_us)
    for ran_op in events:
        for time in range(ran_op.start_us, ran_op.end_us):
            assert paint[time - first_us] == "idle"
            paint[time - first_us] = ran_op.op if ran_op.op in ("reduce", "optimizer") else "busy"
    return paint.count("busy"), paint.count("reduce"), paint.count("optimizer"), paint.count("idle")


def test_the_bubbles_of_classic_1f1b_are_a_third_of_27_slots() -> None:
    assert {Fraction(share.bubble_us, share.span_us) for share in time_shares(replay(make_1f1b_plan()))} == {Fraction(1, 3)}


@QUICK
@given(plan=legal_plans())
def test_the_peak_of_memory_is_what_the_fullest_worker_of_a_stage_holds(plan: Plan) -> None:
    unit, peaks = peak_memory(replay(plan, Conditions(2)))
    assert unit == "bytes"
    for stage, peak in enumerate(peaks):
        workers = [worker for worker in plan.problem.cluster.live_workers() if worker.stage == stage]
        assert peak == max(peak_held(plan, worker, "bytes") for worker in workers)


def test_without_bytes_in_the_profile_memory_is_counted_in_micro_batches() -> None:
    assert peak_memory(replay(make_1f1b_plan())) == ("microbatches", [4, 3, 2, 1])
    limited = make_1f1b_plan()
    limited = replace(limited, problem=replace(limited.problem, memory=Memory.microbatches([6] * 4)))
    assert peak_memory(replay(limited)) == ("microbatches", [4, 3, 2, 1])


def test_the_curve_of_memory_rises_with_forwards_and_falls_with_backwards() -> None:
    """One worker: F0 F1 B0 B1, with B twice as long: one, two, and from the end of B0 one again."""
    plan = make_plan(make_problem(1, 1, 2, techniques="none"), {"W0_0": "0:0F0 1:0F1 2:0B0 4:0B1"})
    assert memory_curve(replay(plan, Conditions(1)), 0, 0, num_columns=6) == [1, 2, 2, 2, 2, 1]


def test_the_record_names_every_op_reduction_and_step_once_an_iteration() -> None:
    plan = make_rerouted_plan(profile=costly_profile(2))
    names = [(event.iteration, event.worker, event.op) for event in replay(plan, Conditions(2)).events()]
    assert len(set(names)) == len(names) == 2 * (24 + 3 + 2)  # a stage of one worker has nobody to reduce with
    assert (1, "W0_1", "1F1@1") in names
    assert (0, "W1_0", "reduce") in names
    assert (0, "W0_1", "reduce") not in names


def test_a_replay_result_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        replay(make_1f1b_plan()).starts_us[0, 0] = 7


def test_progress_counts_every_op() -> None:
    counts: list[int] = []
    replay(make_1f1b_plan(), Conditions(3), counts.append)
    assert sum(counts) == 3 * 144


@pytest.mark.parametrize(
    ("conditions", "sentence"),
    [
        ({"num_iterations": 0}, "0 iterations cannot be replayed: give from 1 to 1000"),
        ({"num_iterations": 1001}, "1001 iterations cannot be replayed"),
        ({"jitter": -0.01}, "a jitter of -1% cannot be replayed: give from 0% to 100%"),
        ({"jitter": 1.01}, "a jitter of 101% cannot be replayed"),
        ({"jitter": float("nan")}, "a jitter of nan% cannot be replayed"),
        ({"slow": {Worker(0, 0): 0.0}}, "W0_0 cannot take 0 times as long: give a factor above 0, up to 1000"),
        ({"slow": {Worker(0, 0): 1e9}}, r"W0_0 cannot take 1e\+09 times as long"),
        ({"slow": {Worker(7, 0): 2.0}}, "W7_0 is not a worker of this plan: pipelines are 0 to 1, stages 0 to 1"),
        ({"slow": {Worker(1, 1): 2.0}}, "W1_1 is dead in this plan"),
        ({"seed": -1}, "the seed is -1"),
    ],
)
def test_conditions_that_cannot_be_replayed_are_refused_in_a_sentence(conditions: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        replay(make_rerouted_plan(), Conditions(**conditions))  # type: ignore[arg-type]


def test_more_ops_than_anyone_waits_for_are_refused_with_what_is_possible() -> None:
    plan = make_1f1b_plan(16, 8, 100)
    with pytest.raises(UserError, match=r"1000 iterations of 25600 ops are more than can be replayed.*at most --iterations 781"):
        replay(plan, Conditions(1000))


def test_times_beyond_64_bits_are_refused_in_a_sentence() -> None:
    plan = make_1f1b_plan(1, 1, 2, Profile.uniform(1, 10**14, 10**14, 10**14))
    with pytest.raises(UserError, match="exceed 64 bits"):
        replay(plan, Conditions(20, slow={Worker(0, 0): 1000.0}))


@pytest.mark.parametrize("factor", [1.04, 1.3, 1.45])
def test_a_slow_worker_is_slower_by_its_factor_even_where_ops_take_a_microsecond(factor: float) -> None:
    plan = recycle.solve(recycle.problem(1, 1, 40, costs=(1, 1, 1)))
    slowed = replay(plan, Conditions(num_iterations=4, slow={Worker(0, 0): factor}))
    assert slowed.steady_period_us == pytest.approx(plan.period_us * factor, abs=1)
