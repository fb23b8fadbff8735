"""Plan sources of a running job: every answer is a legal plan that the live workers can run, with moves where they pay."""

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import recycle
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import FileProblem, ForeignPlan, UserError
from recycle.core.plans.library import Library, without_failures
from recycle.core.plans.plan import Plan
from recycle.core.plans.plan_source import NoWorkerLeft, PlanAssignment, PlanFolder, places_for
from recycle.core.plans.rules import check
from recycle.core.problem import Problem, Techniques
from recycle.core.profile import Link, Profile, StageProfile
from recycle.planner.live_planner import Planner, renamed
from tests.builders import dead
from tests.planner.strategies import problems

pytestmark = pytest.mark.timeout(120)
QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
DEMO = recycle.problem(3, 4, 6, costs=(10, 13, 9), comm=1, memory=6)
EFFORT = 10_000


def moves(answer: PlanAssignment) -> list[str]:
    return [f"{now}>{place}" for now, place in answer.moves]


def copies(answer: PlanAssignment) -> list[str]:
    return [f"{now}>{place}" for now, place in answer.copies]


def is_runnable(answer: PlanAssignment, problem: Problem, failed: frozenset[Worker]) -> bool:
    """Whether the plan is a legal one of the job, and each live worker runs one of its rows."""
    live = [worker for worker in problem.shape.workers() if worker not in failed]
    is_of_the_job = without_failures(answer.plan.problem) == problem and check(answer.plan) == []
    rows = sorted(row.worker for row in answer.plan.rows)
    return is_of_the_job and sorted(answer.places) == rows and sorted(answer.places.values()) == live


def uneven(static_bytes: int = 0) -> Problem:
    """A job whose second stage has little to do, so that failures hurt least there."""
    heavy = StageProfile(90, 90, 90, 180, static_bytes=static_bytes)
    light = StageProfile(10, 10, 10, 20, static_bytes=static_bytes)
    return Problem(Cluster(Shape(3, 3, 4)), Profile((heavy, light, heavy), peer_link=Link(5, 1.0)))


def plan_for(problem: Problem, failed: frozenset[Worker] = frozenset()) -> Plan:
    return recycle.solve(replace(problem, cluster=Cluster(problem.shape, failed)), "greedy", effort=EFFORT)


def make_library(folder: Path, problem: Problem, most: int) -> Library:
    library = Library.create(folder, problem)
    for num_failures in range(most + 1):
        library.put(num_failures, recycle.solve_normalized(problem, num_failures, "greedy", effort=EFFORT)[0].dumps())
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("source") / "plans", DEMO, most=3)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Problem, frozenset[Worker]]:
    """A job, and any dead that leave as many as there are stages: maybe all workers of one stage."""
    job = without_failures(draw(problems()))
    shape = job.shape
    workers = sorted(shape.workers())
    failed = draw(st.sets(st.sampled_from(workers), max_size=shape.num_workers - shape.num_stages))
    return replace(job, techniques=replace(job.techniques, adaptive=True)), frozenset(failed)


@QUICK
@given(questions(), st.booleans())
def test_every_answer_is_a_legal_plan_of_the_job_that_the_live_workers_can_run(
    question: tuple[Problem, frozenset[Worker]], may_move: bool
) -> None:
    problem, failed = question
    answer = Planner(problem, may_move=may_move).answer(failed)
    assert is_runnable(answer, problem, failed)


@QUICK
@given(questions())
def test_who_may_not_move_does_so_only_into_a_stage_that_nobody_holds(question: tuple[Problem, frozenset[Worker]]) -> None:
    problem, failed = question
    answer = Planner(problem, may_move=False).answer(failed)
    num_dead = Counter(worker.stage for worker in failed)
    lost = [stage for stage in range(problem.shape.num_stages) if num_dead[stage] == problem.shape.num_pipelines]
    assert [place.stage for _, place in sorted(answer.moves, key=lambda move: move[1].stage)] == lost
    assert answer.moves == answer.copies


@QUICK
@given(questions())
def test_the_places_that_an_answer_leaves_empty_are_answered_without_another_move(
    question: tuple[Problem, frozenset[Worker]],
) -> None:
    """A worker that moved stays: asked with the places that are empty now, the planner gives the same plan."""
    problem, failed = question
    num_dead = Counter(worker.stage for worker in failed)
    assume(max(num_dead.values(), default=0) < problem.shape.num_pipelines)  # else only who has to moves at first
    planner = Planner(problem)
    first = planner.answer(failed)
    again = planner.answer(first.plan.problem.cluster.failed)
    assert again.copies == ()
    assert again.plan.rows == first.plan.rows


