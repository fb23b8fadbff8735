"""One job file on one machine, and on three that fail: hosts are network namespaces with an agent and four workers each.

    python -m tests.chaos.three_machines                    both examples, GPT-2 of Hugging Face and a convolutional classifier
    python -m tests.chaos.three_machines --only sequential

While it trains, the link of a machine is cut and comes back, the agent of another one is killed with its workers and started
again, and that of the third one is asked to leave and started again. The weights must be those of the same file on one machine.
Needs root and `ip`.
"""

import argparse
import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from recycle.cli.main import main as recycle_main
from recycle.core.events.record import Recovered
from recycle.core.events.record_file import read_record
from tests.chaos.machines import BRIDGE, PORT, Host, sh

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = {"sequential.py": 1000, "hugging_face.py": 400}  # with the steps in which all failures find room
NUM_MACHINES, WORKERS_EACH, LIMIT_S, CUT_S = 3, 4, 900.0, 5.0
NUM_STAGES = 3  # of both examples


class Unexpected(Exception):
    """Something that had to happen did not, or not in time."""


class Machines:
    """A coordinator's host and several machines, of which each has an agent with as many workers. They train a job file."""

    def __init__(
        self,
        file: Path,
        steps: int,
        folder: Path,
        stack: contextlib.ExitStack,
        num_machines: int,
        workers_each: int,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.workers_each, self.num_workers = workers_each, num_machines * workers_each
        self.out, self.log, self.result = folder / "disk" / "run", folder / "log", folder / "result"
        self.out.parent.mkdir()
        self._deadline_s = time.monotonic() + limit_s
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(sh, "ip", "link", "del", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")
        hosts = []
        for number in range(num_machines + 1):
            hosts.append(Host(number, self.out.parent if number else None))
            stack.callback(hosts[-1].remove)
        self.coordinator, *self.machines = hosts
        address, token = f"{self.coordinator.address}:{PORT}", folder / "token"
        job = [
            str(file),
            "--pipelines",
            str(self.num_workers // NUM_STAGES),
            "--steps",
            str(steps),
            "--exact",
            "--checkpoint.every",
            "10",
            "--lease",
            "2",
        ]
        words = ["--listen", address, "--token-file", str(token), "--out", str(self.out), "--json"]
        self.coordinator.start(self.result, "coordinator", *job, *words)
        self.wait_for(token.exists, "the coordinator did not start")
        self._agent = ["agent", address, str(file), "--token-file", str(token), "--workers", str(workers_each)]
        for machine in self.machines:
            machine.start(self.log, *self._agent)

    def wait_for(self, what: Callable[[], bool], problem: str) -> None:
        process = self.coordinator.process
        while not what():
            if time.monotonic() > self._deadline_s or process is None or process.poll() is not None:
                raise Unexpected(f"{problem}; {self.num_steps()} steps are done")
            time.sleep(0.5)  # it reads the whole record each time

    def num_steps(self) -> int:
        with contextlib.suppress(OSError):
            return (self.out / "record.jsonl").read_bytes().count(b'"event":"step"')
        return 0

    def recoveries(self) -> list[Recovered]:
        return [event for event in read_record(self.out / "record.jsonl") if isinstance(event, Recovered)]

    def wait_for_steps(self, num: int) -> None:
        end = self.num_steps() + num
        self.wait_for(lambda: self.num_steps() >= end, "no more steps are done")

    def wait_for_live(self, num: int) -> None:
        self.wait_for(lambda: bool(found := self.recoveries()) and found[-1].num_live == num, f"{num} workers were never live")

    def wait_for_one_to_leave(self) -> None:
        self.wait_for_live(self.num_workers - self.workers_each)

    def wait_for_all(self) -> None:
        self.wait_for_live(self.num_workers)

    def fail(self) -> None:
        """One machine after the other fails, and comes back."""
        cut, killed, leaving = self.machines
        self.wait_for_steps(5)
        cut.unplug()
        self.wait_for_one_to_leave()
        time.sleep(CUT_S)
        cut.plug()
        self.wait_for_all()
        self.wait_for_steps(2)
        killed.signal(signal.SIGKILL)
        self.wait_for_one_to_leave()
        killed.start(self.log)
        self.wait_for_all()
        self.wait_for_steps(2)
        num = len(self.recoveries())
        leaving.signal(signal.SIGTERM)
        self.wait_for_one_to_leave()
        redone = sum(event.redone_ops for event in self.recoveries()[num:])
        if redone:
            raise Unexpected(f"{redone} ops were redone when an agent left")
        leaving.start(self.log)
        self.wait_for_all()

    def words(self) -> str:
        """The last words of the coordinator and the agents."""
        return f"{self.result.read_text()[-1500:]}\n{self.log.read_text()[-3000:]}"

    def finish(self) -> str:
        """Wait for the end of the job, and return its weights."""
        process = self.coordinator.process
        assert process is not None
        process.wait(max(1.0, self._deadline_s - time.monotonic()))
        facts = json.loads(self.result.read_text(encoding="utf-8").splitlines()[-1])
        return str(facts["weights_sha256"])


def alone(file: Path, steps: int, num_workers: int) -> str:
    """The weights of the job on one machine."""
    pipelines = str(num_workers // NUM_STAGES)
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        words = ["train", str(file), "--pipelines", pipelines, "--steps", str(steps), "--exact", "--json"]
        assert recycle_main(words) == 0
    return str(json.loads(printed.getvalue())["weights_sha256"])


def run(file: Path, steps: int) -> tuple[str, str]:
    """Train a job file on three machines that fail; return the problem, if there is one, and what happened."""
    begin_s = time.monotonic()
    with TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        machines = Machines(file, steps, Path(name), stack, NUM_MACHINES, WORKERS_EACH)
        try:
            machines.fail()
            weights = machines.finish()
        except (Unexpected, subprocess.TimeoutExpired, ValueError, IndexError) as problem:
            return f"{problem}\n{machines.words()}", ""
        recoveries = machines.recoveries()
        told = f"{len(recoveries)} recoveries, {machines.num_steps()} steps, {time.monotonic() - begin_s:.0f} s"
    return "" if weights == alone(file, steps, machines.num_workers) else "other weights", told


def main() -> int:
    parser = argparse.ArgumentParser(description="One job file on one machine, and on three that fail.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only files whose name contains this")
    args = parser.parse_args()
    has_failed = False
    for name in [name for name in FILES if args.only in name]:
        problem, told = run(EXAMPLES / name, FILES[name])
        has_failed |= bool(problem)
        print(f"{name:20} {problem or 'same weights'}  {told}", flush=True)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
