"""`recycle dashboard`, and the flags of other commands that serve a page."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from recycle.cli.live import page_process
from recycle.cli.live.page_process import served_page
from recycle.cli.main import main, make_parser
from recycle.cli.measuring.dashboard import plan_source_of
from recycle.core.cluster import Worker
from recycle.core.errors import UserError
from tests.dashboard.run_folders import write_run
from tests.recovery_records import whole_plan


def parsed(*words):
    return make_parser().parse_args([*words])


def test_it_says_where_the_page_is_and_ends_with_ctrl_c(tmp_path):
    write_run(tmp_path / "a")
    command = [sys.executable, "-m", "recycle", "dashboard", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().split()[4]
        with urllib.request.urlopen(f"{address}api/runs", timeout=20) as answer:
            assert [run["id"] for run in json.load(answer)["runs"]] == ["a"]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr.read() == "the page is closed\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["dashboard", "nothing-here"], "there is no such folder or file"),
        (["dashboard", ".", "--port", "70000"], "there is no port 70000"),
        (["dashboard", ".", "--allow-injection"], "is for a run that goes on"),
        (["dashboard", ".", "--host", "203.0.113.7", "--port", "0"], "is no address of this machine"),
        (["train", "--dashboard", "--steps", "1"], "name a folder with --out"),
        (["train", "--allow-injection", "--steps", "1"], "give --dashboard, too"),
        (["demo", "--plans", "--dashboard"], "leave --dashboard out"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_sentence(words, sentence, capsys):
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_the_page_of_a_run_is_a_process_of_its_own_that_ends_with_it(tmp_path):
    write_run(tmp_path / "a")
    args = parsed("train", "--dashboard", "0", "--allow-injection")
    with served_page(args, tmp_path / "a") as page:
        address, _, token = page.sentence.split(": ", 1)[1].partition("?token=")
        asked = urllib.request.Request(f"{address}api/session", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert "kill" in json.load(answer)["actions"]
        assert page.injections is not None
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(asked, timeout=5)


def test_a_port_in_use_is_told_before_training_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(page_process, "START_S", 240.0)  # the machine may be busy with other tests
    args = parsed("train", "--dashboard", "0")
    with served_page(args, tmp_path) as page:
        args.dashboard = int(page.sentence.rstrip("/").rpartition(":")[2])
        with pytest.raises(UserError, match="is in use by another program"), served_page(args, tmp_path):
            pass


def test_a_page_that_does_not_come_up_does_not_keep_training_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(page_process, "START_S", 0.01)  # less than Python needs to begin
    with pytest.raises(UserError, match="train without --dashboard"), served_page(parsed("train", "--dashboard", "0"), tmp_path):
        pass


def test_the_plan_of_what_if_is_that_of_the_run_s_own_source(tmp_path):
    folder = write_run(tmp_path)
    answer = plan_source_of(folder, whole_plan()).answer(frozenset({Worker(1, 1)}))
    assert len(answer.plan.problem.cluster.failed) == 1
    (folder / "config.toml").write_text("[cluster]\npipelines = 2\nstages = 2\nmicrobatches = 2\n")
    again = plan_source_of(folder, whole_plan()).answer(frozenset({Worker(1, 1)}))
    assert again.plan.period_us == answer.plan.period_us
