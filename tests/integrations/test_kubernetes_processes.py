"""The commands of the manifests, run as processes: pods that end, are taken away and come back, to the weights of one machine.

Paths and the port of the manifests are replaced by those of the test. The volumes look as Kubernetes makes them: the token is a
link to a file that only its owner may read. No cluster takes part.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import recycle
from recycle.integrations.job_commands import PORT
from recycle.integrations.kubernetes import (
    JOB_FOLDER,
    METRICS_PORT,
    STOPPED_CODE,
    TOKEN_FOLDER,
    VOLUME,
    KubernetesJob,
    Resources,
    manifests,
    to_yaml,
)
from tests.cli.machines.test_agent import FILE
from tests.cli.machines.test_coordinator import free_port, num_steps, wait_for
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(280)
STEPS = 100


class Cluster:
    """The pods of a job as processes. The coordinator's is the shell of its manifest; that of an agent is the agent."""

    def __init__(self, folder: Path) -> None:
        job = KubernetesJob(
            *("small", "image", "train.py"),
            num_nodes=2,
            file_text=FILE,
            token="the-token-of-this-test",
            flags=(f"--steps={STEPS}", "--checkpoint.every=10"),
            workers_per_node=2,
            agent=Resources(),
            grace_s=60,
        )
        self.out, self.file = folder / "volume" / "small", folder / "job" / "train.py"
        self.port, self.metrics_port = free_port(), free_port()
        self._replaced = {
            f"0.0.0.0:{PORT}": f"127.0.0.1:{self.port}",
            f"small-coordinator:{PORT}": f"127.0.0.1:{self.port}",
            str(METRICS_PORT): str(self.metrics_port),
            VOLUME: str(self.out.parent),
            JOB_FOLDER: str(self.file.parent),
            TOKEN_FOLDER: str(folder / "token"),
        }
        self._log, self._programs = folder / "log", folder / "programs"
        self._found = {each["kind"]: each for each in yaml.safe_load_all(to_yaml(manifests(job)))}
        self._processes: list[subprocess.Popen[bytes] | WarmProcess] = []
        self._make_volumes(folder)

    def _make_volumes(self, folder: Path) -> None:
        for path in (self.out.parent, self.file.parent, folder / "token" / "..1", self._programs):
            path.mkdir(parents=True)
        self.file.write_text(self._found["ConfigMap"]["data"]["train.py"])
        for name, text in self._found["Secret"]["stringData"].items():
            secret = folder / "token" / "..1" / name
            secret.write_text(text)
            secret.chmod(0o400)
            (folder / "token" / name).symlink_to(Path("..data") / name)
        (folder / "token" / "..data").symlink_to("..1")
        program = self._programs / "recycle"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m recycle "$@"\n')
        program.chmod(0o755)

    def command(self, kind: str) -> list[str]:
        """The command of a manifest, with the paths and ports of this test."""
        words: list[str] = self._found[kind]["spec"]["template"]["spec"]["containers"][0]["command"]
        for old, new in self._replaced.items():
            words = [word.replace(old, new) for word in words]
        return words

    def start_coordinator(self, has_other_ports: bool = False) -> "subprocess.Popen[bytes]":
        words = self.command("Deployment")
        for port in (self.port, self.metrics_port) if has_other_ports else ():
            words = [word.replace(str(port), str(free_port())) for word in words]
        paths = {"PATH": f"{self._programs}:{os.environ['PATH']}", "PYTHONPATH": str(Path(recycle.__file__).parents[1])}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                words, env={**os.environ, **paths}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(process)
        return process

    def start_agent(self) -> WarmProcess:
        process = WarmProcess(self.command("Job")[1:])
        self._processes.append(process)
        return process

    def log(self) -> str:
        return self._log.read_text()

    def wait_for_steps(self, num: int) -> None:
        wait_for(lambda: num_steps(self.out) >= num, 120)

    def result(self) -> dict[str, Any]:
        """Wait until the coordinator says that the run is finished, and return its summary."""
        wait_for(lambda: "the run is finished" in self.log(), 150)
        found: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return found

    def end(self) -> None:
        for process in self._processes:
            kill(process)


