"""`recycle coordinator` and `recycle worker`, as on several machines: real processes that only know an address and a token."""

import contextlib
import io
import json
import os
import re
import resource
import signal
import socket
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import pytest

from recycle.cli.machines.coordinator import _settled
from recycle.cli.machines.job_description import describe_job, spec_from_description
from recycle.cli.main import main
from recycle.cli.training.job_from_config import TrainingJobFactory
from recycle.cli.training.plan_choice import choose_plan
from recycle.cli.training.train_config import TrainConfig, parse_config
from recycle.cli.training.train_sections import ClusterSection
from recycle.control.net.file_transfer import FileTransfer
from recycle.control.net.handshake import Endpoint
from recycle.core.errors import NotSaved, UserError
from recycle.core.events.record import Placed, Recovered
from recycle.core.events.record_file import read_record
from recycle.host.folder_lock import locked
from recycle.runtime.worker.worker import REFUSED
from tests.processes import wait_for
from tests.warm_processes import WarmProcess

pytestmark = pytest.mark.timeout(240)
STEPS = 40
JOB = (
    *("--pipelines", "2", "--stages", "2", "--microbatches", "2", "--steps", str(STEPS), "--exact"),
    *("--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--samples", "1"),
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def started():
    """A function that starts commands; whatever still runs in the end is ended."""
    processes = []

    def start(*words, is_script=False):
        processes.append(WarmProcess(words, is_script=is_script))
        return processes[-1]

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def alone():
    """What comes of the same job by one command on one machine."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["train", *JOB, "--json"]) == 0
    return json.loads(printed.getvalue())


def num_events(out, kind):
    with contextlib.suppress(FileNotFoundError):
        return (out / "record.jsonl").read_text(encoding="utf-8").count(f'"event":"{kind}"')
    return 0


def placed(out):
    """The place of each process that the record of a run has so far, the last one if it had several."""
    with contextlib.suppress(FileNotFoundError):
        return {event.pid: event.node for event in read_record(out / "record.jsonl") if isinstance(event, Placed)}
    return {}


def num_steps(out):
    return num_events(out, "step")


@pytest.mark.slow
def test_a_worker_and_the_coordinator_are_killed_and_come_back_and_the_weights_are_those_of_one_machine(alone, tmp_path):
    out, token, address = tmp_path / "run", tmp_path / "token", f"127.0.0.1:{free_port()}"
    wrong = tmp_path / "wrong"
    wrong.write_text("something else\n")
    wrong.chmod(0o600)
    coordinator = ("coordinator", *JOB, "--listen", address, "--token-file", token, "--out", out, "--json")
    worker = ("worker", address, "--token-file", token)
    with started() as start:
        first = start(*coordinator)
        wait_for(token.exists)
        assert token.stat().st_mode & 0o077 == 0
        stranger = start("worker", address, "--token-file", wrong)
        workers = [start(*worker) for _ in range(4)]
        wait_for(lambda: num_steps(out) >= 3)
        _, problems = stranger.communicate(timeout=60)
        assert (stranger.returncode, "this is not the job's token" in problems) == (REFUSED, True)
        pids = [process.pid for process in workers]
        os.kill(workers[0].pid, signal.SIGKILL)
        workers[0] = start(*worker)
        wait_for(lambda: num_events(out, "recovery") >= 1)
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        again = start(*coordinator)
        printed, problems = again.communicate(timeout=150)
        assert again.returncode == 0, problems
        summary = json.loads(printed)
        for process in workers[1:]:
            _, words = process.communicate(timeout=20)
            assert process.returncode == 0
            assert re.search(
                r"joined job \w+, and loads it\n.*: ready, and waits for its place\n.* W\d_\d in epoch 1, of 4", words
            )
    events = [event for event in read_record(out / "record.jsonl") if isinstance(event, Placed)]
    assert {event.pid for event in events} == {*pids, workers[0].pid}
    assert {event.host for event in events} == {socket.gethostname()}
    assert len(events) == 5  # the coordinator that took over wrote none again
    assert len(summary["losses"]) == STEPS
    assert summary["recoveries"][0]["cause"] == "its connection closed"
    assert summary["weights_sha256"] == alone["weights_sha256"]
    assert summary["losses"] == alone["losses"]


def test_a_spare_replaces_a_worker_that_leaves_and_all_stop_with_a_checkpoint_when_the_coordinator_is_asked_to(tmp_path):
    out, token, address = tmp_path / "run", tmp_path / "token", f"[::1]:{free_port()}"  # tensors go by IPv6, too
    job = [word if word != str(STEPS) else "100000" for word in JOB]
    job += ["--lease", "15", "--no-follow-speeds"]  # on a busy machine nobody is to be given up, nor named slow
    with started() as start:
        coordinator = start("coordinator", *job, "--listen", address, "--token-file", token, "--out", out, "--json")
        wait_for(token.exists)
        workers = [start("worker", address, "--token-file", token) for _ in range(5)]
        wait_for(lambda: num_steps(out) >= 3)
        (spare,) = [worker for worker in workers if worker.pid not in placed(out)]
        leaver = workers[0] if workers[0] is not spare else workers[1]
        os.kill(leaver.pid, signal.SIGTERM)
        assert leaver.wait(30) == 0
        wait_for(lambda: spare.pid in placed(out))
        steps = num_steps(out)
        wait_for(lambda: num_steps(out) >= steps + 3)
        os.kill(coordinator.pid, signal.SIGTERM)
        printed, words = coordinator.communicate(timeout=60)
        assert [worker.wait(20) for worker in workers] == [0] * 5
    steps = json.loads(printed)["steps"]
    (left,) = [event for event in read_record(out / "record.jsonl") if isinstance(event, Recovered)]
    assert (left.workers, left.cause, left.redone_ops, left.num_live) == (
        (placed(out)[leaver.pid],),
        "it was asked to leave",
        0,
        4,
    )
    assert placed(out)[spare.pid] == placed(out)[leaver.pid]
    assert coordinator.returncode == 128 + signal.SIGTERM
    assert (
        f"stopped after step {steps} of 100000, and all workers with it; go on with: recycle coordinator --resume {out}" in words
    )
    assert (out / "checkpoints" / f"step-{steps:08d}").is_dir()


def page_of(port):
    """What the page says about the only run that it shows; None if nobody serves it, or there is no run yet."""
    with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/api/run?id=.", timeout=10) as answer:
        return json.load(answer)
    return None


def test_the_page_of_a_coordinator_is_there_before_and_while_workers_train_and_ends_with_it(tmp_path):
    out, token, address, port = tmp_path / "run", tmp_path / "token", f"127.0.0.1:{free_port()}", free_port()
    job = [word if word != str(STEPS) else "100000" for word in JOB]
    with started() as start:
        coordinator = start(
            *("coordinator", *job, "--listen", address, "--token-file", token, "--out", out),
            *("--dashboard", str(port), "--json"),
        )
        wait_for(lambda: page_of(port) is not None)
        wait_for(lambda: page_of(port)["waiting"] == "4 workers are starting")
        workers = [start("worker", address, "--token-file", token) for _ in range(4)]
        wait_for(lambda: page_of(port)["steps_done"] >= 3)
        # On a busy machine one may be slow; what is asked is that all four are there.
        assert [each["state"] in ("alive", "slow") for each in page_of(port)["workers"].values()] == [True] * 4
        os.kill(coordinator.pid, signal.SIGTERM)
        _, words = coordinator.communicate(timeout=60)
        assert f"the page of this run: http://127.0.0.1:{port}" in words
        assert [worker.wait(20) for worker in workers] == [0] * 4
    assert page_of(port) is None


@pytest.mark.parametrize(
    ("host", "more", "reached_at", "is_elsewhere"),
    [
        ("0.0.0.0", [], f"{socket.gethostname()}:PORT", True),
        ("127.0.0.1", [], "127.0.0.1:PORT", False),
        ("[::1]", [], "[::1]:PORT", False),
        ("127.0.0.1", ["--advertise", "gate.example:77"], "gate.example:77", True),
    ],
)
def test_a_coordinator_prints_an_address_that_workers_can_use(
    host, more, reached_at, is_elsewhere, tmp_path, monkeypatch, capsys
):
    served = []
    monkeypatch.setattr(
        "recycle.runtime.coordinator.process.serve_job",
        lambda config, listener, *_, **__: served.append((config, listener.getsockname()[1])),
    )
    words = ["--listen", f"{host}:0", "--token-file", str(tmp_path / "token"), "--out", str(tmp_path / "run"), *more]
    main(["coordinator", *JOB, *words])
    ((config, port),) = served
    printed = capsys.readouterr().err
    assert f": recycle agent {reached_at.replace('PORT', str(port))} --token-file token\n" in printed
    assert "0.0.0.0" not in printed
    assert config.about["serves_machines"] == is_elsewhere


# A worker that sees neither the run's folder nor the coordinator's processes: as on a machine of its own.
ELSEWHERE = """
import sys
import recycle.cli.machines.job_description, recycle.control.net.handshake
from recycle.cli.main import main
recycle.control.net.handshake.this_host = lambda: "elsewhere"
recycle.cli.machines.job_description.read_job = lambda out: {}
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_machines_with_small_disks_of_their_own_lose_a_whole_stage_and_one_that_hung_wakes_up_too_late(alone, tmp_path):
    job, script = (*JOB, "--checkpoint.every", "5"), tmp_path / "elsewhere.py"
    script.write_text(ELSEWHERE)
    out, token, address = tmp_path / "run", tmp_path / "token", f"127.0.0.1:{free_port()}"
    with started() as start:
        coordinator = start("coordinator", *job, "--listen", address, "--token-file", token, "--out", out, "--json")
        wait_for(token.exists)
        worker = partial(start, script, "worker", address, "--token-file", token, "--place", is_script=True)
        workers = {place: worker(place) for place in ("W0_0", "W1_0", "W0_1", "W1_1")}
        wait_for(lambda: (out / "checkpoints" / "step-00000005" / "manifest.json").exists())
        os.kill(workers["W0_0"].pid, signal.SIGSTOP)
        wait_for(lambda: num_events(out, "recovery") == 1)
        for place in ("W0_1", "W1_1"):  # no stage has room on their disks any more, neither to be sent nor as it comes
            resource.prlimit(workers[place].pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
        os.kill(workers["W1_0"].pid, signal.SIGKILL)
        printed, problems = coordinator.communicate(timeout=150)
        assert coordinator.returncode == NotSaved.exit_code, problems
        os.kill(workers["W0_0"].pid, signal.SIGCONT)  # nobody listens any more, but what it was told before is still there
        _, words = workers["W0_0"].communicate(timeout=60)
        assert "turned away: it was taken for dead: silent for" in words
        assert [workers[place].wait(20) for place in ("W0_1", "W1_1")] == [0, 0]
    summary = json.loads(printed)
    assert [recovery["worker"] for recovery in summary["recoveries"]] == ["W0_0", "W1_0"]
    assert summary["recoveries"][0]["cause"].startswith("silent")
    assert len(summary["recoveries"][1]["moves"]) == 1
    unsaved = rf"there is no checkpoint of {STEPS} steps, but training goes on: W._.: cannot write .*: File too large"
    assert re.fullmatch(unsaved, summary["warnings"][-1])
    assert summary["weights_sha256"] == alone["weights_sha256"]
    assert summary["losses"] == alone["losses"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["worker", "here", "--token-file", "token"], "'here' is no address: write HOST:PORT"),
        (["worker", "here:２９", "--token-file", "token"], "'here:２９' is no address: write HOST:PORT"),
        (["worker", "127.0.0.1:1", "--token-file", "absent"], "cannot read the token in absent"),
        (["worker", "127.0.0.1:1", "--token-file", "open"], "can be read by others on this machine: chmod 600 open"),
        (["worker", "127.0.0.1:1", "--token-file", "empty"], "empty holds no token"),
        (["worker", "127.0.0.1:1", "--token-file", "token", "--seat", "first"], "'first' is not a worker"),
        (["coordinator", *JOB, "--listen", "127.0.0.1:x", "--token-file", "token", "--out", "run"], "is no address"),
        (["coordinator", *JOB, "--anew", "--token-file", "token", "--out", "run"], "but there is no --store"),
    ],
)
def test_wrong_words_get_one_sentence(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text, mode in (("token", "secret\n", 0o600), ("open", "secret\n", 0o644), ("empty", "\n", 0o600)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


ENDPOINT = Endpoint("127.0.0.1", 1, "secret")


@pytest.fixture
def about(tmp_path):
    """What a coordinator says of a job whose run has a folder."""
    config = parse_config("[cluster]\nstages = 2\n[model]\nlayers = 2\nwidth = 16\nheads = 2\ncontext = 16\n")
    out = tmp_path / "run"
    out.mkdir()
    (out / "job.json").write_text('{"job": "a1b2"}')
    factory = TrainingJobFactory(config)
    job = factory.job(choose_plan(config.cluster, None), out)
    return json.loads(json.dumps(describe_job("a1b2", factory, job)))


def test_a_worker_that_sees_the_folder_of_the_run_writes_there(about, tmp_path):
    spec = spec_from_description(ENDPOINT, tmp_path / "own", None, "", about)
    assert (spec.checkpoint_folder, spec.file_transfer) == (tmp_path / "run" / "checkpoints", None)


@pytest.mark.parametrize("hidden", ["the folder is not there", "it is that of another job"])
def test_a_worker_that_does_not_sends_its_files_to_the_coordinator(hidden, about, tmp_path):
    job = tmp_path / "run" / "job.json"
    job.write_text('{"job": "c3d4"}') if "another" in hidden else job.unlink()
    spec = spec_from_description(ENDPOINT, tmp_path / "own", None, "", about)
    assert (spec.checkpoint_folder, spec.file_transfer) == (tmp_path / "own" / "checkpoints", FileTransfer(ENDPOINT))


def test_a_worker_whose_machine_would_train_something_else_says_what(about, tmp_path):
    about["fingerprint"]["data"] = "the sources of another Python"
    with pytest.raises(UserError, match=r"the job's data is .*another Python.*, and here it is .*; give all machines the same"):
        spec_from_description(ENDPOINT, tmp_path, None, "", about)


@pytest.mark.parametrize("name", ["Python", "torch", "CUDA"])
def test_so_does_one_with_another_version(name, about, tmp_path):
    about["versions"][name] = "1.0"
    with pytest.raises(UserError, match=rf"the job's {name} is .1\.0., and here it is .*; give all machines the same Python"):
        spec_from_description(ENDPOINT, tmp_path, None, "", about)


def test_a_worker_is_given_no_file_if_the_coordinator_has_none(about, tmp_path):
    with pytest.raises(UserError, match=r"trains the built-in GPT, and not train\.py: leave the file out"):
        spec_from_description(ENDPOINT, tmp_path, Path("train.py"), "", about)


def test_a_worker_that_others_could_not_reach_is_told_so(about, tmp_path):
    about["serves_machines"] = True
    with pytest.raises(UserError, match="reach this one by the address at which it joins, and not at 127"):
        spec_from_description(ENDPOINT, tmp_path, None, "", about)


def test_coordinators_of_one_folder_share_as_many_layers_as_the_first_one_chose(tmp_path: Path) -> None:
    auto = TrainConfig(ClusterSection(shared_layers="auto"))
    assert _settled(auto, tmp_path, has_store=False) == auto  # the first one is to choose
    chosen = TrainConfig(ClusterSection(shared_layers=2))
    (tmp_path / "job.json").write_text(json.dumps({"job": "x", "config": chosen.to_toml()}))
    assert _settled(auto, tmp_path, has_store=False) == chosen
    other = TrainConfig(ClusterSection(shared_layers=1))
    assert _settled(other, tmp_path, has_store=False) == other
    with pytest.raises(UserError, match="shared_layers is auto, which coordinators of one store may choose differently"):
        _settled(auto, tmp_path, has_store=True)


@pytest.mark.parametrize("logger", [[], ["--loggers", "csv"]])
@pytest.mark.parametrize("is_in_use", [True, False])
def test_a_run_without_a_checkpoint_cannot_be_resumed_and_its_folder_stays_as_it_was(
    is_in_use, logger, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.toml").write_text(TrainConfig().to_toml())
    (out / "summary.json").write_text("{}")
    before = {path: path.read_bytes() for path in out.iterdir()}
    with locked(out) if is_in_use else contextlib.nullcontext():
        code = main(["coordinator", "--resume", "run", *logger, "--listen", "127.0.0.1:0", "--token-file", "token"])
    assert code == (2 if is_in_use else 15)
    assert ("is in use by another run" if is_in_use else "there is no checkpoint in run/") in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.iterdir()} == before