def test_nobody_dead_gets_the_plan_for_nobody_dead(library: Library) -> None:
    for planner in (Planner(DEMO), Planner(DEMO, library)):
        answer = planner.answer(frozenset())
        assert is_runnable(answer, DEMO, frozenset())
        assert answer.moves == ()
        assert "nobody is dead" in answer.reason


def test_the_plan_that_a_job_was_given_is_played_again_when_all_are_back() -> None:
    given_plan = plan_for(DEMO)
    answer = Planner(DEMO, given=given_plan).answer(frozenset())
    assert answer.plan is given_plan
    assert answer.reason == "the plan that the job was given"


def test_a_single_failure_where_the_library_has_it_moves_nobody(library: Library) -> None:
    """In any pipeline: the plan's pipelines are renamed, so that the dead worker's own place stays free for it."""
    stored = library.get(1)
    (planned,) = stored.problem.cluster.failed
    for pipeline in range(3):
        failed = frozenset({Worker(pipeline, planned.stage)})
        answer = Planner(DEMO, library).answer(failed)
        assert is_runnable(answer, DEMO, failed)
        assert answer.plan.period_us == stored.period_us
        assert answer.plan.problem.cluster.failed == failed
        assert answer.moves == ()
        assert answer.reason == ("the library's plan for 1 failure: the failures lie as planned, so that nobody changes stage")


@QUICK
@given(st.sets(st.sampled_from(sorted(DEMO.shape.workers())), max_size=5))
def test_with_a_library_every_answer_is_legal_too_and_never_slower_than_what_it_has(
    library: Library, failed: set[Worker]
) -> None:
    """It has plans for up to three failures."""
    answer = Planner(DEMO, library, expected_iterations=10**9).answer(frozenset(failed))
    assert is_runnable(answer, DEMO, frozenset(failed))
    is_held = max(Counter(worker.stage for worker in failed).values(), default=0) < DEMO.shape.num_pipelines
    if len(failed) <= 3 and is_held:
        assert answer.plan.period_us <= library.get(len(failed)).period_us


def test_failures_that_lie_as_planned_but_for_the_pipelines_need_no_change_of_stage(tmp_path: Path) -> None:
    """Planned in one pipeline, dead in two: peers change places, which costs nothing."""
    library = Library.create(tmp_path / "plans", DEMO)
    stored = plan_for(DEMO, dead("W2_1", "W2_2"))
    library.put(2, stored.dumps())
    failed = dead("W0_1", "W1_2")
    answer = Planner(DEMO, library).answer(failed)
    assert is_runnable(answer, DEMO, failed)
    assert answer.plan.rows == stored.rows
    assert moves(answer) == ["W2_1>W0_1", "W2_2>W1_2"]
    assert answer.copies == ()


def test_a_worker_changes_stage_where_that_pays() -> None:
    answer = Planner(uneven()).answer(dead("W1_0"))
    assert moves(answer) == copies(answer) == ["W2_1>W1_0"]
    assert answer.plan.problem.cluster.failed == dead("W2_1")
    assert answer.reason.startswith("planned on the spot: moving takes 5 µs and saves ")


def test_a_worker_stays_where_the_copy_takes_longer_than_it_saves() -> None:
    slow = uneven(static_bytes=1_000_000)
    answer = Planner(slow, expected_iterations=10).answer(dead("W1_0"))
    assert answer.moves == ()
    assert answer.plan.problem.cluster.failed == dead("W1_0")
    assert answer.reason.startswith("planned on the spot, and nobody moves: at best, moving takes 1.000 s, but saves only ")
    assert copies(Planner(slow, expected_iterations=100_000).answer(dead("W1_0"))) == ["W2_1>W1_0"]


def test_a_worker_stays_where_it_may_not_change_stage() -> None:
    answer = Planner(uneven(), may_move=False).answer(dead("W1_0"))
    assert answer.moves == ()
    assert answer.reason == "planned on the spot, and nobody moves: workers may not change stage"


def test_a_library_moves_a_worker_only_where_that_pays(tmp_path: Path) -> None:
    for static_bytes, num_moves in ((0, 1), (10**9, 0)):
        problem = uneven(static_bytes)
        library = make_library(tmp_path / str(static_bytes), problem, most=1)
        answer = Planner(problem, library, expected_iterations=100).answer(dead("W0_2"))
        assert is_runnable(answer, problem, dead("W0_2"))
        assert len(answer.copies) == num_moves
        assert answer.reason.startswith("the library's plan for 1 failure: moving" if num_moves else "planned on the spot")


