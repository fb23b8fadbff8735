"""`recycle ray` on a real Ray cluster of three nodes on this machine. It takes a minute: CI runs it, `make test` does not."""

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from recycle.cli.main import main
from recycle.core.events.record import Placed, Recovered
from recycle.core.events.record_file import read_record
from recycle.integrations.ray_cluster import connected
from tests.cli.machines.test_coordinator import num_steps, wait_for
from tests.processes import is_there
from tests.tls_files import tls_flags, write_tls
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(600)
pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
STEPS, NUM_WORKERS, NUM_LOST, LIMIT_S = 600, 4, 2, 240.0
MEMORY_BYTES = 80 << 20
FILE = """
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import recycle
from model import make_model


class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        if not Path("{flag}").exists():
            time.sleep(0.1)  # steps take 0.4 s, and no processor, so that the job is not over before the machine is back
        return torch.full((4,), number / 64), torch.ones(1)


def job():
    optimizer, options = partial(torch.optim.SGD, lr=0.1), recycle.TrainOptions(is_exact=True)
    shape, stages = recycle.Shape(2, 2, 2), recycle.cut(make_model(), [2])
    return recycle.Job(shape, stages, Numbers(), nn.functional.mse_loss, optimizer, {steps}, samples=2, options=options)
"""
MODEL = """
import torch
from torch import nn


def make_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
"""


class Nodes:
    """A Ray cluster whose nodes are processes of this machine: the head and another node with one CPU each, and one with two."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        head = {"include_dashboard": False, "no_monitor": True, "temp_dir": str(folder)}
        self._cluster.add_node(num_cpus=1, object_store_memory=MEMORY_BYTES, **head)
        self._add(1)
        self._largest = self._add(NUM_LOST)
        self._cluster.wait_for_nodes()
        self.address = self._cluster.address

    def _add(self, num_cpus):
        options = {"object_store_memory": MEMORY_BYTES, "include_log_monitor": False}
        return self._cluster.add_node(wait=False, num_cpus=num_cpus, **options)

    def add(self) -> None:
        self._largest = self._add(NUM_LOST)

    def lose(self) -> None:
        """Kill all processes of the largest node, as of a machine that loses its power."""
        node = self._largest
        (raylet,) = node.all_processes["raylet"]
        for pid in [raylet.process.pid, *descendants(raylet.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    def num_cpus(self) -> float:
        return self._ask(lambda ray: ray.cluster_resources()["CPU"])

    def free_cpus(self) -> float:
        return self._ask(lambda ray: ray.available_resources()["CPU"])

    def _ask(self, question):
        """The answer of Ray, which this process connects to for that."""
        with connected(self.address) as ray:
            return question(ray)

    def shutdown(self) -> None:
        self._cluster.shutdown()


def descendants(pid: int) -> list[int]:
    try:
        children = [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *descendants(child))]


def processes_with(text: str) -> list[str]:
    """The command lines of all processes that contain a text."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [words] if text in words else []
    return found


@pytest.fixture(scope="module")
def nodes():
    folder = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # Ray's sockets are below: their paths must be short
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(wait_for, lambda: not processes_with(str(folder)), seconds=20)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        Path("/tmp/ray").mkdir(exist_ok=True)  # Ray writes the head's address there, whatever its folder is, and does not make it
        found = Nodes(folder)
        stack.callback(found.shutdown)
        yield found


def write_job(folder: Path, flag: Path) -> Path:
    file = folder / "train.py"
    file.write_text(FILE.format(flag=flag, steps=STEPS))
    (folder / "model.py").write_text(MODEL)
    return file


def recoveries(out: Path) -> list[Recovered]:
    return [event for event in read_record(out / "record.jsonl") if isinstance(event, Recovered)]


@contextlib.contextmanager
def driving(*words, is_script=False):
    """A driver, and a function that waits for something while the driver runs; the driver is ended afterwards."""
    driver = WarmProcess(words, is_script=is_script)

    def wait(what):
        end_s = time.monotonic() + LIMIT_S
        while not what():
            assert driver.poll() is None and time.monotonic() < end_s, "".join(driver.printed())  # noqa: PT018
            time.sleep(0.05)

    try:
        yield driver, wait
    finally:
        driver.kill()


