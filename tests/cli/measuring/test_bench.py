"""`recycle bench cluster`: a small cluster from its profile to its page, in one command that resumes where it was cut off."""

import json
import shutil

import pytest

from recycle.core.profile import Profile
from recycle.evaluate.hardware import evaluation_folder
from recycle.evaluate.hardware.evaluation_folder import begin_evaluation
from recycle.evaluate.hardware.kills import read_recoveries
from recycle.evaluate.hardware.race import Trial, read_trials
from recycle.evaluate.hardware.round_profiles import round_profiles
from recycle.evaluate.hardware.variants import variants
from recycle.evaluate.results.cluster_page import complete_rounds
from recycle.profiling.rehearsal import Patience
from tests.cli.commands import Ended, run
from tests.evaluate.hardware.tiny_setup import TINY

pytestmark = pytest.mark.timeout(280)
SMALL = "--rounds 1 --iterations 1 --kills 1"
PICTURES = ("throughput.png", "timeline.svg")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of a complete measurement, with the stdout and stderr of its command."""
    folder = tmp_path_factory.mktemp("measured")
    begin_evaluation(folder, TINY)
    with pytest.MonkeyPatch.context() as patch:  # medians never get stable while other tests run beside this one
        patch.setattr(evaluation_folder, "_PATIENCE", Patience(1.0, 2, 2))
        patch.setattr(evaluation_folder, "_CYCLE_S", 1.0)  # long enough for a process to come back
        ended = run(f"bench cluster --out {folder} {SMALL}")
    assert ended.code == 0, ended.err
    return folder, ended.out, ended.err


@pytest.mark.slow
def test_it_goes_from_a_profile_to_a_page_with_pictures(measured):
    folder, out, _ = measured
    assert Profile.load(folder / "profile.json").taken.model == TINY.model
    assert (folder / "results.md").read_text(encoding="utf-8") in out
    assert all((folder / name).stat().st_size > 0 for name in PICTURES)
    assert (folder / "timeline.svg").read_text(encoding="utf-8").startswith("<svg")
    assert "![" in out
    assert "throughput.png" in out


@pytest.mark.slow
def test_every_variant_has_its_row_and_all_train_the_same(measured):
    folder, out, _ = measured
    for variant in variants(TINY):
        assert f"| {variant.title} |" in out
    facts = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [line["name"] for line in facts["variants"]] == [variant.name for variant in variants(TINY)]
    by_what = {one["what"]: one for one in facts["requirements"]}
    assert by_what["losses of all trials, largest relative difference"]["is_met"]


@pytest.mark.slow
def test_predictions_use_the_profile_of_the_round(measured):
    folder, _, _ = measured
    assert sorted(round_profiles(folder)) == [0]
    facts = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for line, variant in zip(facts["variants"], variants(TINY), strict=True):
        assert bool(line["predictions"]) != variant.is_torch


@pytest.mark.slow
def test_a_worker_was_killed_and_came_back(measured):
    folder, out, _ = measured
    assert [one.joins for one in read_recoveries(folder)] == [False, True]
    assert "from a kill to the first op after it | 1 |" in out


@pytest.mark.slow
def test_a_second_run_measures_nothing_and_prints_the_same(measured):
    folder, out, _ = measured
    before = list(read_trials(folder))
    again = run(f"bench cluster --out {folder} {SMALL}")
    assert (again.code, again.out) == (0, out)
    assert "trial" not in again.err
    assert list(read_trials(folder)) == before


@pytest.mark.slow
def test_a_report_by_itself_needs_no_hardware(measured):
    folder, out, _ = measured
    assert run(f"bench cluster --out {folder} --only report") == Ended(
        0,
        out,
        f"wrote {folder}/results.md and {folder}/throughput.png\n",
    )


@pytest.mark.slow
def test_without_out_the_folder_is_build_cluster_and_a_line_names_it(measured, tmp_path, monkeypatch):
    folder, out, _ = measured
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "build" / "cluster")
    ended = run("bench cluster --only report")
    assert (ended.code, ended.out) == (0, out)
    assert ended.err.splitlines() == [
        "--out is not given: measurements and results are in build/cluster",
        "wrote build/cluster/results.md and build/cluster/throughput.png",
    ]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--backend abacus", "the backend is 'abacus', but it must be one of cpu-cores, paced-cores, gpu-slices, emulated"),
        ("--workers 10", "10 workers are no pipelines of 4 stages: give a multiple of 4, at least 8"),
        ("--workers 0", "0 workers are no pipelines of 4 stages: give a multiple of 4, at least 8"),
        ("--only tea", "--only names 'tea', but the parts are profile, plan, race, deaths, report"),
        ("--rounds 0", "--rounds is 0, but it must be at least 1"),
        ("--only report", "to plan from or to report on: run the part profile first"),
        ("--only plan,report", "to plan from or to report on: run the part profile first"),
    ],
)
def test_wrong_input_gets_one_sentence(tmp_path, words, sentence):
    ended = run(f"bench cluster --out {tmp_path / 'new'} {words}")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("recycle bench: ")
    assert sentence in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.slow
def test_a_folder_of_something_else_is_refused(measured):
    folder, _, _ = measured
    ended = run(f"bench cluster --out {folder} --workers 12")
    assert ended.code == 2
    assert "holds a measurement of something else: name another folder" in ended.err


def test_a_round_that_was_cut_off_does_not_count_unless_there_is_no_other():
    def trials(*numbered):
        return [Trial(number, name, [1], [1.0], {}) for number, names in numbered for name in names]

    assert complete_rounds(trials((0, "ab"), (1, "ab"), (2, "a"))) == trials((0, "ab"), (1, "ab"))
    assert complete_rounds(trials((0, "a"))) == trials((0, "a"))
    assert complete_rounds(trials((0, "a"), (1, "b"))) == trials((0, "a"), (1, "b"))
    assert complete_rounds([]) == []
