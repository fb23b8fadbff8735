"""`recycle plan --library`: its report, and what an interrupt leaves behind. Real processes, each in a session of its own."""

import json
import os
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recycle.cli.main import main
from recycle.core.plans.library import Library
from recycle.core.plans.plan import Plan
from recycle.core.plans.rules import check
from tests.processes import wait_for
from tests.warm_processes import WarmProcess

SMALL = "plan --library --pipelines 2 --stages 2 --microbatches 2 --costs 1,1,1 --max-failures 2 --jobs 1 --method greedy"
# Too little memory to reach the bound, so that every plan takes all the search it may: about a second for each of seven.
SLOW = (
    "plan --library --pipelines 4 --stages 8 --microbatches 16 --costs 10,13,9 --comm 1 --memory 8 "
    "--max-failures 20% --jobs 2 --method greedy"
)
NUM_PLANS = 7
DEADLINE_S = 100.0
PROGRESS = re.compile(r"\d+/\d+ \d+:\d\d:\d\d")


def processes_of(session: int) -> list[int]:
    """Every running process of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue  # it ended while we looked
            if int(its_session) == session and state != "Z":
                found.append(int(entry.name))
    return found


Start = Callable[[str], WarmProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `recycle <command>` as a process of its own session; whatever of it is left after a test is ended."""
    started: list[WarmProcess] = []

    def run(command: str) -> WarmProcess:
        started.append(WarmProcess(shlex.split(command)))
        return started[-1]

    yield run
    for process in started:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(timeout=10)


def plans_in(folder: Path) -> dict[str, tuple[int, str]]:
    """The plan files of a folder, each with the time it was written and its text."""
    return {path.name: (path.stat().st_mtime_ns, path.read_text()) for path in sorted(folder.glob("plan-*.json"))}


def interrupted(start: Start, folder: Path, interrupt: Callable[[int, int], None]) -> dict[str, tuple[int, str]]:
    """Stop a library at work once its first plan is there, see that it leaves in good order, and return what it left."""
    process = start(f"{SLOW} --out {folder}")
    wait_for(lambda: any(folder.glob("plan-*.json")) or process.poll() is not None, DEADLINE_S, "no plan was made")
    assert process.poll() is None, process.printed()
    interrupt(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    sentences = [line for line in err.splitlines() if line.strip() and not PROGRESS.search(line)]
    assert sentences == ["recycle plan: interrupted; what was written is whole, and a library, cache or run goes on from there"]
    wait_for(lambda: processes_of(process.pid) == [], 20, "a planning process did not end")
    left = plans_in(folder)
    assert 1 <= len(left) < NUM_PLANS
    assert {path.name for path in folder.iterdir()} == {"library.json", *left}
    for name in left:
        assert check(Plan.load(folder / name)) == []
    return left


@pytest.mark.timeout(200)
def test_an_interrupted_library_goes_on_where_it_was_stopped(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    finished = interrupted(start, folder, os.kill)
    process = start(f"{SLOW} --out {folder} --json")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    facts = json.loads(out)
    assert [plan["failures"] for plan in facts["plans"]] == list(range(NUM_PLANS))
    assert {f"plan-{plan['failures']:04d}.json" for plan in facts["plans"] if plan["kept"]} == set(finished)
    assert finished.items() <= plans_in(folder).items()
    library = Library.open(folder)
    assert all(check(library.get(num_failures)) == [] for num_failures in range(NUM_PLANS))


@pytest.mark.timeout(150)
def test_ctrl_c_reaches_every_process_of_the_terminal_and_leaves_the_same(start: Start, tmp_path: Path) -> None:
    interrupted(start, tmp_path / "plans", os.killpg)


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(shlex.split(command)) == 0
    return capsys.readouterr().out


def test_json_lists_every_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(f"{SMALL} --out {tmp_path / 'plans'} --json", capsys))
    assert facts["folder"] == str(tmp_path / "plans")
    # Two workers of three ops for two micro-batches need one idle slot; a lone worker of a stage runs four of three.
    assert [(plan["failures"], plan["period"], plan["bound"], plan["kept"]) for plan in facts["plans"]] == [
        (0, 7, 7, False),
        (1, 12, 12, False),
        (2, 12, 12, False),
    ]
    again = json.loads(run(f"{SMALL} --out {tmp_path / 'plans'} --json", capsys))
    assert all(plan["kept"] for plan in again["plans"])


def test_a_person_reads_what_failures_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(f"{SMALL} --out {tmp_path / 'plans'}", capsys).splitlines()
    assert lines[0].split() == ["failures", "period", "vs", "none", "over", "bound"]
    assert lines[2].split() == ["1", "12", "µs", "1.714", "0.00%"]
    assert lines[-1].startswith(f"3 plans in {tmp_path / 'plans'} (0 were there)")


def test_a_library_of_another_kind_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"{SMALL} --out {tmp_path}", capsys)
    before = plans_in(tmp_path)
    assert main(shlex.split(f"{SMALL} --memory 3 --out {tmp_path}")) == 2
    sentences = [line for line in capsys.readouterr().err.splitlines() if not PROGRESS.search(line) and "0/3" not in line]
    assert sentences == [
        f"recycle plan: {tmp_path} holds a library made from another memory limit: choose another folder, or remove that one"
    ]
    assert plans_in(tmp_path) == before


def test_a_share_of_the_workers_is_never_more_than_can_be_survived(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run(f"{SMALL.replace('--max-failures 2', '--max-failures 100%')} --out {tmp_path} --json", capsys))
    assert [plan["failures"] for plan in facts["plans"]] == [0, 1, 2]
