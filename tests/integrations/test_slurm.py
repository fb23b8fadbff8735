"""A job file as a batch job of a real Slurm: nodes are lost, the job is queued again, and the weights stay the same."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from recycle.cli.main import main
from recycle.core.events.record import Placed, Recovered, Resumed
from recycle.core.events.record_file import SUMMARY, read_record
from tests.integrations.slurm_cluster import SlurmCluster, free_ports, missing
from tests.tls_files import tls_flags, write_tls

NODES = ("n1", "n2", "n3")
STEPS, LIMIT_S = 80, 240
# Samples take a while until a file is there: so the job is not over before the test has disturbed it.
JOB = """
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import recycle


class Waves(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, number):
        if not Path({flag!r}).exists():
            time.sleep(0.1)
        x = 4 * torch.rand(2, generator=torch.Generator().manual_seed(number)) - 2
        return x, torch.sin(3 * x[:1]) * x[1:]


def job():
    torch.manual_seed(0)
    stages = recycle.cut(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)), [2])
    return recycle.Job(
        recycle.Shape(3, 2, 3),
        stages,
        Waves(),
        nn.functional.mse_loss,
        partial(torch.optim.AdamW, lr=1e-2),
        steps={steps},
        samples=2,
        options=recycle.TrainOptions(is_exact=True),
    )
"""
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), NODES) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights of the same job by one command on one machine."""
    folder = tmp_path_factory.mktemp("alone")
    file = write_job(folder, folder)
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        assert main(["train", str(file), "--json"]) == 0
    return json.loads(printed.getvalue())["weights_sha256"]


def write_job(folder: Path, flag: Path) -> Path:
    file = folder / "train.py"
    file.write_text(JOB.format(flag=str(flag), steps=STEPS))
    return file


class BatchJob:
    """A job file that runs on the cluster, three nodes with two workers each. It is slow until `hurry`."""

    def __init__(self, cluster, folder, *more):
        self._cluster, self.out, self._flag = cluster, folder / "a run", folder / "flag"
        self._words = ["slurm", str(write_job(folder, self._flag)), "--nodes", "3", "--workers-per-node", "2"]
        self._words += ["--cpus-per-node", "4", "--out", str(self.out), "--port", str(free_ports(1)[0]), *more]
        self.number = ""

    def submit(self, monkeypatch, *flags):
        """Submit it by one command."""
        with monkeypatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
            patch.setenv("SLURM_CONF", str(self._cluster.config))
            assert main([*self._words, "--", *flags]) == 0
        self.number = printed.getvalue().split()[1]

    def submit_printed(self, *flags):
        """Submit the printed script by sbatch; steps look often for the loss of the first node."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert main([*self._words, "--print", "--", *flags]) == 0
        script = self.out.parent / "printed.sh"
        assert "sleep 60" in printed.getvalue()
        script.write_text(printed.getvalue().replace("sleep 60", "sleep 1"))
        self.out.mkdir()
        self.number = self._cluster.ask("sbatch", "--parsable", str(script))
        assert self.number

    def hurry(self):
        self._flag.touch()

    def events(self, kind):
        with contextlib.suppress(OSError):
            return [event for event in read_record(self.out / "record.jsonl") if isinstance(event, kind)]
        return []

    def num_steps(self):
        with contextlib.suppress(OSError):
            return (self.out / "record.jsonl").read_bytes().count(b'"event":"step"')
        return 0

    def wait_for(self, what, problem):
        printed = (path.read_text()[-3000:] for path in self.out.glob("slurm-*.out"))
        self._cluster.wait_for(what, LIMIT_S, problem + "\n" + "\n".join(printed))

    def wait_for_steps(self, num):
        end = self.num_steps() + num
        self.wait_for(lambda: self.num_steps() >= end, "no steps are done")

    def wait_for_live(self, num):
        self.wait_for(lambda: (found := self.events(Recovered)) and found[-1].num_live == num, f"{num} were never live")

    def wait_for_start(self, restarts):
        """Wait until Slurm has started the job again so often, and training goes on."""
        self.wait_for(lambda: self._cluster.job(self.number).get("Restarts") == str(restarts), "it was not queued again")
        self.wait_for(lambda: len(self.events(Resumed)) == restarts, "it was not resumed")

    def finish(self):
        """Wait for the end of the job, which must be a good one; return its weights."""
        self.wait_for(lambda: self._cluster.job(self.number).get("JobState") not in ("RUNNING", "PENDING"), "it does not end")
        assert self._cluster.job(self.number)["ExitCode"] == "0:0", self.printed()
        return json.loads((self.out / SUMMARY).read_text())["weights_sha256"]

    def printed(self):
        return "".join(path.read_text() for path in self.out.glob("slurm-*.out"))


@pytest.mark.slow
def test_a_job_whose_control_connections_use_tls_trains_to_the_same_weights(cluster, alone, tmp_path, monkeypatch):
    job = BatchJob(cluster, tmp_path, *tls_flags(write_tls(tmp_path / "tls", *NODES)))
    job.hurry()
    job.submit(monkeypatch)
    assert job.finish() == alone


def test_a_lost_node_does_not_end_the_job_and_a_failed_agent_is_started_again(cluster, alone, tmp_path, monkeypatch):
    job = BatchJob(cluster, tmp_path)
    job.submit(monkeypatch)
    job.wait_for_steps(2)
    assert sorted(event.host for event in job.events(Placed)) == sorted(NODES * 2)
    assert (job.out / "token").stat().st_mode & 0o777 == 0o600
    cluster.ask("scancel", "--signal=KILL", cluster.steps(job.number)["n2"])
    job.wait_for_live(4)
    job.wait_for_live(6)
    cluster.kill_node("n3")
    job.wait_for_live(4)
    job.hurry()
    assert job.finish() == alone
    assert "the agent on n2 failed, and is started again" in job.printed()
    cluster.start_node("n3")


def test_a_job_that_is_queued_again_goes_on_from_its_checkpoint(cluster, alone, tmp_path):
    """First as by the end of its time, with a checkpoint of that moment; then because the first node is lost."""
    job = BatchJob(cluster, tmp_path)
    cluster.wait_for(lambda: set(cluster.states().values()) == {"idle"}, 60, "the nodes are not back")
    job.submit_printed("--checkpoint.every", "1000")
    job.wait_for_steps(2)
    cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for_start(1)
    assert 2 <= job.events(Resumed)[0].num_steps < STEPS
    cluster.kill_node("n1")
    cluster.ask("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=test")
    job.wait_for(lambda: cluster.job(job.number).get("JobState") == "PENDING", "it was not queued again")
    cluster.start_node("n1")
    job.wait_for_start(2)
    job.hurry()
    assert job.finish() == alone
    cluster.wait_for(lambda: set(cluster.states().values()) == {"idle"}, 60, "it did not free its nodes")
    assert cluster.job(job.number)["Restarts"] == "2"  # a job that is over is not queued again
