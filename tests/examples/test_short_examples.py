"""The short scripts of the examples: they run as a user runs them, and learn."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

from recycle.runtime.job import Job
from tests.examples.test_examples import ROOT, run

pytestmark = pytest.mark.timeout(300)
EXAMPLES = ROOT / "examples"
SHORT = ["language_model", "fine_tuning", "custom_model", "cluster_job", "vision"]


def load_transformers():
    return importlib.import_module("transformers")


def losses(printed):
    return map(float, re.search(r"loss (\S+) at first, (\S+) at last", printed).groups())


@pytest.mark.parametrize("name", SHORT)
def test_a_script_is_short(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    (docstring, *_) = ast.parse(text).body
    code = [line for line in text.splitlines()[docstring.end_lineno :] if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= 20


def test_a_convolutional_network_learns(tmp_path):
    first, last = losses(run(EXAMPLES / "vision.py", folder=tmp_path))
    assert last < 0.5 * first
    summary = json.loads((tmp_path / "runs" / "1" / "summary.json").read_text(encoding="utf-8"))
    assert [each["step"] for each in summary["evaluations"]] == [20, 40]


def test_stages_that_pass_a_dict_learn(tmp_path):
    first, last = losses(run(EXAMPLES / "custom_model.py", folder=tmp_path))
    assert last < 0.7 * first
    assert (tmp_path / "runs" / "1" / "summary.json").exists()


@pytest.mark.slow
def test_a_language_model_learns_and_is_trained_further_from_its_folder(tmp_path):
    shorter = tmp_path / "language_model.py"
    text = (EXAMPLES / "language_model.py").read_text(encoding="utf-8")
    shorter.write_text(text.replace("CONTEXT, STEPS = 64, 30", "CONTEXT, STEPS = 32, 12"), encoding="utf-8")
    first, last = losses(run(shorter, folder=tmp_path, prepare=load_transformers))
    assert last < 0.9 * first
    tuned_first, tuned_last = losses(
        run(EXAMPLES / "fine_tuning.py", "llama", "tuned", folder=tmp_path, prepare=load_transformers)
    )
    assert tuned_first < first
    assert tuned_last < 1.02 * tuned_first
    assert (tmp_path / "tuned" / "model.safetensors").exists()


def test_the_job_file_makes_the_job():
    made = importlib.import_module("examples.cluster_job").job()
    assert isinstance(made, Job)
    assert (made.samples_per_step, len(made.stages)) == (32, 2)
    assert Path(EXAMPLES / "README.md").read_text(encoding="utf-8").count("cluster_job.py") == 1