def kill(process: "subprocess.Popen[bytes] | WarmProcess") -> None:
    """End a pod as a node that loses power: all its processes at once. Workers of an agent end with it."""
    if isinstance(process, subprocess.Popen):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait(30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the same job by one command on one machine."""
    file = tmp_path_factory.mktemp("alone") / "train.py"
    file.write_text(FILE)
    process = WarmProcess(["train", file, "--steps", STEPS, "--json"])
    printed, problems = process.communicate(timeout=150)
    assert process.returncode == 0, problems
    return str(json.loads(printed)["weights_sha256"])


def probe(port: int, is_over: threading.Event) -> None:
    """Connect and close, as the kubelet does to see whether a pod is ready, but a hundred times as often."""
    while not is_over.wait(0.1):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            pass


def test_the_commands_train_to_the_weights_of_one_machine_while_they_are_probed(cluster, weights):
    is_over = threading.Event()
    probing = threading.Thread(target=probe, args=(cluster.port, is_over))
    probing.start()
    try:
        agents = [cluster.start_agent() for _ in range(2)]  # they wait for the coordinator
        first = cluster.start_coordinator()
        cluster.wait_for_steps(5)
        with urllib.request.urlopen(f"http://127.0.0.1:{cluster.metrics_port}/metrics", timeout=10) as answer:
            assert b"recycle_step " in answer.read()
        result = cluster.result()
    finally:
        is_over.set()
        probing.join()
    assert (result["steps"], result["recoveries"], result["weights_sha256"]) == (STEPS, [], weights)
    assert [agent.wait(30) for agent in agents] == [0, 0]
    assert first.poll() is None  # it stays, and starts nothing again, so that its results can be read

    kill(first)
    cluster.start_coordinator()
    wait_for(lambda: cluster.log().count("the run is finished; its results are in ") == 2)
    assert cluster.result() == result


def test_a_coordinator_that_is_killed_resumes_by_the_same_command(cluster, weights):
    first = cluster.start_coordinator()
    wait_for((cluster.out / "config.toml").exists)
    assert cluster.start_coordinator(has_other_ports=True).wait(90) != 0
    assert "is in use by another run" in cluster.log()  # at most one coordinator has the folder
    agents = [cluster.start_agent() for _ in range(2)]
    cluster.wait_for_steps(12)
    os.killpg(first.pid, signal.SIGTERM)  # Kubernetes asks before it kills: the run must not end by that
    done = num_steps(cluster.out)
    cluster.wait_for_steps(done + 3)
    kill(first)
    cluster.start_coordinator()
    result = cluster.result()
    assert [agent.wait(30) for agent in agents] == [0, 0]
    assert "found again 4 workers" in cluster.log()
    assert result["recoveries"] == []  # no worker was lost
    assert result["weights_sha256"] == weights


def test_agents_that_are_taken_away_leave_with_a_checkpoint_and_a_cluster_that_loses_power_goes_on_from_one(cluster, weights):
    (cluster.out.parent / "small").mkdir()
    (cluster.out / "job.json").write_text('{"job": "cut-off"')  # a start that was cut off before it began anything
    first, agents = cluster.start_coordinator(), [cluster.start_agent() for _ in range(2)]
    cluster.wait_for_steps(3)
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    assert [agent.wait(60) for agent in agents] == [STOPPED_CODE] * 2  # not 0: the Job would be complete
    saved = [path.name for path in (cluster.out / "checkpoints").iterdir() if (path / "manifest.json").exists()]
    assert int(max(saved).removeprefix("step-")) == num_steps(cluster.out)  # nothing is lost

    agents = [cluster.start_agent() for _ in range(2)]
    cluster.wait_for_steps(25)
    for pod in (first, *agents):
        kill(pod)
    cluster.start_coordinator()
    agents = [cluster.start_agent() for _ in range(2)]
    result = cluster.result()
    assert [agent.wait(30) for agent in agents] == [0, 0]
    assert (result["steps"], result["weights_sha256"]) == (STEPS, weights)
