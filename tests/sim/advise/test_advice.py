"""The advice: its first choice is the best of all choices, whatever was pruned, and it survives an interruption."""

import json
from dataclasses import replace

import pytest

from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.sim.advise import evaluations as advise_evaluations
from recycle.sim.advise.advice import advise
from recycle.sim.advise.choice_facts import choice_facts
from recycle.sim.advise.choices import ELASTIC, MOST_CUT_STEPS, SystemChoice, all_choices, job_of, most_shared
from recycle.sim.advise.evaluations import FUNCTIONS, simulate_choice
from recycle.sim.advise.search import MARGIN, SearchLimits
from recycle.sim.advise.upper_bounds import first_bound, refined_rate, shared_bound
from recycle.sim.advise.verdict import FACTORS, FAILURES, PAUSES, REPAIRS, TIE, changed
from tests.sim.advise.small_cluster import small_question
from tests.sim.quick_plans import plan_quickly

QUESTION = small_question()


@pytest.fixture(autouse=True)
def _plan_here(monkeypatch):
    plan_quickly(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("advice")


@pytest.fixture(scope="module")
def advice(folder):
    with pytest.MonkeyPatch.context() as patch:
        plan_quickly(patch)
        return advise(QUESTION, folder, num_processes=1)


def every_choice(question):
    """All systems in all shapes of eight GPUs, counted here by hand and not by the code under test."""
    for degree in (1, 2):
        for stages in range(1, question.model.num_layers + 1):
            for pipelines in range(1, 8 // degree // stages + 1):
                microbatches = round(question.batch / pipelines)
                if abs(microbatches * pipelines - question.batch) <= question.batch_tolerance * question.batch:
                    spare = (8 - pipelines * stages * degree) // question.gpus_per_server
                    for system in question.systems:
                        for shared in range(3 if system == ELASTIC and stages > 1 and 4 // stages >= 2 else 1):
                            yield SystemChoice(system, Shape(pipelines, stages, microbatches), degree, shared, spare)


def runs_of_all(folder):
    found = {}
    for choice in every_choice(QUESTION):
        try:
            if not refined_rate(QUESTION, choice, folder).fault_free:
                continue
            found[choice] = simulate_choice(QUESTION, choice, folder)
        except UserError:
            continue  # more shared layers than a stage has
    return found


def test_the_first_choice_is_the_best_of_all_choices_simulated_in_full(advice, folder):
    found = runs_of_all(folder)
    assert len(found) > 100
    best = max(found, key=lambda choice: found[choice].mean)
    assert advice.first.runs.mean == found[best].mean
    assert advice.first.choice.is_same_layout(best)
    for (system, has_spares), group in advice.found.groups.items():
        own = [runs.mean for choice, runs in found.items() if choice.group == (system, has_spares)]
        if own:
            assert group.best.runs.mean >= max(own) * (1 - 5 * MARGIN), (system, has_spares)


def test_the_search_lists_every_shape_that_could_use_its_spares():
    listed = {(choice.system, choice.shape, choice.tensor_parallel) for choice in all_choices(QUESTION)}
    most_away = max(QUESTION.dead_shares)
    wanted = {
        (choice.system, choice.shape, choice.tensor_parallel)
        for choice in every_choice(QUESTION)
        if 8 - choice.shape.num_workers * choice.tensor_parallel <= most_away * QUESTION.gpus_per_server
        and not choice.system.startswith(("oobleck", "varuna"))
    }
    assert wanted <= listed


def test_no_choice_exceeds_its_upper_bounds(advice, folder):
    for choice in all_choices(QUESTION):
        step = refined_rate(QUESTION, choice, folder)
        if not step.fault_free:
            continue
        mean = simulate_choice(QUESTION, choice, folder).mean
        assert mean <= first_bound(QUESTION, choice) * (1 + 1e-9), choice
        assert mean <= step.most * (1 + MARGIN), choice
        if choice.shared_layers:
            assert mean <= shared_bound(QUESTION, choice, folder).most * (1 + 1e-9), choice


def test_what_was_found_is_not_computed_again_and_an_interrupted_call_goes_on(folder, advice, monkeypatch):
    paths = sorted(folder.glob("advice-*.json"))
    assert paths
    calls = []
    monkeypatch.setitem(FUNCTIONS, "runs", lambda *given: calls.append(given) or simulate_choice(*given))
    assert advise(QUESTION, folder, num_processes=1).to_json() == advice.to_json()
    assert calls == []
    # A call that was interrupted has some evaluations: only the others are run.
    path = next(path for path in paths if len(json.loads(path.read_text())["evaluations"]) > 3)
    data = json.loads(path.read_text())
    name = next(name for name in data["evaluations"] if name.startswith("runs "))
    del data["evaluations"][name]
    path.write_text(json.dumps(data))
    assert advise(QUESTION, folder, num_processes=1).to_json() == advice.to_json()
    assert [given[1].key for given in calls] == [name.removeprefix("runs ")]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_call_that_is_interrupted_has_lost_only_what_was_under_way(tmp_path, num_processes):
    """Eight evaluations of few seconds: the third ends the call, and the next call makes the others."""
    question = small_question(num_seeds=1, days=2.0, systems=("replica-drop", "checkpoint-restart"))
    cases = [(question, choice) for choice in all_choices(question)][:8]
    done = []

    def stop(doing, count):
        done.append((doing, count))
        if count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), advise_evaluations.evaluations(tmp_path, stop, num_processes) as known:
        known.simulate(cases, "simulating")
    assert [doing for doing, _ in done] == ["simulating", *(f"simulating: {number} of 8" for number in (1, 2, 3))]
    again = []
    with advise_evaluations.evaluations(tmp_path, lambda *given: again.append(given), 1) as known:
        runs = known.simulate(cases, "simulating")
        assert known.num_simulated == 8
    assert again[-1][0] == "simulating: 5 of 5"
    assert runs == [simulate_choice(*case, tmp_path) for case in cases]


def test_a_damaged_cache_is_computed_again(folder, advice):
    path = folder / f"advice-{QUESTION.digest}.json"
    path.write_text(path.read_text().replace('"rates"', '"rages"'))
    assert advise(QUESTION, folder, num_processes=1).to_json() == advice.to_json()


def test_where_a_rival_wins_it_wins_in_a_simulation(advice, folder):
    crossings = [one for one in advice.sensitivity.crossings if one.factor is not None]
    assert crossings
    for one in crossings:
        beyond = one.factor * 1.3 if one.factor > 1 else one.factor / 1.3
        if not min(FACTORS[one.axis]) < beyond < max(FACTORS[one.axis]):
            continue
        first, rival = (
            simulate_choice(changed(QUESTION, one.axis, advice.first.choice.system, beyond, choice.system), choice, folder).mean
            for choice in (advice.first.choice, one.rival)
        )
        assert rival > first, one


def test_a_rival_without_a_crossing_is_slower_at_every_factor(advice):
    for one in advice.sensitivity.crossings:
        curves = advice.sensitivity.curves[one.axis]
        wins = [curves[one.rival][factor] > (1 + TIE) * curves[advice.first.choice][factor] for factor in FACTORS[one.axis]]
        assert (one.factor is not None) == any(wins)


def test_as_things_are_the_thresholds_have_the_numbers_of_the_verdict(advice):
    means = {one.choice: one.runs.mean for one in advice.found.ranked}
    for one in advice.sensitivity.crossings:
        assert one.slower == pytest.approx(1 - means[one.rival] / advice.first.runs.mean)
        assert one.is_tie == (means[one.rival] >= (1 - TIE) * advice.first.runs.mean)
        assert advice.sensitivity.curves[one.axis][one.rival][1] == means[one.rival]


def test_rivals_are_the_closest_alternative_the_own_system_with_spares_and_other_systems(advice):
    rivals = list(dict.fromkeys(one.rival for one in advice.sensitivity.crossings))
    first = advice.first.choice
    assert rivals[0] == advice.alternatives[0].choice
    own = advice.found.groups[first.system, not first.num_spare_servers].best
    assert own.choice in rivals
    assert len({rival.system for rival in rivals} - {first.system}) >= 2


def test_a_pause_of_the_first_choice_changes_only_systems_with_the_same_pauses(advice):
    longer = changed(QUESTION, PAUSES, "oobleck", 8, "oobleck-zb")
    assert longer.constants.oobleck.reconfigure_us == 8 * QUESTION.constants.oobleck.reconfigure_us
    assert changed(QUESTION, PAUSES, "oobleck", 8, "recycle") == QUESTION


def test_more_failures_are_simulated_for_a_shorter_time_with_the_same_seeds():
    often = changed(QUESTION, FAILURES, "recycle", 4, "recycle")
    assert often.seeds == QUESTION.seeds
    assert often.days * often.failures_per_day == pytest.approx(QUESTION.days * QUESTION.failures_per_day)
    # Five repairs are longer than it takes for as many failures: then there are fewer seeds.
    short = changed(small_question(days=1.0), FAILURES, "recycle", 16, "recycle")
    assert (short.days, short.num_seeds) == (1.25, 2)
    rare = changed(QUESTION, FAILURES, "recycle", 1 / 8, "recycle")
    assert rare.days == QUESTION.days
    long = changed(small_question(days=1.0), REPAIRS, "recycle", 8, "recycle")
    assert long.days == 10  # five repairs of two days


def test_with_few_simulations_every_system_that_runs_still_has_a_choice(advice, folder, monkeypatch):
    monkeypatch.setattr(SearchLimits, "of", staticmethod(lambda num_gpus: SearchLimits(2, 1, 4)))
    few = advise(QUESTION, folder, num_processes=1)
    for name, group in advice.found.groups.items():
        assert (few.found.groups[name].best is None) == (group.best is None), name
    assert few.found.num_screened < advice.found.num_screened
    assert few.first.runs.mean >= 0.99 * advice.first.runs.mean


def test_a_large_cluster_is_searched_with_fewer_simulations_and_a_small_one_as_ever():
    assert SearchLimits.of(64) == SearchLimits.of(1024) == SearchLimits(16, 16, 400)
    assert SearchLimits.of(16_384) == SearchLimits(4, 2, 32, most_rivals=4)
    assert SearchLimits.of(131_072) == SearchLimits(4, 2, 24, most_rivals=4)


def test_the_same_servers_fail_at_the_same_times_in_every_shape():
    wide, deep = QUESTION.trace(4, 1, 1, 1), QUESTION.trace(1, 4, 1, 1)
    assert [(change.at_us, change.joins) for change in wide.later] == [(change.at_us, change.joins) for change in deep.later]
    halves = QUESTION.trace(4, 2, 1, 2)
    assert {change.at_us for change in halves.later} == {change.at_us for change in wide.later}


def test_cuts_are_tried_only_where_their_plans_take_seconds():
    num_stages = 2
    assert most_shared(QUESTION, Shape(2, num_stages, 12), 1) > 0
    assert most_shared(QUESTION, Shape(2, num_stages, MOST_CUT_STEPS), 1) == 0


def test_more_failures_and_longer_pauses_make_the_first_choice_slower(advice, folder):
    rates = advice.sensitivity.curves[FAILURES][advice.first.choice]
    assert rates[16] < rates[1] < rates[1 / 8]


def test_no_choice_plans_with_memory_that_is_reserved():
    half, whole = small_question(memory_reserve=0.5), small_question()
    assert half.planned_gpu.memory_bytes == whole.gpu.memory_bytes // 2
    choice = next(choice for choice in all_choices(whole) if choice.system == ELASTIC)
    assert job_of(half, choice).problem().memory.limits[0] == half.planned_gpu.memory_bytes
    assert half.digest != whole.digest
    # A model that needs more than half of a GPU in every shape fits with all of it only.
    needed = small_question(model="layers=1,hidden=12288,heads=96,sequence=512,vocabulary=1000", gpus_per_server=1, num_gpus=4)
    assert any(all_choices(needed))
    assert not any(all_choices(replace(needed, memory_reserve=0.6)))


def test_a_model_that_fits_nowhere_is_refused_with_what_to_do(tmp_path):
    question = small_question(model="gpt-145.6b")
    with pytest.raises(UserError, match=r"no system can train gpt-145.6b on 8 a100-80: take more GPUs"):
        advise(question, tmp_path, num_processes=1)


def test_a_system_that_lays_itself_out_is_one_alternative_whatever_the_shape():
    oobleck, fewer = (SystemChoice("oobleck", Shape(pipelines, 2, 12), 1, 0, 0) for pipelines in (4, 3))
    assert oobleck.is_same_layout(fewer)
    assert not oobleck.is_same_layout(replace(fewer, tensor_parallel=2))
    assert not oobleck.is_same_layout(replace(fewer, num_spare_servers=1))
    recycle, wider = (replace(choice, system=ELASTIC) for choice in (oobleck, fewer))
    assert not recycle.is_same_layout(wider)
    assert recycle.is_same_layout(replace(recycle, shared_layers=1))


def test_a_schedule_without_bubbles_is_shown_with_the_memory_that_it_takes(folder):
    choices = {system: SystemChoice(system, Shape(4, 2, 6), 1, 0, 0) for system in ("recycle", "replica-drop-zb", "replica-drop")}
    needs = {system: choice_facts(QUESTION, choice, folder).memory_bytes for system, choice in choices.items()}
    assert needs["replica-drop-zb"] == needs["recycle"] > needs["replica-drop"]
    published, without_bubbles = (
        choice_facts(QUESTION, SystemChoice(system, Shape(4, 2, 6), 1, 0, 0), folder).memory_bytes
        for system in ("oobleck", "oobleck-zb")
    )
    assert published <= without_bubbles <= QUESTION.planned_gpu.memory_bytes
