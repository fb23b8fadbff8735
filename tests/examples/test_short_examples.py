"""The short scripts of the examples: they run as a user runs them, and learn."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest

from recycle.runtime.job import Job
from tests.cli.machines.test_coordinator import free_port, started
from tests.examples.test_examples import ROOT, run
from tests.processes import wait_for
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(300)
EXAMPLES = ROOT / "examples"
SHORT = ["language_model", "tokenized_text", "fine_tuning", "custom_model", "cluster_job", "vision"]


def load_transformers():
    return importlib.import_module("transformers")


def losses(printed):
    return map(float, re.search(r"loss (\S+) at first, (\S+) at last", printed).groups())


@pytest.mark.parametrize("name", SHORT)
def test_a_script_is_short(name):
    """Its docstring, empty lines and lines of comments are not counted, as README.md says."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    (docstring, *_) = ast.parse(text).body
    code = [line for line in text.splitlines()[docstring.end_lineno :] if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= 20


def test_a_convolutional_network_learns(tmp_path):
    first, last = losses(run(EXAMPLES / "vision.py", folder=tmp_path))
    assert last < 0.5 * first
    summary = json.loads((tmp_path / "runs" / "1" / "summary.json").read_text(encoding="utf-8"))
    assert [each["step"] for each in summary["evaluations"]] == [20, 40]


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_model_a_dataset_and_a_tokenizer_of_hugging_face_are_trained_and_loaded_again(tmp_path):
    shorter = tmp_path / "tokenized_text.py"
    text = (EXAMPLES / "tokenized_text.py").read_text(encoding="utf-8")
    shorter.write_text(text.replace("steps=30", "steps=16"), encoding="utf-8")
    first, last = losses(run(shorter, folder=tmp_path, prepare=load_transformers))
    assert last < 0.95 * first
    transformers = load_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "text-model")
    words = "if a class defines __getattr__"
    ids = tokenizer(words, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == words
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text-model")(ids).logits.shape == (1, ids.shape[1], 1000)


@pytest.mark.slow
def test_the_job_file_trains_with_agents_as_on_several_machines(tmp_path):
    """The losses and the weights are those of one machine."""
    file, token, out = EXAMPLES / "cluster_job.py", tmp_path / "token", tmp_path / "run"
    address = f"127.0.0.1:{free_port()}"
    job = ("--steps", "6", "--exact", "--json")
    with started() as start:
        coordinator = start("coordinator", file, "--listen", address, "--token-file", token, "--out", out, *job)
        wait_for(token.exists)
        agents = [start("agent", address, file, "--token-file", token, "--workers", "2") for _ in range(2)]
        printed, words = coordinator.communicate(timeout=200)
        assert coordinator.returncode == 0, words
        assert [agent.wait(timeout=30) for agent in agents] == [0, 0]
    alone = WarmProcess(["train", file, *job], tmp_path, prepare=load_transformers)
    expected, words = alone.communicate(timeout=200)
    assert alone.returncode == 0, words
    summaries = json.loads(printed), json.loads(expected)
    assert [len(each["losses"]) for each in summaries] == [6, 6]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert summaries[0]["losses"] == summaries[1]["losses"]


def test_the_job_file_makes_the_job():
    made = importlib.import_module("examples.cluster_job").job()
    assert isinstance(made, Job)
    assert (made.samples_per_step, len(made.stages)) == (32, 2)
    assert Path(EXAMPLES / "README.md").read_text(encoding="utf-8").count("cluster_job.py") == 1