def test_a_node_is_lost_and_another_one_comes_and_the_weights_are_those_of_one_machine(nodes, tmp_path):
    flag, out = tmp_path / "go", tmp_path / "run"
    file = write_job(tmp_path, flag)
    with driving("ray", file, "--address", nodes.address, "--out", out, "--checkpoint.every", "10", "--json") as (driver, wait):
        wait(lambda: num_steps(out) >= 5)
        nodes.lose()
        wait(lambda: bool(found := recoveries(out)) and found[-1].num_live == NUM_WORKERS - NUM_LOST)
        lost = num_steps(out)
        wait(lambda: num_steps(out) >= lost + 10)
        nodes.add()
        wait(lambda: recoveries(out)[-1].num_live == NUM_WORKERS)
        back = num_steps(out)
        flag.touch()
        printed, words = driver.communicate(timeout=LIMIT_S)
        assert driver.returncode == 0, words
    assert lost + 10 <= back < STEPS
    summary = json.loads(printed)
    assert (summary["steps"], recoveries(out)[-1].num_live) == (STEPS, NUM_WORKERS)
    assert words.count("is lost, with its actor on") == NUM_LOST
    assert "worker 0 | joined job" in words  # a line of a worker, which Ray brought
    with driving("train", file, "--json") as (twin, _):  # not in this process, which may have loaded another train.py
        printed, words = twin.communicate(timeout=LIMIT_S)
        assert twin.returncode == 0, words
    assert summary["weights_sha256"] == json.loads(printed)["weights_sha256"]


SCRIPT = """
import sys
from functools import partial

import torch
from torch import nn

import recycle
from recycle.integrations.ray import RayOptions, train


class Ones:
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.ones(4), torch.ones(1)


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer, shape = partial(torch.optim.SGD, lr=0.1), recycle.Shape(1, 2, 2)
    job = recycle.Job(shape, recycle.cut(model, [1]), Ones(), nn.functional.mse_loss, optimizer, steps=100000)
    try:
        train(job, out=sys.argv[2], options=RayOptions(address=sys.argv[1]))
    except recycle.UserError as problem:
        print(problem)
        sys.exit(problem.exit_code)
"""


def test_an_interrupted_driver_leaves_a_checkpoint_and_nothing_on_the_cluster(nodes, tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    with driving(script, nodes.address, out, is_script=True) as (driver, wait):
        wait(lambda: num_steps(out) >= 5)
        workers = {event.pid for event in read_record(out / "record.jsonl") if isinstance(event, Placed)}
        os.kill(driver.pid, signal.SIGINT)
        printed, words = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 128 + signal.SIGINT, words
    (saved,) = (out / "checkpoints").glob("step-*")
    assert re.search(rf"stopped after step {int(saved.name[5:])} of 100000.*; go on with: recycle ray --resume {out}", printed)
    assert len(workers) == 2
    assert not [pid for pid in workers if is_there(pid)]
    assert nodes.free_cpus() == nodes.num_cpus()


@pytest.mark.slow
def test_control_connections_of_coordinator_and_agents_use_tls(nodes, tmp_path):
    flag, out = tmp_path / "go", tmp_path / "run"
    flag.touch()
    file, tls = write_job(tmp_path, flag), write_tls(tmp_path / "tls", nodes.address.rpartition(":")[0])
    words = ("--address", nodes.address, "--steps", "20", "--json", *tls_flags(tls))
    with driving("ray", file, "--out", out, *words) as (driver, _):
        printed, words = driver.communicate(timeout=LIMIT_S)
        assert driver.returncode == 0, words
    assert json.loads(printed)["steps"] == 20
    assert recoveries(out) == []


def test_a_job_that_cannot_run_is_refused_with_a_reason(nodes, tmp_path, capsys):
    empty, file = tmp_path / "empty.py", write_job(tmp_path, tmp_path / "go")
    empty.write_text("")
    for given, more, says in (
        (empty, (), "empty.py has no function job: define it as: def job() -> recycle.Job"),
        (
            file,
            ("--cpus-per-worker", "2", "--wait", "1"),
            "4 workers need 2 CPU each; the cluster of 3 machines has 4 CPU, room for 1",
        ),
    ):
        out = tmp_path / f"run-{len(more)}"
        assert main(["ray", str(given), "--address", nodes.address, "--out", str(out), *more]) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("recycle ray: ")
        assert says in last
