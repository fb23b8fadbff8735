"""The commands of the manifests, run as processes: pods that end, are taken away and come back, to the weights of one machine.

Paths and the port of the manifests are replaced by those of the test. The volumes look as Kubernetes makes them: the token is a
link to a file that only its owner may read. No cluster takes part.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import recycle
from recycle.integrations.job_commands import PORT
from recycle.integrations.kubernetes import STOPPED_CODE, manifests, to_yaml
from recycle.integrations.kubernetes_job import (
    JOB_FOLDER,
    METRICS_PORT,
    TLS_FOLDER,
    TOKEN_FOLDER,
    VOLUME,
    KubernetesJob,
    Resources,
    TlsPems,
)
from tests.cli.machines.test_agent import FILE
from tests.cli.machines.test_coordinator import free_port, num_steps
from tests.control.store.etcd_cluster import etcd_cluster
from tests.control.store.etcd_cluster import missing as etcd_missing
from tests.processes import wait_for
from tests.tls_files import write_tls
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(280)
STEPS = 100


JOB = KubernetesJob(
    *("small", "image", "train.py"),
    num_nodes=2,
    file_text=FILE,
    token="the-token-of-this-test",
    # A busy machine would change plans: recoveries are counted.
    flags=(f"--steps={STEPS}", "--checkpoint.every=10", "--no-follow-speeds"),
    workers_per_node=2,
    agent=Resources(),
    grace_s=60,
)


class Cluster:
    """The pods of a job as processes. The coordinator's is the shell of its manifest; that of an agent is the agent."""

    def __init__(self, folder: Path, job: KubernetesJob = JOB) -> None:
        self.out, self.file = folder / "volume" / "small", folder / "job" / "train.py"
        self.port, self.metrics_port = free_port(), free_port()
        self._replaced = {
            f"0.0.0.0:{PORT}": f"127.0.0.1:{self.port}",
            f"small-coordinator:{PORT}": f"127.0.0.1:{self.port}",
            str(METRICS_PORT): str(self.metrics_port),
            VOLUME: str(self.out.parent),
            JOB_FOLDER: str(self.file.parent),
            TOKEN_FOLDER: str(folder / "token"),
            TLS_FOLDER: str(folder / "tls"),
        }
        self._log, self._programs = folder / "log", folder / "programs"
        found = list(yaml.safe_load_all(to_yaml(manifests(job))))
        self._found = {each["kind"]: each for each in found if each["kind"] != "Secret"}
        self._secrets = {
            "tls" if each["type"].endswith("tls") else "token": each["stringData"] for each in found if each["kind"] == "Secret"
        }
        self._processes: list[subprocess.Popen[bytes] | WarmProcess] = []
        self._make_volumes(folder)

    def _make_volumes(self, folder: Path) -> None:
        for path in (self.out.parent, self.file.parent, self._programs):
            path.mkdir(parents=True)
        self.file.write_text(self._found["ConfigMap"]["data"]["train.py"])
        for volume, texts in self._secrets.items():
            (folder / volume / "..1").mkdir(parents=True)
            for name, text in texts.items():
                secret = folder / volume / "..1" / name
                secret.write_text(text)
                secret.chmod(0o400)
                (folder / volume / name).symlink_to(Path("..data") / name)
            (folder / volume / "..data").symlink_to("..1")
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
        return self._start_shell(words)

    def _start_shell(self, words: list[str]) -> "subprocess.Popen[bytes]":
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


class SeveralCoordinators(Cluster):
    """A cluster whose two coordinators have ports and volumes of their own, as pods of a StatefulSet have."""

    def __init__(self, folder: Path, job: KubernetesJob) -> None:
        super().__init__(folder, job)
        self.ports, self._volumes = [free_port(), free_port()], [folder / "run-0", folder / "run-1"]
        self.outs = [volume / "small" for volume in self._volumes]
        for number, volume in enumerate(self._volumes):
            volume.mkdir()
            name = f"small-coordinator-{number}.small-coordinator:{PORT}"  # it ends with a name that would be replaced, too
            self._replaced = {name: f"127.0.0.1:{self.ports[number]}", **self._replaced}

    def start_member(self, number: int) -> "subprocess.Popen[bytes]":
        """Start the pod of a coordinator, on its volume."""
        changes = {
            str(self.out.parent): str(self._volumes[number]),
            f"127.0.0.1:{self.port}": f"127.0.0.1:{self.ports[number]}",
        }
        words = self.command("StatefulSet")
        for old, new in changes.items():
            words = [word.replace(old, new) for word in words]
        return self._start_shell(words)


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


@pytest.mark.skipif(bool(etcd_missing()), reason=etcd_missing())
def test_another_coordinator_takes_over_from_a_pod_that_is_gone_with_its_volume_and_all_use_tls(tmp_path, weights):
    tls = TlsPems.read(write_tls(tmp_path / "files", "127.0.0.1"))
    (tmp_path / "etcd").mkdir()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(etcd_cluster(tmp_path / "etcd", 1)).address("jobs/small")
        changes = {"tls": tls, "store": store, "num_coordinators": 2, "flags": (*JOB.flags, "--lease=2"), "metrics_port": 0}
        cluster = SeveralCoordinators(tmp_path, replace(JOB, **changes))
        stack.callback(cluster.end)
        first = cluster.start_member(0)
        wait_for((cluster.outs[0] / "job.json").exists, 60)
        second = cluster.start_member(1)
        wait_for(lambda: "standby: the coordinator at" in cluster.log(), 60)
        agents = [cluster.start_agent() for _ in range(2)]
        wait_for(lambda: num_steps(cluster.outs[0]) >= 5, 120)
        kill(first)
        shutil.rmtree(cluster.outs[0])
        wait_for(lambda: "the run is finished" in cluster.log(), 150)
        result = json.loads((cluster.outs[1] / "summary.json").read_text())
        assert (result["steps"], result["recoveries"], result["weights_sha256"]) == (STEPS, [], weights)
        assert [agent.wait(30) for agent in agents] == [0, 0]
        assert second.poll() is None

        kill(second)
        cluster.start_member(1)  # it finds its note that the run is finished, and does not ask the store
        wait_for(lambda: cluster.log().count("the run is finished; its results are in ") == 2)
        assert cluster.start_member(0).wait(60) == 2  # this one was gone when the run ended
        assert f"is over (all {STEPS} steps are done)" in cluster.log()
