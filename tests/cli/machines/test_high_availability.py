"""`recycle coordinator --store` with a real etcd: coordinators die with their folders, freeze and wake up, and etcd is away."""

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recycle.cli.main import main
from tests.cli.machines.test_agent import facts_of, pids
from tests.cli.machines.test_coordinator import free_port, num_steps, started
from tests.control.store.etcd_cluster import EtcdCluster, etcd_cluster, missing
from tests.processes import depends_on_load, wait_for

pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(bool(missing()), reason=missing())]
STEPS, LEASE_S, AWAY_S = 150, 2.0, float(os.environ.get("ETCD_AWAY_S", "10"))
# Samples take a while until a file is there: so the job is not over before the test has disturbed it.
FILE = """
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import recycle


class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        if not Path({flag!r}).exists():
            time.sleep(0.05)
        return torch.full((4,), number / 64), torch.ones(1)


def job():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    options = recycle.TrainOptions(is_exact=True)
    shape, stages = recycle.Shape(2, 2, 2), recycle.cut(model, [2])
    return recycle.Job(shape, stages, Numbers(), nn.functional.mse_loss, optimizer, {steps}, samples=2, options=options)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the same job by one command on one machine, undisturbed."""
    folder = tmp_path_factory.mktemp("alone")
    file = folder / "undisturbed.py"  # another test of this process may have loaded a train.py
    file.write_text(FILE.format(flag=str(folder), steps=STEPS))
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        assert main(["train", str(file), "--json"]) == 0
    return str(json.loads(printed.getvalue())["weights_sha256"])


_prefixes = itertools.count()


class Machines:
    """Two coordinators of a job, each with a folder of its own, and an agent with four workers that knows both."""

    def __init__(self, start: Any, cluster: EtcdCluster, folder: Path) -> None:
        cluster.start_all()
        self.flag, self.token, self.file = folder / "flag", folder / "token", folder / "train.py"
        self.file.write_text(FILE.format(flag=str(self.flag), steps=STEPS))
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.outs, self.store, self._start = [folder / "a", folder / "b"], cluster.address(f"ha/{next(_prefixes)}"), start
        self.coordinators = [self.coordinate(0)]
        wait_for(lambda: num_steps_or_job(self.outs[0]))
        self.coordinators.append(self.coordinate(1))
        self.agent = start("agent", ",".join(self.addresses), self.file, "--token-file", self.token, "--workers", "4")
        wait_for(lambda: num_steps(self.outs[0]) >= 3)
        wait_for(lambda: "standby: the coordinator at" in self.coordinators[1].printed()[1])

    def coordinate(self, number: int, *more: object) -> Any:
        words = ("--listen", self.addresses[number], "--token-file", self.token, "--out", self.outs[number], "--json")
        return self._start("coordinator", self.file, *words, "--store", self.store, "--lease", LEASE_S, *more)

    def takes_over(self, since_s: float, at_least: int = 1) -> float:
        """Wait until the second coordinator has recorded a step; return how long after `since_s` it led."""
        second = self.coordinators[1]
        wait_for(lambda: "this coordinator leads now" in second.printed()[1], 30)
        led_s = time.monotonic() - since_s
        print(f"another coordinator leads after {led_s:.2f} s, {led_s / LEASE_S:.2f} leases")
        wait_for(lambda: num_steps(self.outs[1]) >= at_least, 60)
        return led_s

    def finish(self, number: int) -> dict[str, Any]:
        """Let the job go on to its end under this coordinator; return its summary."""
        self.flag.touch()
        printed, words = self.coordinators[number].communicate(timeout=90)
        assert self.coordinators[number].returncode == 0, words
        assert self.agent.wait(30) == 0
        return dict(json.loads(printed))


def num_steps_or_job(out: Path) -> bool:
    return (out / "job.json").exists()


def warnings_of(out: Path) -> list[str]:
    return [event["text"] for event in facts_of(out, "warning")]


def test_another_coordinator_takes_over_from_one_that_was_killed_and_whose_folder_is_gone(
    cluster: EtcdCluster, tmp_path: Path, twin: str
) -> None:
    with started() as start:
        machines = Machines(start, cluster, tmp_path)
        machines.coordinators[0].kill()
        killed_s = time.monotonic()
        shutil.rmtree(machines.outs[0])
        led_s = machines.takes_over(killed_s)
        with depends_on_load():
            assert led_s < 2 * LEASE_S
        facts = machines.finish(1)
        assert (facts["steps"], facts["weights_sha256"]) == (STEPS, twin)
        assert facts["losses"][0] is None  # its record is gone
        assert facts["losses"][-1] is not None
        assert facts["saved_steps"] == STEPS
        again = machines.coordinate(0)
        _, words = again.communicate(timeout=60)
        assert again.returncode == 2
        assert f"the job of {machines.store} is over (all {STEPS} steps are done): name another prefix" in words


def test_of_two_coordinators_that_believe_to_lead_workers_obey_one(cluster: EtcdCluster, tmp_path: Path, twin: str) -> None:
    with started() as start:
        machines = Machines(start, cluster, tmp_path)
        frozen = machines.coordinators[0]
        os.kill(frozen.pid, signal.SIGSTOP)
        frozen_s = time.monotonic()
        led_s = machines.takes_over(frozen_s, 5)
        with depends_on_load():
            assert led_s < 2 * LEASE_S
        os.kill(frozen.pid, signal.SIGCONT)
        _, words = frozen.communicate(timeout=30)
        assert frozen.returncode == 25
        assert "another coordinator leads the job" in words
        before = num_steps(machines.outs[1])
        wait_for(lambda: num_steps(machines.outs[1]) >= before + 3)
        facts = machines.finish(1)
    assert (facts["steps"], facts["weights_sha256"]) == (STEPS, twin)


def test_nobody_notices_that_a_member_of_etcd_dies_and_a_worker_that_fails_while_all_are_away_waits_for_them(
    cluster: EtcdCluster, tmp_path: Path, twin: str
) -> None:
    with started() as start:
        machines = Machines(start, cluster, tmp_path)
        out = machines.outs[0]
        cluster.kill(0)
        before = num_steps(out)
        wait_for(lambda: num_steps(out) >= before + 5)
        assert facts_of(out, "recovery") == []

        cluster.kill_all()
        away_s, before = time.monotonic(), num_steps(out)
        wait_for(lambda: any("the store does not answer" in text for text in warnings_of(out)))
        wait_for(lambda: num_steps(out) >= before + 5)  # training does not need the store
        os.kill(pids(out)["W1_1"], signal.SIGKILL)
        wait_for(lambda: any("the job waits for the store" in text for text in warnings_of(out)))
        time.sleep(max(0.0, AWAY_S - (time.monotonic() - away_s)))
        assert facts_of(out, "recovery") == []
        cluster.start_all()
        wait_for(lambda: len(facts_of(out, "recovery")) >= 1)
        assert any("the store answers again" in text for text in warnings_of(out))
        before = num_steps(out)
        wait_for(lambda: num_steps(out) >= before + 3)
        facts = machines.finish(0)
        assert machines.coordinators[1].wait(30) == 0
        assert f"the job is over: all {STEPS} steps are done" in machines.coordinators[1].printed()[1]
    assert (facts["steps"], facts["weights_sha256"]) == (STEPS, twin)
