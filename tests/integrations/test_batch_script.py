"""The batch script of `recycle slurm`: what it asks of Slurm, and that no name can break its shell."""

import shutil
import subprocess

import pytest

from recycle.cli.main import main
from recycle.core.errors import UserError
from recycle.integrations.job_commands import JobCommands
from recycle.integrations.slurm import SlurmJob, parse_time_limit, render_batch_script

HOSTILE = """/tmp/it's a "$(touch x)" `run` 100% & more"""
COMMANDS = JobCommands(f"{HOSTILE}/train.py", HOSTILE, f"{HOSTILE}/token", 29411, ("--steps", "7", "--plan", "a b"), 3)
JOB = SlurmJob(COMMANDS, 4, HOSTILE, "my job", gpus_per_node=8, partition="gpu", time_limit="24:00:00", program_folder=HOSTILE)


def variables_in(script, name):
    """The words of an array, as bash understands the lines of the script that set variables."""
    lines = script.splitlines()
    last = next(number for number, line in enumerate(lines) if line.startswith("export first_node"))
    text = "\n".join([*lines[:last], f"printf '%s\\0' \"${{{name}[@]}}\""])
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True, env={"SLURMD_NODENAME": "n"})
    return done.stdout.split("\0")[:-1]


def sbatch_flags(script):
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_bash_finds_no_mistake_in_the_script(tmp_path):
    file = tmp_path / "job.sbatch"
    file.write_text(render_batch_script(JOB))
    done = subprocess.run(["bash", "-n", file], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed: apt-get install shellcheck")
def test_shellcheck_finds_no_mistake_in_the_script(tmp_path):
    file = tmp_path / "job.sbatch"
    file.write_text(render_batch_script(JOB))
    done = subprocess.run(["shellcheck", "--severity=warning", file], capture_output=True, text=True)
    assert done.stdout == ""


def test_bash_reads_the_commands_of_the_job_whatever_characters_they_have():
    script = render_batch_script(JOB)
    assert variables_in(script, "start") == COMMANDS.coordinator("0.0.0.0")
    assert variables_in(script, "resume") == COMMANDS.resumed_coordinator("0.0.0.0")
    (host,) = variables_in(script, "coordinator_host")
    assert variables_in(script, "agent") == COMMANDS.agent(host)
    assert variables_in(script, "PATH")[0].startswith(f"{HOSTILE}:")


def test_a_lost_node_does_not_end_the_job_and_the_time_limit_only_queues_it_again():
    flags = sbatch_flags(render_batch_script(JOB))
    assert {"--no-kill", "--requeue", "--open-mode=append", "--signal=B:USR1@300", "--nodes=4"} <= set(flags)
    assert {"--gpus-per-node=8", "--partition=gpu", "--time=24:00:00", "'--job-name=my job'"} <= set(flags)


def test_a_users_flags_of_sbatch_come_last_and_so_outrank_ours():
    job = SlurmJob(COMMANDS, 4, "/", "a", sbatch_flags=("--constraint=a100", "--no-requeue"))
    assert sbatch_flags(render_batch_script(job))[-2:] == ["--constraint=a100", "--no-requeue"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("1-00:10", 87000),
        ("1-0:0:5", 86405),
        ("UNLIMITED", None),
    ],
)
def test_a_time_limit_is_read_as_sbatch_reads_it(text, seconds):
    assert parse_time_limit(text) == seconds


@pytest.mark.parametrize("changes", [{"time_limit": "6"}, {"time_limit": "soon"}, {"sbatch_flags": ("constraint",)}])
def test_a_job_that_could_not_train_is_refused(changes):
    with pytest.raises(UserError):
        SlurmJob(COMMANDS, 4, "/", "a", **changes)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_a_printed_script_writes_nothing(file, capsys):
    out = file.parent / "run"
    words = ["slurm", str(file), "--nodes", "2", "--out", str(out), "--print", "--", "--steps", "3"]
    assert main(words) == 0
    assert "--steps 3)" in capsys.readouterr().out
    assert not out.exists()


def test_the_files_of_tls_go_into_the_script_by_their_paths_and_need_not_be_here(file, capsys):
    words = [
        "slurm",
        str(file),
        "--nodes",
        "2",
        "--out",
        "run",
        "--print",
        "--tls-cert",
        "/etc/node.pem",
        "--tls-key",
        "/etc/node.key",
    ]
    assert main(words) == 2
    assert "give --tls-ca, too" in capsys.readouterr().err
    assert main([*words, "--tls-ca", "/etc/ca.pem"]) == 0
    script = capsys.readouterr().out
    for name in ("start", "resume", "agent"):
        line = " ".join(variables_in(script, name))
        assert "--tls-cert /etc/node.pem --tls-key /etc/node.key --tls-ca /etc/ca.pem" in line


def test_a_flag_that_the_coordinator_would_refuse_is_refused_before_the_job_is_queued(file, capsys):
    assert main(["slurm", str(file), "--nodes", "2", "--out", "run", "--print", "--", "--stepps", "3"]) == 2
    assert "--stepps" in capsys.readouterr().err


def test_without_sbatch_the_command_says_what_to_do(file, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["slurm", str(file), "--nodes", "2", "--out", str(file.parent / "run")]) == 2
    assert "print the script with --print" in capsys.readouterr().err