def test_a_stage_that_nobody_holds_gets_the_worker_that_is_missed_least(library: Library) -> None:
    for planner in (Planner(uneven()), Planner(uneven(), may_move=False)):
        failed = dead("W0_2", "W1_2", "W2_2")
        answer = planner.answer(failed)
        assert is_runnable(answer, uneven(), failed)
        assert moves(answer) == ["W2_1>W0_2"]
        assert answer.reason == "planned on the spot: nobody is left at stage 2, so that W2_1 takes over stage 2"
    failed = dead("W0_2", "W1_2", "W2_2")
    answer = Planner(DEMO, library).answer(failed)
    assert is_runnable(answer, DEMO, failed)
    assert [place.stage for _, place in answer.copies] == [2]


def test_several_stages_that_nobody_holds_get_a_worker_each() -> None:
    failed = dead(*(f"W{pipeline}_{stage}" for pipeline in range(3) for stage in (0, 3)))
    answer = Planner(DEMO).answer(failed)
    assert is_runnable(answer, DEMO, failed)
    assert [place.stage for _, place in answer.moves] == [0, 3]
    assert "nobody is left at stage 0 and stage 3" in answer.reason


def test_fewer_workers_than_stages_have_no_plan() -> None:
    failed = frozenset(DEMO.shape.workers()) - dead("W0_0", "W1_0", "W2_3")
    with pytest.raises(NoWorkerLeft) as raised:
        Planner(DEMO).answer(failed)
    assert raised.value.stages == (1, 2)
    assert str(raised.value) == (
        "no worker is left for stages 1, 2: 3 live workers cannot hold 4 stages; start 1 more, and training goes on"
    )
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (type(copied), str(copied), copied.stages) == (NoWorkerLeft, str(raised.value), (1, 2))


def test_a_worker_of_another_cluster_is_refused() -> None:
    with pytest.raises(UserError, match="W3_0 is not a worker of this cluster: pipelines are 0 to 2, stages 0 to 3"):
        Planner(DEMO).answer(dead("W3_0"))


def test_without_re_routing_a_failure_has_no_plan() -> None:
    rigid = replace(DEMO, techniques=Techniques(adaptive=False))
    assert Planner(rigid).answer(frozenset()).moves == ()
    with pytest.raises(UserError, match="only the technique 'adaptive' can re-route"):
        Planner(rigid).answer(dead("W1_2"))


@pytest.mark.parametrize("spoil", ["garbage", "illegal"])
def test_a_broken_plan_of_the_library_is_made_anew(spoil: str, tmp_path: Path) -> None:
    library = Library.create(tmp_path / "plans", DEMO)
    good = plan_for(DEMO, dead("W2_0"))
    library.put(1, "garbage" if spoil == "garbage" else replace(good, period_us=good.period_us + 1).dumps())
    answer = Planner(DEMO, library).answer(dead("W2_0"))
    assert is_runnable(answer, DEMO, dead("W2_0"))
    assert answer.reason.startswith("planned on the spot")


def test_a_library_or_a_plan_of_another_job_is_refused(library: Library) -> None:
    other = recycle.problem(3, 4, 6, costs=(10, 13, 9), comm=1, memory=7)
    with pytest.raises(ForeignPlan, match="was made for another shape, profile, memory or techniques than this job has"):
        Planner(other, library)
    with pytest.raises(ForeignPlan, match="was made for another shape, profile, memory or techniques than this job has"):
        Planner(other, given=plan_for(DEMO))


def test_another_planner_of_the_same_job_gives_the_same_answers() -> None:
    planner = Planner(DEMO)
    copied = pickle.loads(pickle.dumps(planner))
    for failed in (dead("W1_2"), dead("W1_2", "W0_0"), dead("W0_2", "W1_2", "W2_2")):
        one, other = planner.answer(failed), copied.answer(failed)
        assert (one.plan.rows, one.places, one.reason) == (other.plan.rows, other.places, other.reason)


def test_a_plan_with_its_pipelines_renamed_is_as_legal_and_as_good() -> None:
    plan = plan_for(DEMO, dead("W2_0", "W2_3", "W1_3"))
    twin = renamed(plan, Cluster(DEMO.shape, dead("W1_0", "W1_3", "W0_3")))
    assert twin is not None
    assert check(twin) == []
    assert twin.period_us == plan.period_us
    assert renamed(plan, Cluster(DEMO.shape, dead("W2_0", "W1_3", "W0_3"))) is None


def test_workers_keep_their_rows_or_their_stage_where_they_can() -> None:
    planned = Cluster(Shape(3, 2, 1), dead("W2_0", "W1_0"))
    places = places_for(planned, dead("W0_0", "W0_1"))
    assert {str(row): str(now) for row, now in places.items()} == {
        "W1_1": "W1_1",
        "W2_1": "W2_1",
        "W0_0": "W1_0",
        "W0_1": "W2_0",
    }


