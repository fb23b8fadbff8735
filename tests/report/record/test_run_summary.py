"""Numbers of a run, on records small enough to count by hand."""

from collections.abc import Iterable, Iterator

import pytest
from msgspec.structs import replace

from recycle.core.cluster import Worker
from recycle.core.errors import ForeignPlan, UserError
from recycle.core.events.record import Event, Held, OpRan, Saved, Spell, Started, Stepped, Warned
from recycle.core.plans.plan import Plan
from recycle.core.time_shares import bubble_share
from recycle.report.record.executed_iterations import Executed, planned_shares
from recycle.report.record.run_columns import read_run_record
from recycle.report.record.run_summary import Summary, Times, fullest_by_stage, memory_ratio
from recycle.sim.replay.replay import Conditions, replay
from tests.builders import make_plan, make_problem
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan, make_split_plan
from tests.run_records import Training, training_record

PLANS = {
    "1f1b": make_1f1b_plan(),
    "split": make_split_plan(),
    "rerouted": make_rerouted_plan(),
    "costly": make_rerouted_plan(profile=costly_profile(2)),
    "costly synchronous": make_1f1b_plan(profile=costly_profile(4)),
}


def two_stages(techniques: str = "adaptive,decoupled,staggered") -> Plan:
    """F takes 10 and B takes 20: W0_0 waits from 10 to 40. The period is 60, and either worker computes for 30 of it."""
    problem = make_problem(1, 2, 1, costs=(10, 10, 10), techniques=techniques)
    return make_plan(problem, {"W0_0": "0:0F0 40:0B0", "W0_1": "10:1F0 20:1B0"})


def ops(*texts: str) -> list[OpRan]:
    """Ops from texts such as `1 W0_0 0F0@0 1000 1020`, in vain if an exclamation mark follows."""
    made = []
    for text in texts:
        iteration, worker, op, start, end, *in_vain = text.split()
        made.append(OpRan(int(iteration), worker, op, int(start), int(end), bool(in_vain)))
    return made


def late_run() -> list[OpRan]:
    """Three iterations of `two_stages`. The first is a mess; in the others ops take twice as long, and all take 150, not 120."""
    first = ops("0 W0_0 0F0@0 500 800", "0 W0_1 1F0@0 800 810", "0 W0_1 1B0@0 810 830", "0 W0_0 0B0@0 830 970")
    second = ops("1 W0_0 0F0@0 1000 1020", "1 W0_1 1F0@0 1020 1040", "1 W0_1 1B0@0 1040 1080", "1 W0_0 0B0@0 1080 1120")
    return first + second + [replace(op, iteration=2, start_us=op.start_us + 150, end_us=op.end_us + 150) for op in second]


def executed(plan: Plan, events: Iterable[Event]) -> Executed:
    return Executed(plan, read_run_record(events).ops)


def summary(plan: Plan, events: Iterable[Event]) -> Summary:
    return Summary(read_run_record(events), plan)


def test_an_iteration_takes_the_time_between_the_ends_of_two() -> None:
    found = executed(two_stages(), late_run())
    assert found.times_us == {1: 150, 2: 150}
    assert found.length_us(1) == 1120 - 970
    assert found.whole == (0, 1, 2)


def test_the_plan_promises_its_period_at_the_speed_of_the_ops() -> None:
    known = summary(two_stages(), late_run())
    assert known.plan.period_us == 60
    assert known.executed.slowdown() == 2
    assert known.executed.promised_us == 120
    assert known.over_promise == 150 / 120
    assert known.slowdowns == {"F": 2, "B": 2}


def test_one_iteration_that_was_held_up_does_not_change_what_the_plan_promises() -> None:
    undisturbed = [
        replace(op, iteration=op.iteration + 2, start_us=op.start_us + 300, end_us=op.end_us + 300) for op in late_run()[4:]
    ]
    stuck = [replace(op, end_us=op.end_us + 9000) if op.op == "0B0@0" and op.iteration == 4 else op for op in undisturbed]
    found = executed(two_stages(), late_run() + stuck)
    assert found.whole == (0, 1, 2, 3, 4)
    assert found.slowdown() == 2


