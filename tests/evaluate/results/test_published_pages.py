"""The pages of docs/results have the numbers of the measurements that lie beside them."""

from dataclasses import astuple, replace

import pytest

from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from recycle.evaluate.hardware.evaluation_folder import read_setup
from recycle.evaluate.hardware.kills import read_recoveries
from recycle.evaluate.hardware.race import plan_path
from recycle.evaluate.hardware.round_profiles import round_profiles
from recycle.evaluate.hardware.setup import ELASTIC, TECHNIQUES
from recycle.evaluate.hardware.variants import profile_of, variants
from recycle.evaluate.results.cluster_page import check_requirements
from recycle.evaluate.results.cluster_tables import prediction_table, requirement_table, throughput_table
from recycle.report.record.tables import markdown
from recycle.sim.replay.expected_iteration import expected_iteration
from tests.evaluate.results.published_pages import RESULTS, lines, shown

FOLDERS = [path.parent for path in sorted(RESULTS.glob("*/results.md"))]
pytestmark = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def test_tables_have_the_measured_numbers(folder):
    page, setup, found = (folder / "results.md").read_text(encoding="utf-8"), read_setup(folder), lines(folder)
    names, known = {line.name for line in found}, {variant.name for variant in variants(setup)}
    assert names == known if setup.study == TECHNIQUES else names <= known
    assert markdown(throughput_table(found, found[0])) in page
    assert markdown(requirement_table(check_requirements(found, setup))) in page
    assert markdown(prediction_table(found)) in page


@pytest.mark.slow
def test_predictions_are_those_of_legal_plans_by_the_kept_profiles(folder):
    setup, profiles = read_setup(folder), round_profiles(folder)
    known = {variant.name: variant for variant in variants(setup)}
    for line in shown(folder)["variants"]:
        variant = known[line["name"]]
        assert set(map(int, line["predictions"])) <= set(profiles)
        if not variant.is_torch:
            plan = Plan.load(plan_path(folder, variant))
            assert check(plan) == []
            # The plan of a worker whose slowness nobody knows is run at that worker's speed all the same.
            plan = replace(plan, problem=replace(plan.problem, speeds=variant.speeds))
            assert list(line["beforehand"].values()) == pytest.approx(astuple(expected_iteration(plan)))
            # The first round's again; all of them would take half a minute.
            plan = replace(plan, problem=replace(plan.problem, profile=profile_of(variant, setup, profiles[0])))
            assert list(line["predictions"]["0"].values()) == pytest.approx(astuple(expected_iteration(plan)))


def test_at_least_twenty_workers_were_killed_and_came_back(folder):
    if read_setup(folder).study == ELASTIC:
        pytest.skip("this study compares steady throughput: it kills nobody")
    recoveries = read_recoveries(folder)
    assert sum(not one.joins for one in recoveries) >= 20
    assert sum(bool(one.joins) for one in recoveries) >= 20