@pytest.fixture(scope="module")
def demo_plans() -> dict[frozenset[Worker], Plan]:
    sets: tuple[frozenset[Worker], ...] = (frozenset(), dead("W1_2"), dead("W0_0", "W1_2"))
    return {failed: plan_for(DEMO, failed) for failed in sets}


@pytest.fixture
def plan_folder(demo_plans: dict[frozenset[Worker], Plan], tmp_path: Path) -> PlanFolder:
    for failed, name in zip(demo_plans, ("none", "W1_2", "W1_2+W0_0"), strict=True):
        demo_plans[failed].save(tmp_path / f"plan-{name}.json")
    return PlanFolder(tmp_path)


def test_plans_of_a_folder_are_used_as_they_are(plan_folder: PlanFolder, demo_plans: dict[frozenset[Worker], Plan]) -> None:
    for failed, plan in demo_plans.items():
        answer = plan_folder.answer(failed)
        assert answer.plan == plan
        assert is_runnable(answer, DEMO, failed)
        assert answer.moves == ()


def test_a_plan_that_a_folder_lacks_is_asked_for_by_its_name(plan_folder: PlanFolder, tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"has no plan for W0_0, W2_3 dead: .* save it as plan-W0_0\+W2_3.json"):
        plan_folder.answer(dead("W2_3", "W0_0"))
    with pytest.raises(FileProblem, match=r"has no plan for none dead: .* save it as plan-none.json"):
        PlanFolder(tmp_path / "nowhere").answer(frozenset())


def test_a_folder_too_says_that_a_job_has_too_few_workers(plan_folder: PlanFolder) -> None:
    with pytest.raises(NoWorkerLeft, match="start 4 more"):
        plan_folder.answer(frozenset(DEMO.shape.workers()))


def test_a_plan_for_other_dead_is_used_with_moves_if_they_are_as_many(
    demo_plans: dict[frozenset[Worker], Plan], tmp_path: Path
) -> None:
    one, two = demo_plans[dead("W1_2")], demo_plans[dead("W0_0", "W1_2")]
    one.save(tmp_path / "plan-W0_3.json")
    assert moves(PlanFolder(tmp_path).answer(dead("W0_3"))) == ["W1_2>W0_3"]
    two.save(tmp_path / "plan-W0_3.json")
    with pytest.raises(ForeignPlan, match="has W0_0, W1_2 dead, which are not as many: plan again"):
        PlanFolder(tmp_path).answer(dead("W0_3"))


def test_an_illegal_plan_in_a_folder_is_refused(demo_plans: dict[frozenset[Worker], Plan], tmp_path: Path) -> None:
    plan = demo_plans[dead("W1_2")]
    replace(plan, period_us=plan.period_us + 1).save(tmp_path / "plan-W1_2.json")
    with pytest.raises(FileProblem, match=r"plan-W1_2.json is not a legal plan: period: "):
        PlanFolder(tmp_path).answer(dead("W1_2"))


def test_a_slow_worker_gets_less_to_do_and_takes_its_speed_along_when_it_moves() -> None:
    problem = recycle.problem(3, 3, 8, costs="10,10,10")
    planner, slow = Planner(problem), Worker(1, 1)
    answer = planner.at_speeds(((slow, 0.5),)).answer(frozenset())
    num_ops = {row.worker: len(row) for row in answer.plan.rows}
    assert num_ops[slow] < min(num_ops[Worker(0, 1)], num_ops[Worker(2, 1)])
    assert dict(answer.plan.problem.speeds) == {slow: 0.5}
    # Nobody is left at stage 0: whoever takes it over has its own speed there.
    failed = dead("W0_0", "W1_0", "W2_0")
    speeds = tuple((Worker(pipeline, 1), 0.5 + pipeline / 10) for pipeline in range(3))
    moved = planner.at_speeds(speeds).answer(failed)
    known = dict(speeds)
    assert moved.moves
    assert dict(moved.plan.problem.speeds) == {place: known[now] for place, now in moved.places.items() if now in known}


def test_at_the_speeds_of_its_problem_a_planner_has_its_library_and_at_others_it_plans(library: Library) -> None:
    planner = Planner(library.problem, library)
    assert planner.at_speeds(()) == planner
    other = planner.at_speeds(((Worker(0, 0), 0.5),))
    assert other.library is None
    assert check(other.answer(frozenset()).plan) == []
    assert other.at_speeds(()).problem == planner.problem


def test_a_failure_is_planned_for_at_the_speeds_of_the_others() -> None:
    problem = recycle.problem(3, 3, 8, costs="10,10,10")
    speeds = ((Worker(0, 2), 0.5), (Worker(1, 1), 0.5))
    plan = Planner(problem, may_move=False).at_speeds(speeds).answer(dead("W1_1")).plan
    assert plan.problem.speeds == ((Worker(0, 2), 0.5),), "a dead worker has no speed"