def test_the_bubble_is_what_is_left_of_the_time_between_two_starts() -> None:
    """Iteration 1 has 150 at either stage, of which either worker computes for 60; iteration 2 has no next one to end it."""
    found = executed(two_stages(), late_run())
    assert found.windows(1) == ((1000, 1150), (1020, 1170))
    assert [(share.span_us, share.busy_us, share.bubble_us) for share in found.shares] == [(150, 60, 90), (150, 60, 90)]
    assert bubble_share(found.shares) == 0.6
    assert bubble_share(planned_shares(two_stages())) == 0.5


def test_stages_of_a_synchronous_plan_start_together() -> None:
    found = executed(two_stages("none"), late_run())
    assert found.windows(1) == ((1000, 1150), (1000, 1150))
    assert found.windows(2) == ((1150, 1270), (1150, 1270))  # nothing follows it, so it ends with its last op


def test_the_last_iteration_lasts_as_long_as_its_longest_stage() -> None:
    assert executed(two_stages(), late_run()).windows(2) == ((1150, 1270), (1170, 1290))


def test_of_a_single_iteration_all_is_told_that_it_shows() -> None:
    found = executed(two_stages(), late_run()[4:8])
    assert found.times_us == {1: 120}
    assert found.middle == 1
    assert bubble_share(found.shares) == 0.5  # 60 of 120 at either stage


def test_a_pause_is_no_bubble() -> None:
    """Iteration 1 is 1000 longer, because the run was resumed after it; iteration 2 has 150, as in the run without a pause."""
    late = [replace(op, iteration=3, start_us=op.start_us + 300, end_us=op.end_us + 300) for op in late_run()[4:8]]
    moved = [
        replace(op, start_us=op.start_us + 1000, end_us=op.end_us + 1000) if op.iteration > 1 else op for op in late_run() + late
    ]
    pause = Spell(1125, 2125, "pause", "start")
    assert summary(two_stages(), [*moved, pause]).bubble == 0.6
    assert summary(two_stages(), moved).bubble > 0.7


def peers(iteration: int, at_us: int) -> list[OpRan]:
    """W0_0 computes for 30 and waits 30 for its peer, which computes for 60; they reduce for 10 and step for 10, of 100."""
    texts = ["W0_0 0F0@0 0 10", "W0_0 0B0@0 10 30", "W0_0 reduce 30 70", "W0_0 optimizer 70 80"]
    texts += ["W1_0 0F0@1 0 20", "W1_0 0B0@1 20 60", "W1_0 reduce 60 70", "W1_0 optimizer 70 80"]
    return [
        replace(op, start_us=op.start_us + at_us, end_us=op.end_us + at_us) for op in ops(*(f"{iteration} {t}" for t in texts))
    ]


def one_stage() -> Plan:
    return make_plan(make_problem(2, 1, 1, costs=(10, 10, 10)), {"W0_0": "0:0F0 10:0B0", "W1_0": "0:0F0 10:0B0"})


def test_waiting_for_a_peer_is_bubble_and_no_part_of_a_reduction() -> None:
    found = executed(one_stage(), [op for number in range(3) for op in peers(number, 100 * number)])
    first, second = found.shares
    assert (first.busy_us, first.reduce_us, first.optimizer_us, first.bubble_us) == (30, 10, 10, 50)
    assert (second.busy_us, second.reduce_us, second.optimizer_us, second.bubble_us) == (60, 10, 10, 20)
    assert bubble_share(found.shares) == 70 / 200


