"""Windows, what follows the last gradient, merging."""

from dataclasses import replace

import pytest

from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from recycle.report.timeline.plan_timeline import PlanBlocks, headline, idle_share, plan_timeline
from recycle.report.timeline.timeline import Block, axis_ticks, merged
from tests.plans import costly_profile, make_1f1b_plan, make_rerouted_plan, make_split_plan


def test_staggered_windows_are_shifted_by_stage_and_one_period_long() -> None:
    timeline = plan_timeline(make_split_plan())
    assert timeline.windows == ((0, 21), (1, 22), (2, 23), (3, 24))
    assert timeline.extent == (0, 24)


def test_synchronous_windows_are_the_same_at_every_stage() -> None:
    assert set(plan_timeline(make_1f1b_plan()).windows) == {(0, 27)}


def test_each_stage_reduces_after_its_last_gradient_and_steps_at_once_when_staggered() -> None:
    plan = make_rerouted_plan(profile=costly_profile(2))
    reduce, optimizer = PlanBlocks(plan).finish(0)
    last = max(slot.end_us for row in plan.rows if row.worker.stage == 0 for slot in plan.slots(row))
    assert (reduce.look, reduce.start_us, reduce.end_us) == ("reduce", last, last + plan.problem.reduce_us(0))
    assert (optimizer.look, optimizer.start_us, optimizer.end_us) == ("optimizer", reduce.end_us, reduce.end_us + 4000)


def test_a_synchronous_step_waits_for_the_last_stage() -> None:
    plan = make_1f1b_plan(profile=costly_profile(4))
    source = PlanBlocks(plan)
    steps = [source.finish(stage)[1] for stage in range(4)]
    assert {step.start_us for step in steps} == {max(source.finish(stage)[0].end_us for stage in range(4))}
    assert steps[0].end_us == plan_timeline(plan).extent[1]


def test_beside_a_window_lie_the_iterations_before_and_after() -> None:
    timeline = plan_timeline(make_rerouted_plan())
    first, second = timeline.lane(Worker(0, 0)), timeline.lane(Worker(0, 1))
    assert [(b.start_us, b.end_us, b.look) for b in timeline.neighbours(first)] == [(12, 13, "F")]
    assert [(b.start_us, b.end_us, b.look, b.is_rerouted) for b in timeline.neighbours(second)] == [(0, 1, "W", True)]


def test_lanes_without_ops_have_the_same_looks() -> None:
    timeline = plan_timeline(make_rerouted_plan())
    worker = Worker(0, 1)
    bare = timeline.lane(worker, with_ops=False).blocks
    assert bare == tuple(replace(block, op=None) for block in timeline.lane(worker).blocks)


def test_merging_keeps_the_shares_of_looks_and_of_idle_time() -> None:
    """100 rounds of F 1, B 2, idle 1 in 100 columns of 4: no look alone fills a column, and all stay visible."""
    blocks = [
        block for at in range(0, 400, 4) for block in (Block(at, at + 1, "F"), Block(at + 1, at + 3, "B", is_rerouted=True))
    ]
    runs = merged(blocks, (0, 400), 100)
    columns = {look: sum(run.end_us - run.start_us for run in runs if run.look == look) // 4 for look in "FB"}
    assert columns["F"] == pytest.approx(25, abs=1)
    assert columns["B"] == pytest.approx(50, abs=1)
    assert all(run.is_rerouted == (run.look == "B") for run in runs)


def test_merging_joins_equal_neighbours() -> None:
    blocks = [Block(at, at + 1, "F") for at in range(60)] + [Block(80, 90, "F")]
    assert merged(blocks, (0, 100), 10) == [Block(0, 60, "F"), Block(80, 90, "F")]


def test_merging_shows_nothing_where_nothing_runs() -> None:
    runs = merged([Block(50, 60, "W")], (0, 100), 10)
    assert runs == [Block(50, 60, "W")]


def test_the_headline_names_failures_period_bound_and_idle_time() -> None:
    about, rating = headline(make_rerouted_plan())
    assert about == ("2 pipelines × 2 stages", "2 micro-batches each", "W1_1 dead")
    assert rating[:3] == ("period 12 µs", "proven bound 12 µs (optimal)", "workers idle 33%")
    assert idle_share(make_rerouted_plan()) == pytest.approx(12 / 36)


def test_the_headline_says_how_far_the_period_lies_above_the_bound() -> None:
    plan = make_1f1b_plan()
    looser = replace(plan, quality=replace(plan.quality, bound_us=18, status="feasible"))
    assert headline(looser)[1][1] == "proven bound 18 µs (feasible, 50.0% above it)"


@pytest.mark.parametrize(
    ("extent", "unit", "texts"),
    [
        ((0, 27), "µs", ["0", "5", "10", "15", "20", "25"]),
        ((100, 90_100), "ms", ["0", "20", "40", "60", "80"]),
        ((0, 12_000_000), "s", ["0", "2", "4", "6", "8", "10", "12"]),
    ],
)
def test_ticks_are_round_numbers_in_one_unit(extent: tuple[int, int], unit: str, texts: list[str]) -> None:
    found, ticks = axis_ticks(extent, 8)
    assert (found, [text for _, text in ticks]) == (unit, texts)
    assert ticks[0][0] == extent[0]


def test_a_row_of_a_worker_that_does_not_exist_is_refused_in_a_sentence() -> None:
    plan = make_1f1b_plan(2, 2, 2)
    stranger = replace(plan.rows[0], worker=Worker(7, 0))
    with pytest.raises(UserError, match="the plan has a row for W7_0, but its cluster has no such worker"):
        plan_timeline(replace(plan, rows=(*plan.rows, stranger)))


def test_a_period_of_nothing_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="period is 0 µs"):
        plan_timeline(replace(make_1f1b_plan(), period_us=0))
