"""A job file: what it may be, what is refused and in which words, what flags change, and that machines have the same one."""

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recycle.cli.machines.job_description import describe_job, spec_from_description
from recycle.cli.measuring.profile import without_clipping
from recycle.cli.training.job_from_config import TrainingJobFactory
from recycle.cli.training.plan_choice import choose_plan
from recycle.cli.training.train_config import TrainConfig, parse_config
from recycle.control.net.handshake import Endpoint
from recycle.core.cluster import Shape
from recycle.core.errors import UserError
from recycle.core.plans.plan import Plan
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(240)
ENDPOINT = Endpoint("127.0.0.1", 1, "secret")
FILE = """
from functools import partial

import torch
from torch import nn

import recycle
from parts import SIZE, NUM_STEPS


class Ones:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return torch.full((SIZE,), number / 64), torch.ones(1)


def job():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(SIZE, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    options = recycle.TrainOptions(is_exact=True, seed=5)
    stages = recycle.cut(model, [2])
    return recycle.Job(PLAN, stages, Ones(), nn.functional.mse_loss, optimizer, NUM_STEPS, samples=2, options=options)
"""
SHAPE = "recycle.Shape(2, 2, 2)"
A_PLAN = 'recycle.solve(recycle.problem(2, 2, 2, fail="W1_1", costs=(1, 1, 1)))'


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    """Every test has job files of its own, under the same names."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("train", "parts"):
        sys.modules.pop(name, None)


def write(folder: Path, text: str = FILE, plan: str = SHAPE) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "parts.py").write_text("SIZE, NUM_STEPS = 4, 6\n")
    (folder / "train.py").write_text(text.replace("PLAN", plan))
    return folder / "train.py"


def factory_of(file: Path, keys: str = "") -> TrainingJobFactory:
    return TrainingJobFactory(parse_config(f"{keys}\n[job]\nfile = {json.dumps(str(file))}\n"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = (", "is no Python: line 1: '(' was never closed"),
        ("import recycle", "has no function job: define it as: def job() -> recycle.Job"),
        ("job = 3", "has no function job"),
        ("raise OSError('no disk')", "it failed in line 1: OSError: no disk"),
        ("import absent_module", "it failed in line 1: ModuleNotFoundError: No module named 'absent_module'"),
        ("def job():\n    return {}['data']", "job() failed in line 2: KeyError: 'data'"),
        ("import sys\ndef job():\n    sys.exit()", "job() failed in line 3: SystemExit"),
        ("def job():\n    return 3", "returns int, and no recycle.Job"),
        (FILE.replace("PLAN", "3"), "the plan is 3, but it must be a Plan or a Shape"),
        (FILE.replace("PLAN", "recycle.Shape(2, 3, 2)"), "the shape has 3 stages, but the model is cut into 2"),
    ],
)
def test_a_file_that_gives_no_job_is_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        factory_of(write(tmp_path, text))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [("absent.py", "there is no job file"), ("my-job.py", "cannot be imported by its name"), ("json.py", "rename the file")],
)
def test_a_file_that_workers_could_not_import_is_refused(name: str, says: str, tmp_path: Path) -> None:
    if name != "absent.py":
        write(tmp_path).rename(tmp_path / name)
    with pytest.raises(UserError, match=says):
        factory_of(tmp_path / name)


def test_a_job_keeps_what_no_key_changes(tmp_path: Path) -> None:
    factory = factory_of(write(tmp_path))
    job = factory.job(choose_plan(factory.config.cluster))
    assert (job.shape, job.steps, job.samples, job.options.seed, job.options.is_exact) == (Shape(2, 2, 2), 6, 2, 5, True)
    assert (factory.config.training.steps, factory.config.data.samples) == (6, 2)
    assert job.options.run_folder.name == "train"


def test_keys_that_are_given_change_the_job_and_no_others(tmp_path: Path) -> None:
    keys = """
    cluster = {pipelines = 3, lease = 7, restarts = 1}
    training = {steps = 4, exact = false, max_norm = 2.0, precision = "bfloat16", sums = "float64", lean_steps = "yes"}
    data = {samples = 1}
    checkpoint = {every = 3}
    """
    factory = factory_of(write(tmp_path), keys)
    job = factory.job(choose_plan(factory.config.cluster))
    options = job.options
    assert (job.shape, job.steps, job.samples) == (Shape(3, 2, 2), 4, 1)
    assert (options.is_exact, options.max_norm, str(options.autocast), str(options.sum_dtype)) == (
        False,
        2.0,
        "torch.bfloat16",
        "torch.float64",
    )
    assert (options.failures.lease_s, options.failures.restarts, options.checkpoint.every) == (7.0, 1, 3)
    assert (job.options.has_lean_steps, factory_of(write(tmp_path)).job(job.plan).options.lean_steps) == (True, None)
    assert (options.seed, options.failures.compare_every, options.checkpoint.keep) == (5, 10, 2)


def test_a_profile_is_measured_without_the_clipping_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, FILE.replace("seed=5", "max_norm=1.0"))
    config = factory_of(file).config
    assert factory_of(file).job(choose_plan(config.cluster)).options.max_norm == 1.0
    factory = TrainingJobFactory(without_clipping(config))
    assert factory.job(choose_plan(config.cluster)).options.max_norm is None


@pytest.mark.parametrize("key", ["model = {width = 8}", "training = {rate = 0.5}", 'data = {text = "a"}'])
def test_keys_of_the_built_in_model_are_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a key of the built-in GPT, but .*train\.py says itself what is trained: leave it"):
        factory_of(write(tmp_path), key)


def test_a_plan_in_the_file_counts_unless_a_key_says_how_to_plan(tmp_path: Path) -> None:
    file = write(tmp_path, plan=A_PLAN)
    assert isinstance(found := factory_of(file).plan, Plan)
    assert [str(worker) for worker in found.problem.cluster.failed] == ["W1_1"]
    assert factory_of(file, 'cluster = {dead = "W0_0"}').plan is None
    assert factory_of(file, "cluster = {lease = 5}").plan is not None


def test_the_file_in_the_run_folder_has_the_keys_that_were_given_and_the_path(tmp_path: Path) -> None:
    file = write(tmp_path)
    text = factory_of(file, "training = {steps = 4}").config.to_toml()
    assert parse_config(text) == parse_config(f"[training]\nsteps = 4\n[job]\nfile = {json.dumps(str(file))}\n")
    assert TrainConfig().to_toml().count("=") > 30


def described(file: Path, out: Path) -> dict[str, Any]:
    factory = factory_of(file)
    job = factory.job(choose_plan(factory.config.cluster), out)
    found: dict[str, Any] = json.loads(json.dumps(describe_job("a1b2", factory, job)))
    return found


def spec_here(file: Path | None, about: dict[str, Any], folder: Path) -> Any:
    for name in ("train", "parts"):
        sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if not path.startswith(str(folder))]
    return spec_from_description(ENDPOINT, folder, file, "", about)


def test_a_machine_with_the_same_files_elsewhere_takes_part(tmp_path: Path) -> None:
    about = described(write(tmp_path / "there"), tmp_path / "run")
    spec = spec_here(write(tmp_path / "here"), about, tmp_path)
    assert (spec.num_steps, spec.shape) == (6, Shape(2, 2, 2))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("train.py", ("lr=0.1", "lr=0.2"), r"the job's train\.py is .\w+., and here it is .\w+.; copy it from the coordinator's"),
        ("parts.py", ("4, 6", "4, 7"), r"the job's parts\.py is .\w+., and here it is .\w+.; copy it"),
    ],
)
def test_a_machine_with_another_file_is_refused(name: str, change: tuple[str, str], says: str, tmp_path: Path) -> None:
    about, file = described(write(tmp_path / "there"), tmp_path / "run"), write(tmp_path / "here")
    changed = file.with_name(name)
    changed.write_text(changed.read_text().replace(*change))
    with pytest.raises(UserError, match=says):
        spec_here(file, about, tmp_path)


def test_a_machine_whose_first_weights_are_others_is_refused(tmp_path: Path) -> None:
    text = FILE.replace("torch.manual_seed(3)", "torch.seed()")
    about, file = described(write(tmp_path / "there", text), tmp_path / "run"), write(tmp_path / "here", text)
    with pytest.raises(
        UserError, match=r"first weights of stage 0 is .\w+., and here it is .\w+.; seed them, with torch.manual_seed"
    ):
        spec_here(file, about, tmp_path)


def test_a_machine_without_the_file_is_told_which_one_it_needs(tmp_path: Path) -> None:
    about = described(write(tmp_path / "there"), tmp_path / "run")
    with pytest.raises(
        UserError, match=r"what is trained is in train\.py on the coordinator's machine: name this machine's copy"
    ):
        spec_here(None, about, tmp_path)


def finished(process: WarmProcess) -> dict[str, Any]:
    printed, problems = process.communicate(timeout=120)
    assert process.returncode == 0, problems
    facts: dict[str, Any] = json.loads(printed)
    return facts


def test_a_job_file_trains_to_the_same_weights_on_this_machine_and_by_workers_with_copies_of_it(tmp_path: Path) -> None:
    file, copy, out, token = write(tmp_path / "there"), write(tmp_path / "here"), tmp_path / "run", tmp_path / "token"
    stopped = finished(
        WarmProcess(["train", "train.py", "--kill", "W1_0@2", "--steps", "4", "--out", out, "--json"], file.parent)
    )
    assert stopped["steps"] == 4
    resumed = finished(WarmProcess(["train", "--resume", out, "--steps", "6", "--json"], tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["--listen", address, "--token-file", token, "--out", tmp_path / "several", "--json"]
    coordinator = WarmProcess(["coordinator", "train.py", *words], file.parent)
    while not token.exists():
        assert coordinator.poll() is None, coordinator.communicate()
        time.sleep(0.05)
    workers = [WarmProcess(["worker", address, "train.py", "--token-file", token], copy.parent) for _ in range(4)]
    facts = finished(coordinator)
    assert [worker.wait(20) for worker in workers] == [0] * 4
    assert (facts["weights_sha256"], facts["losses"]) == (resumed["weights_sha256"], resumed["losses"])