def test_ops_in_vain_are_neither_busy_time_nor_bubble() -> None:
    """W0_0 had begun iteration 2, from 180 to 195, when the step of iteration 1 was taken back."""
    record = [op for number in range(3) for op in peers(number, 100 * number)]
    found = executed(one_stage(), [*record, *ops("2 W0_0 0F0@0 180 195 !")])
    assert [(share.busy_us, share.in_vain_us, share.bubble_us) for share in found.shares] == [(30, 15, 35), (60, 0, 20)]
    assert found.taken_back == (1,)
    assert (found.num_in_vain, found.in_vain_us) == (1, 15)
    assert found.windows(1) == ((100, 200),)
    assert found.slowdown() == 90 / 60


def test_an_iteration_in_which_the_run_was_cut_off_is_not_counted() -> None:
    found = executed(two_stages(), late_run()[:-1])
    assert found.whole == (0, 1)
    assert found.times_us == {1: 150}
    assert found.windows(1) == ((1000, 1150), (1020, 1170))  # the one that was cut off had begun at both stages
    assert executed(two_stages(), late_run()[:9]).windows(1) == ((1000, 1120), (1020, 1140))  # here at one only
    with pytest.raises(UserError, match="iteration 2 is not whole in the record: the run was cut off in it; whole are 0 to 1"):
        found.windows(2)
    with pytest.raises(UserError, match="iteration 7 is not in the record; whole are 0 to 1"):
        found.windows(7)


def test_what_follows_an_iteration_that_is_not_whole_has_no_time_to_be_counted() -> None:
    shifted = [replace(op, iteration=3, start_us=op.start_us + 300, end_us=op.end_us + 300) for op in late_run()[4:8]]
    found = executed(two_stages(), [op for op in [*late_run(), *shifted] if (op.iteration, op.op) != (1, "1B0@0")])
    assert found.whole == (0, 2, 3)
    assert found.times_us == {3: 150}


def steady(lengths_us: list[int]) -> Iterator[OpRan]:
    """Iterations of `two_stages` that end so long after each other; W0_0 waits as long as that asks for."""
    end = 0
    for number, length in enumerate(lengths_us):
        begin, end = end, end + length
        times = ("0F0@0", "W0_0", begin, begin + 10), ("1F0@0", "W0_1", begin + 10, begin + 20)
        times += ("1B0@0", "W0_1", begin + 20, begin + 40), ("0B0@0", "W0_0", end - 20, end)
        yield from (OpRan(number, worker, op, start, stop) for op, worker, start, stop in times)


def test_the_iteration_to_look_at_is_of_median_length_and_has_neighbours() -> None:
    assert executed(two_stages(), steady([500, 90, 70, 80, 75, 60, 10])).middle == 4  # of 90, 70, 80, 75 and 60
    assert executed(two_stages(), steady([80] * 9)).middle == 4
    assert executed(two_stages(), steady([80, 70])).middle == 0
    assert executed(two_stages(), steady([300, 70, 80, 70, 300])).middle == 1


def test_percentiles_are_of_all_times() -> None:
    assert Times.of(list(range(0, 1010, 10))) == Times(101, 100, 500, 900)
    assert Times.of([7]) == Times(1, 7, 7, 7)


STEPS = [
    Started("train", "a small GPT"),
    *late_run(),
    Spell(0, 500, "pause", "start", num_live=2),
    Spell(500, 970, "train", samples=4, busy_us=235, num_live=2),
    Spell(970, 1120, "train", samples=6, busy_us=60, num_live=2),
    Spell(1120, 1270, "train", samples=3, busy_us=60, num_live=2),
    Stepped(0, 970, 5.5, 3.0, 0.5),
    Stepped(1, 1120, None, None, None),
    Stepped(2, 1270, 4.25, 0.5, 1.0),
    Held("W0_1", 300, 30, 40),
    Held("W0_0", 200, 60, 40),
    Held("W0_0", 100, 80, 40),
    Saved(1270, 3, "step-3", 77),
    Warned(1270, "it was warm"),
]


