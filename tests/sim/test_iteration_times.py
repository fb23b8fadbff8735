"""Timings come from the planner, are kept, and are never better than what was planned."""

from recycle.core.profile import Link, Profile, StageProfile
from recycle.planner.failure_normalization import least_bound
from recycle.planner.problem_from_text import problem as describe
from recycle.planner.solve import solve_normalized
from recycle.sim import iteration_times as module
from recycle.sim.iteration_times import IterationTimes, one_f_one_b_time
from tests.sim.jobs import small_job

JOB = small_job(num_pipelines=4, num_stages=3, num_microbatches=6)
PROBLEM = JOB.problem()


def test_every_number_of_failures_has_a_period_near_its_own_plan():
    timings = IterationTimes(PROBLEM)
    timings.prepare(range(9 + 1))
    for count in range(10):
        found = timings.normalized(count)
        own = solve_normalized(PROBLEM, count, "greedy", effort=module.EFFORT)[0].period_us
        assert least_bound(PROBLEM, count) <= found.period_us
        # Between two plans of nearly the same period the slower one stands for all.
        assert found.period_us <= own * (1 + module.TOLERANCE)
        assert sum(found.distribution) >= count


def test_few_plans_serve_many_numbers_of_failures(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "parallel_map", lambda function, given: asked.extend(given) or [function(one) for one in given])
    timings = IterationTimes(describe(4, 8, 8, costs="10,10,10"))
    timings.prepare(range(16 + 1))
    num_planned = len(asked)
    periods = [timings.normalized(count).period_us for count in range(17)]
    assert periods == sorted(periods)
    assert periods[-1] > 1.4 * periods[1]  # two dead of four at every stage, against one at some
    assert len(asked) == num_planned < 17


def test_the_answer_does_not_depend_on_what_was_asked_before():
    problem = describe(4, 3, 4, costs="10,13,9", comm=1, memory=6)
    prepared = IterationTimes(problem)
    prepared.prepare(range(8 + 1))
    for count in (8, 3):
        assert IterationTimes(problem).normalized(count) == prepared.normalized(count)


def test_what_was_planned_once_is_read_from_disk(tmp_path, monkeypatch):
    first = IterationTimes(PROBLEM, tmp_path)
    known = (first.normalized(2), first.for_distribution((1, 0, 1)), one_f_one_b_time(PROBLEM, tmp_path))
    monkeypatch.setattr(module, "_plan", lambda given: 1 / 0)
    again = IterationTimes(PROBLEM, tmp_path)
    assert (again.normalized(2), again.for_distribution((1, 0, 1)), one_f_one_b_time(PROBLEM, tmp_path)) == known


def test_a_broken_file_is_planned_again(tmp_path):
    known = IterationTimes(PROBLEM, tmp_path).fault_free()
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:40])
    assert IterationTimes(PROBLEM, tmp_path).fault_free() == known


def test_1f1b_takes_its_textbook_time():
    assert one_f_one_b_time(describe(3, 4, 6, costs="1,1,1")).period_us == 27


def test_the_reduction_over_all_pipelines_comes_on_top_of_one_pipelines_time():
    stage = StageProfile(10, 10, 10, 20, optimizer_us=5, gradient_bytes=1000)
    profile = Profile((stage,) * 4, peer_link=Link(latency_us=2, bytes_per_us=10.0))
    # A ring of 5: 8 steps of 2 µs, and 8/5 of the gradient at 10 bytes a µs.
    assert one_f_one_b_time(describe(5, 4, 6, profile=profile)).period_us == 9 * 30 + 5 + (16 + 160)
