"""The folder of a measurement: it has one setup, errors are plain, and nothing in it is measured twice."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch

from recycle.core.errors import FileProblem, UserError
from recycle.evaluate.hardware import core_keepalive, evaluation_folder
from recycle.evaluate.hardware.evaluation_folder import begin_evaluation, choose_setup, hardware, measure_part, read_setup
from recycle.evaluate.hardware.measurement_size import MeasurementSize
from recycle.evaluate.hardware.setup import Setup
from recycle.evaluate.hardware.variants import variants
from recycle.profiling import machine
from tests.evaluate.hardware.tiny_setup import TINY

SIZE = MeasurementSize(1, 1, 1)
HEAD = {"format": "recycle-cluster", "version": 1}


def silent(sentence):
    raise AssertionError(f"nothing was measured, but it printed: {sentence}")


def test_a_new_folder_is_made_with_its_setup(tmp_path):
    begin_evaluation(tmp_path / "a" / "b", TINY)
    assert read_setup(tmp_path / "a" / "b") == TINY


def test_a_folder_of_the_same_setup_is_left_as_it_is(tmp_path):
    begin_evaluation(tmp_path, TINY)
    before = (tmp_path / "setup.json").stat().st_mtime_ns
    begin_evaluation(tmp_path, TINY)
    assert (tmp_path / "setup.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("other", [replace(TINY, width=32), replace(TINY, backend="gpu-slices"), Setup("cpu-cores")])
def test_a_folder_of_another_setup_is_refused_and_keeps_its_own(tmp_path, other):
    begin_evaluation(tmp_path, TINY)
    with pytest.raises(UserError, match=f"^{tmp_path} holds a measurement of something else: name another folder$"):
        begin_evaluation(tmp_path, other)
    assert read_setup(tmp_path) == TINY


def test_one_pipeline_is_refused_since_nobody_could_take_over(tmp_path):
    with pytest.raises(UserError, match=r"^1 pipeline has no peers that could take over: give at least 2$"):
        begin_evaluation(tmp_path / "new", replace(TINY, pipelines=1))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[1, 2]", "is not a recycle-cluster file: its format is None"),
        (json.dumps({"format": "recycle-plan", "version": 1}), "its format is 'recycle-plan'"),
        (json.dumps({**HEAD, "version": 7}), "version 7, but this release reads version 1"),
        (json.dumps(HEAD), "is not a setup: .*'backend'"),
        (json.dumps({**HEAD, "backend": "cpu-cores", "depth": 3}), "is not a setup: .*'depth'"),
    ],
)
def test_an_invalid_setup_is_named_with_the_reason(tmp_path, text, reason):
    (tmp_path / "setup.json").write_text(text)
    with pytest.raises(FileProblem, match=reason) as refused:
        read_setup(tmp_path)
    assert str(tmp_path / "setup.json") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_setup_with_an_impossible_size_is_refused(tmp_path):
    (tmp_path / "setup.json").write_text(json.dumps({**HEAD, "backend": "cpu-cores", "width": -1}))
    with pytest.raises(UserError, match="width is -1"):
        read_setup(tmp_path)


def test_a_folder_without_a_setup_is_refused(tmp_path):
    with pytest.raises(FileProblem, match=f"^cannot read {tmp_path / 'setup.json'}: No such file or directory$"):
        read_setup(tmp_path)


def test_without_options_the_setup_is_that_of_the_folder_if_it_has_one(tmp_path):
    assert choose_setup(tmp_path, None, None, False) == Setup.usual("cpu-cores")
    begin_evaluation(tmp_path, TINY)
    assert choose_setup(tmp_path, None, None, False) == TINY
    assert choose_setup(tmp_path, None, 8, True) == Setup.usual("cpu-cores", 8, is_small=True)
    with pytest.raises(UserError, match="0 workers are no pipelines"):
        choose_setup(tmp_path, None, 0, False)


def test_a_profile_that_is_there_is_not_measured_again(tmp_path):
    (tmp_path / "profile.json").write_text("measured before")
    measure_part("profile", tmp_path, TINY, SIZE, silent, variants(TINY))
    assert (tmp_path / "profile.json").read_text() == "measured before"


def test_a_comparison_without_plans_says_how_to_make_them(tmp_path):
    with pytest.raises(FileProblem, match=r"^there is no plan .*1f1b\.json: make the plans first, with recycle bench cluster"):
        measure_part("race", tmp_path, TINY, SIZE, silent, variants(TINY))


def test_kills_without_plans_name_the_folder_of_their_plans(tmp_path):
    with pytest.raises(FileProblem, match=f"^{tmp_path / 'deaths'} has no plan for none dead"):
        measure_part("deaths", tmp_path, TINY, SIZE, silent, variants(TINY))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_slices_of_a_missing_gpu_are_refused():
    with pytest.raises(UserError, match="torch finds no GPU here"), hardware(replace(TINY, backend="gpu-slices")):
        pytest.fail("there is no GPU")


def test_paced_cores_need_a_core_for_each_worker(monkeypatch):
    monkeypatch.setattr(evaluation_folder, "num_cores", lambda: 11)
    setup = Setup.usual("paced-cores", 12, study="elastic")
    with (
        pytest.raises(UserError, match="12 workers need as many cores to keep their pace, and this machine has 11"),
        hardware(setup),
    ):
        pytest.fail("there are too few cores")


@pytest.mark.parametrize("are_migrated", [False, True])
@pytest.mark.parametrize("num_pipelines", [2, 100])
def test_workers_have_a_core_each_where_there_are_as_many(are_migrated, num_pipelines, monkeypatch):
    monkeypatch.setattr(evaluation_folder, "slices", lambda num: pytest.fail("cores have no slices"))
    monkeypatch.setattr(evaluation_folder, "are_cores_migrated", lambda: are_migrated)
    monkeypatch.setattr(core_keepalive, "_keepalive", lambda core: nullcontext(BytesIO()))
    monkeypatch.setattr(machine, "_CORES", Path("/nowhere"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(9)))
    setup = replace(TINY, pipelines=num_pipelines)
    with hardware(setup) as choose_cores:
        assert list(choose_cores(setup.num_workers)) == (list(range(setup.num_workers)) if num_pipelines == 2 else [])