def test_steps_are_told_apart_by_their_scale() -> None:
    known = summary(two_stages(), STEPS)
    assert known.losses == [(0, 5.5), (1, None), (2, 4.25)]
    assert known.clipped == [0]
    assert known.skipped == [1]
    assert known.missing == []


def test_the_speed_is_the_median_of_all_iterations_but_the_first() -> None:
    known = summary(two_stages(), STEPS)
    assert known.samples_per_s == pytest.approx((6 / 150 + 3 / 150) / 2 * 1e6)
    assert (known.times.num, known.times.median_us) == (2, 150)


def test_of_each_worker_the_most_is_kept_in_order() -> None:
    assert read_run_record(STEPS).held == (Held("W0_0", 200, 80, 40), Held("W0_1", 300, 30, 40))
    assert memory_ratio(Held("W0_0", 200, 80, 40)) == 2
    assert memory_ratio(Held("W0_0", 200, 80, 0)) is None


def test_the_fullest_worker_speaks_for_its_stage() -> None:
    held = (Held("W0_0", 1, 5, 1), Held("W0_10", 1, 3, 1), Held("W0_2", 1, 2, 1), Held("W1_0", 1, 9, 1))
    assert [one.worker for one in fullest_by_stage(held)] == ["W1_0", "W0_2", "W0_10"]


def test_the_facts_say_all_of_it() -> None:
    facts = summary(two_stages(), STEPS).to_json()
    assert facts["steps"] == {
        "count": 3,
        "first_loss": 5.5,
        "last_loss": 4.25,
        "skipped": [1],
        "clipped": [0],
        "taken_back": [],
    }
    assert facts["losses"] == [5.5, None, 4.25]
    assert facts["iteration_us"] == {"median": 150, "p10": 150, "p90": 150, "counted": 2}
    assert facts["plan"] == {
        "period_us": 60,
        "slowdown": 2.0,
        "slowdown_by_kind": {"F": 2.0, "B": 2.0},
        "promised_us": 120.0,
        "over_promise": 1.25,
    }
    assert facts["bubble_share"] == {"executed": 0.6, "planned": 0.5, "workers": {"W0_0": 0.6, "W0_1": 0.6}}
    assert facts["memory"][0] == {
        "worker": "W0_0",
        "peak_bytes": 200,
        "activation_bytes": 80,
        "planned_bytes": 40,
        "static_bytes": 0,
        "planned_static_bytes": 0,
        "ratio": 2.0,
    }
    assert facts["checkpoints"] == [{"at_us": 1270, "steps": 3, "folder": "step-3", "size_bytes": 77}]
    assert facts["warnings"] == [{"at_us": 1270, "text": "it was warm"}]
    assert facts["run"]["time_us"]["pause"] == 500
    assert facts["iterations"] == {"first": 0, "last": 2, "whole": 3, "other_plans": 0}
    assert facts["recoveries"] == []
    assert facts["lost_us"]["total"] == 0


def test_what_is_not_in_the_record_is_named() -> None:
    known = summary(two_stages(), [Started("replay", "plan.json"), *late_run()])
    assert known.missing == ["losses", "samples", "memory"]
    assert known.samples_per_s is None
    assert known.times.median_us == 150
    assert known.to_json()["steps"] is None
    assert known.to_json()["run"] is None


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_run_that_goes_by_the_plan_takes_exactly_what_it_promises(plan: Plan) -> None:
    known = summary(plan, replay(plan, Conditions(num_iterations=5)).events())
    assert known.over_promise == 1
    assert known.executed.slowdown() == 1
    assert known.bubble == pytest.approx(known.planned_bubble, abs=1e-12)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_window_begins_with_the_first_op_of_a_stage_and_ends_with_that_of_the_next_iteration(plan: Plan) -> None:
    events = list(replay(plan, Conditions(num_iterations=4, jitter=0.2, eager=True)).events())
    found, stages = executed(plan, events), range(plan.problem.shape.num_stages)
    ran = [[[e for e in events if e.iteration == i and Worker.parse(e.worker).stage == s] for s in stages] for i in range(4)]
    firsts = [[min(e.start_us for e in own) for own in by_stage] for by_stage in ran]
    longest = max(max(e.end_us for e in own) - first for own, first in zip(ran[-1], firsts[-1], strict=True))
    if not plan.problem.techniques.staggered:
        firsts = [[min(own)] * len(own) for own in firsts]
        longest = max(e.end_us for own in ran[-1] for e in own) - firsts[-1][0]
    firsts.append([first + longest for first in firsts[-1]])
    for iteration in range(4):
        assert found.windows(iteration) == tuple(zip(firsts[iteration], firsts[iteration + 1], strict=True))


