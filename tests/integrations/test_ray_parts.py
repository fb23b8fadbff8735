"""What `recycle ray` does without a cluster: its flags, its errors, the room that workers need."""

import sys

import pytest

from recycle.cli.main import main, make_parser
from recycle.cli.training.train_config import given_flags, read_config
from recycle.core.errors import UserError
from recycle.core.files import write_secret
from recycle.integrations.job_commands import JobCommands
from recycle.integrations.ray_agent import AgentSpec
from recycle.integrations.ray_cluster import num_places
from recycle.integrations.ray_job import CoordinatedJob
from tests.cli.machines.test_coordinator import free_port


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def problem_of(capsys, *words):
    """The sentence with which `recycle ray` refuses these words."""
    assert main(["ray", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_machine_without_ray_is_told_how_to_install_it(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "install it with pip install -e '.[ray]' in a clone of ReCycle" in problem_of(capsys, file)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--address", "127.0.0.1:{port}"], "there is no Ray cluster at 127.0.0.1:{port} (Connection refused): start one with"),
        (["--address", "ray://10.0.0.1:10001"], "run this there, or with 'ray job submit'"),
        (["--address", "somewhere"], "'somewhere' is no address of a Ray cluster: write HOST:PORT, or auto"),
        (["--cpus-per-worker", "0"], "a worker cannot have 0 CPUs"),
        (["--working-dir", "absent"], "there is no folder absent"),
        (["--resume", "runs/a"], "--resume goes on with what is in its folder: leave FILE and --out out"),
    ],
)
def test_wrong_words_get_one_sentence(words, says, file, capsys):
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    port = str(free_port())
    assert says.format(port=port) in problem_of(capsys, file, *(word.format(port=port) for word in words))


def test_a_job_file_that_is_not_there_is_refused_before_a_cluster_is_looked_for(capsys):
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    assert "there is no job file absent.py" in problem_of(capsys, "absent.py")


def test_the_coordinator_gets_the_flags_that_change_the_job(file):
    words = [file, "--steps", "7", "--exact", "--checkpoint.every", "3", "--lease", "2.5", "--no-measure"]
    args = make_parser().parse_args(["ray", *words])
    again = make_parser().parse_args(["coordinator", file, "--token-file", "token", *given_flags(args)])
    assert read_config(again) == read_config(args)
    assert read_config(args).training.steps == 7


def test_a_worker_has_room_only_on_one_machine():
    machines = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 3.0, "GPU": 4.0}, {"CPU": 64.0}]
    assert num_places(machines, {"CPU": 2.0, "GPU": 1.0}) == 4 + 1
    assert num_places(machines, {"CPU": 0.1}) == 80 + 30 + 640
    assert num_places([], {"CPU": 1.0}) == 0


def test_a_job_on_gpus_needs_one_for_each_worker_and_another_job_none(tmp_path):
    on_gpus, on_cpus = (CoordinatedJob(tmp_path / "train.py", (), device, 4) for device in ("cuda", "cpu"))
    assert (on_gpus.needs(2.0), on_gpus.gpus) == ({"CPU": 2.0, "GPU": 1.0}, None)
    assert (on_cpus.needs(2.0), on_cpus.gpus) == ({"CPU": 2.0}, "none")
    with pytest.raises(UserError, match="the job has 4 places"):
        on_gpus.refuse_too_few(3)
    on_gpus.refuse_too_few(5)


def test_the_token_is_for_its_owner_only_and_not_shown(tmp_path):
    path = write_secret(tmp_path / "token", "abc123")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("abc123\n", 0o600)
    spec = AgentSpec(JobCommands("train.py", "out", "token"), "10.0.0.1", "abc123")
    assert "abc123" not in f"{spec!r} {spec}"
    assert not [word for word in spec.commands.agent(spec.host) if "abc123" in word]
