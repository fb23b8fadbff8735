"""`recycle agent` with `recycle coordinator`, as on two machines: real processes that come, die, leave and come back."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from recycle.cli.main import main
from tests.cli.machines.test_coordinator import free_port, num_steps, started
from tests.processes import is_there, wait_for
from tests.tls_files import tls_flags, write_tls

pytestmark = pytest.mark.timeout(240)
FILE = """
import time
from functools import partial

import torch
from torch import nn

import recycle


class Numbers:
    def __len__(self):
        return 64

    def __getitem__(self, number):
        time.sleep(0.003)  # steps that take a while, and no processor
        return torch.full((4,), number / 64), torch.ones(1)


def job():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    options = recycle.TrainOptions(is_exact=True)
    shape, stages = recycle.Shape(2, 2, 2), recycle.cut(model, [2])
    return recycle.Job(shape, stages, Numbers(), nn.functional.mse_loss, optimizer, 100000, samples=2, options=options)
"""


def facts_of(out: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind in the record so far; the others, which are many, are not read."""
    lines = (out / "record.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines if f'"event":"{kind}"'.encode() in line and line.endswith(b"}")]


def recoveries(out: Path) -> list[dict[str, Any]]:
    return facts_of(out, "recovery")


def pids(out: Path) -> dict[str, int]:
    """The process at each place, by the record so far."""
    return {event["node"]: event["pid"] for event in facts_of(out, "placed")}


def test_agents_start_workers_again_leave_die_and_come_back_and_the_weights_are_those_of_one_machine(tmp_path):
    file, out, token, address = tmp_path / "train.py", tmp_path / "run", tmp_path / "token", f"[::1]:{free_port()}"
    file.write_text(FILE)
    tls = tls_flags(write_tls(tmp_path / "coordinator", "::1"))
    job = ("--listen", address, "--token-file", token, *tls, "--json")
    tls_of_workers = tls_flags(write_tls(tmp_path / "workers", "workers"))
    agent = (
        "agent",
        address,
        file,
        "--token-file",
        token,
        *tls_of_workers,
        "--interface",
        "lo",
        "--workers",
        "2",
    )  # tensors by IPv4

    def has_all(num_recoveries: int) -> bool:
        found = recoveries(out)
        return len(found) >= num_recoveries and found[-1]["num_live"] == 4

    def has_half() -> bool:
        return recoveries(out)[-1]["num_live"] == 2

    with started() as start:
        coordinator = start("coordinator", file, "--out", out, *job)
        wait_for(token.exists)
        staying, leaving = start(*agent), start(*agent)
        wait_for(lambda: num_steps(out) >= 3)
        first = pids(out)

        os.kill(first["W0_0"], signal.SIGKILL)  # its agent starts another one, which joins
        wait_for(lambda: has_all(2))
        joins = [event["joins"] for event in recoveries(out)]
        assert joins[:2] == [False, True]  # on a busy machine a worker may be late, leave and join once more

        before = num_steps(out)
        wait_for(lambda: num_steps(out) >= before + 3)
        os.kill(leaving.pid, signal.SIGTERM)
        _, words = leaving.communicate(timeout=30)
        assert leaving.returncode == 0
        assert "agent: SIGTERM: 2 workers leave after the present step" in words
        wait_for(has_half)
        left = recoveries(out)[len(joins) :]
        assert {(event["cause"], event.get("redone_ops", 0)) for event in left} == {("it was asked to leave", 0)}
        assert sum(len(event["workers"]) for event in left) == 2

        num = len(recoveries(out))
        again = start(*agent)
        wait_for(lambda: has_all(num + 1))
        os.kill(staying.pid, signal.SIGKILL)  # its workers end with it
        wait_for(has_half)
        num = len(recoveries(out))
        back = start(*agent)
        wait_for(lambda: has_all(num + 1))
        os.kill(coordinator.pid, signal.SIGTERM)
        printed, words = coordinator.communicate(timeout=60)
        assert [process.wait(30) for process in (again, back)] == [0, 0]
        steps = json.loads(printed)["steps"]
        assert f"go on with: recycle coordinator --resume {out} --listen {address} --token-file {token} {' '.join(tls)}" in words
        wait_for(lambda: not any(is_there(event["pid"]) for event in facts_of(out, "placed")), 10)

        final = steps + 3
        coordinator = start("coordinator", "--resume", out, "--steps", str(final), *job)
        four = start(*agent[:-1], "4")
        printed, words = coordinator.communicate(timeout=60)
        assert (coordinator.returncode, four.wait(30)) == (0, 0), words
        alone = json.loads(start("train", file, "--steps", str(final), "--json").communicate(timeout=90)[0])
    facts = json.loads(printed)
    assert (facts["steps"], facts["weights_sha256"]) == (final, alone["weights_sha256"])
    assert facts["losses"][-3:] == alone["losses"][-3:]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["here:1", "{token}"], "the following arguments are required: --token-file"),
        (["here", "--token-file", "{token}"], "'here' is no address: write HOST:PORT"),
        (["here:1", "--token-file", "{folder}/absent"], "cannot read the token in"),
        (["here:1", "{folder}/absent.py", "--token-file", "{token}"], "there is no job file"),
        (["here:1", "--token-file", "{token}"], "this machine has no GPU to use: say with --workers how many workers it runs"),
        (["here:1", "--token-file", "{token}", "--gpus", "7"], "this machine has no GPU 7; it has none"),
        (["here:1", "--token-file", "{token}", "--interface", "eth77"], "this machine has no network interface eth77; it has"),
        (["here:1", "--token-file", "{token}", "--tls-ca", "{token}"], "give --tls-cert and --tls-key, too"),
        (
            ["here:1", "--token-file", "{token}", "--tls-ca", "{token}", "--tls-cert", "{token}", "--tls-key", "{token}"],
            "cannot use the authority in",
        ),
        (["here:1", "--token-file", "{token}", "--workers", "0"], "'0' is no number of workers from 1 to 1024"),
    ],
)
def test_wrong_words_are_refused_in_one_sentence(words, says, tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    try:
        code = main(["agent", *(word.format(token=token, folder=tmp_path) for word in words)])
    except SystemExit as stop:  # argparse leaves this way
        code = stop.code
    assert code == 2
    assert says in capsys.readouterr().err


def test_workers_that_are_refused_say_why_and_the_agent_ends(tmp_path):
    file, out, token, address = tmp_path / "train.py", tmp_path / "run", tmp_path / "token", f"127.0.0.1:{free_port()}"
    file.write_text(FILE)
    other = tmp_path / "elsewhere" / "train.py"
    other.parent.mkdir()
    other.write_text(FILE.replace("lr=0.1", "lr=0.2"))
    with started() as start:
        start("coordinator", file, "--listen", address, "--token-file", token, "--out", out)
        wait_for(token.exists)
        agent = start("agent", address, other, "--token-file", token, "--workers", "1")
        _, words = agent.communicate(timeout=60)
    assert agent.returncode != 0
    assert "worker 0 | this worker was turned away: this machine would train something else: the job's train.py is" in words
    assert "agent: worker 0 was refused, and is not started again" in words
    assert "recycle agent: no worker of this machine takes part any more: see above why" in words