def test_ops_come_out_of_the_columns_as_they_went_in() -> None:
    plan = make_rerouted_plan(profile=costly_profile(2))
    record = training_record(plan, Training(4, taken_back=(1,)))
    known = [event for event in record if isinstance(event, OpRan)]
    columns = read_run_record(record).ops
    assert len(columns) == len(known)
    assert columns.events(range(4)) == sorted(known, key=lambda op: op.start_us)
    chosen = columns.events([2], {Worker(1, 0)})
    assert chosen == sorted((op for op in known if op.iteration == 2 and op.worker == "W1_0"), key=lambda op: op.start_us)
    assert any(op.is_in_vain for op in chosen)


def test_a_run_with_a_step_taken_back_counts_every_op_of_the_plan_once() -> None:
    plan = make_rerouted_plan(profile=costly_profile(2))
    known = summary(plan, training_record(plan, Training(6, jitter=0.0, taken_back=(2,), clipped=(2,))))
    assert known.executed.whole == (0, 1, 2, 3, 4, 5)
    assert known.executed.taken_back == (2,)
    assert known.executed.slowdown() == 1
    assert known.executed.num_in_vain == 2  # a forward at each of the two workers of the first stage
    assert known.executed.in_vain_us == 2 * 6200


@pytest.mark.parametrize(
    ("events", "kind", "sentence"),
    [
        pytest.param([], UserError, "the record is empty: it holds no op", id="nothing"),
        pytest.param([Started("train", "x")], UserError, "the record is empty", id="only a start"),
        pytest.param(
            ops("0 W1_0 0F0@0 0 1"), ForeignPlan, "W1_0 ran ops in this record, but the plan has no row", id="a stranger"
        ),
        pytest.param(ops("0 W0_0 0I0@0 0 1"), ForeignPlan, "W0_0 ran 0I0@0 in this record, but the plan does not", id="other op"),
        pytest.param(ops("0 W0_0 nothing 0 1"), ForeignPlan, "W0_0 ran nothing in this record", id="no op at all"),
        pytest.param(late_run()[:3], UserError, "no whole iteration: the run was cut off before", id="a beginning"),
        pytest.param(ops("3 W0_0 0F0@0 5 4"), UserError, "W0_0 ended 0F0@0 of iteration 3 before it started", id="backwards"),
        pytest.param(
            [replace(op, end_us=op.start_us) for op in late_run()], UserError, "its ops took no time at all", id="no time at all"
        ),
        pytest.param(
            [OpRan(0, "W0_0", "0F0@0", 0, 2**70)], UserError, "W0_0 ran an op of iteration 0 at no possible", id="too late"
        ),
    ],
)
def test_a_record_that_says_nothing_is_refused_in_a_sentence(events: list[Event], kind: type[UserError], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        summary(two_stages(), events)


def test_a_loss_that_is_no_number_counts_as_not_finite() -> None:
    known = summary(two_stages(), [*late_run(), Stepped(0, 1, float("nan"), 1.0, 1.0), Stepped(1, 2, 3, 1, 1)])
    assert known.losses == [(0, None), (1, 3)]
