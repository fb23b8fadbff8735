"""Faults of machines and networks: hosts are network namespaces with process ids and a disk of their own. Needs root and `ip`.

    python -m tests.chaos.machines                    every fault once
    python -m tests.chaos.machines --only cut         those whose name contains a text

The coordinator and each worker run on a host of their own, joined by a bridge. A worker that ends is started again, as an agent
would do. Each run must end with the weights of the same job on one machine. The last lines are a table.
"""

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from recycle.cli.main import main as recycle_main
from tests.chaos.job_processes import processes_of

STEPS, LEASE_S, LIMIT_S = 400, 1.0, 240.0
JOB = (
    f"--pipelines 2 --stages 2 --microbatches 2 --layers 2 --width 16 --heads 2 --context 16 --samples 1 --steps {STEPS} --exact "
    f"--lease {LEASE_S} --checkpoint.every 20"
).split()
BRIDGE, PORT = "rcbridge", 29555


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Host:
    """A network namespace with an address on the bridge. Its processes see only each other, and not the folder `hidden`."""

    def __init__(self, number: int, hidden: Path | None) -> None:
        self.name, self.address, self._hidden = f"rchost{number}", f"10.77.0.{number + 1}", hidden
        self.process: subprocess.Popen[bytes] | None = None
        self._words: list[str] = []
        self.num_starts = 0
        sh("ip", "netns", "add", self.name)
        # The one of the run before goes with its namespace, some time after the namespace.
        subprocess.run(["ip", "link", "del", f"rcv{number}"], capture_output=True)
        sh("ip", "link", "add", f"rcv{number}", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        sh("ip", "link", "set", f"rcv{number}", "master", BRIDGE, "up")
        self.link = f"rcv{number}"
        self.inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.inside("ip", "link", "set", "eth0", "up")
        self.inside("ip", "link", "set", "lo", "up")

    def inside(self, *words: str) -> None:
        sh("ip", "netns", "exec", self.name, *words)

    def start(self, log: Path, *words: str) -> None:
        self.num_starts += 1
        self._words = list(words) or self._words
        mount = f'mount -t tmpfs none "{self._hidden}" && ' if self._hidden is not None else ""
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "sh", "-c", f'{mount}exec "$@"', "sh"]
        command = ["ip", "netns", "exec", self.name, *alone, sys.executable, "-m", "recycle", *self._words]
        with log.open("ab") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        for process in processes_of(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def drop(self, other: "Host") -> None:
        """Drop everything that this host sends to another one."""
        self.inside("ip", "route", "add", "blackhole", f"{other.address}/32")

    def restore(self, other: "Host") -> None:
        self.inside("ip", "route", "del", "blackhole", f"{other.address}/32")

    def unplug(self) -> None:
        sh("ip", "link", "set", self.link, "down")

    def plug(self) -> None:
        sh("ip", "link", "set", self.link, "up")

    def queue(self, discipline: str) -> None:
        """Have what this host sends and gets wait in a queue of this discipline."""
        sh("tc", "qdisc", "add", "dev", self.link, "root", *discipline.split())
        self.inside("tc", "qdisc", "add", "dev", "eth0", "root", *discipline.split())

    def unqueue(self) -> None:
        sh("tc", "qdisc", "del", "dev", self.link, "root")
        self.inside("tc", "qdisc", "del", "dev", "eth0", "root")

    def remove(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self.process.wait(20)
        sh("ip", "link", "del", self.link)
        sh("ip", "netns", "del", self.name)


@dataclass
class Cluster:
    """A coordinator's host, and the hosts of the workers W0_0, W0_1, W1_0, W1_1."""

    coordinator: Host
    workers: list[Host]


@dataclass(frozen=True)
class Fault:
    name: str
    begin: Callable[[Cluster], None]
    end: Callable[[Cluster], None]
    seconds: float
    discipline: str = ""  # of a queue, which the kernel must have

    def refusal(self) -> str:
        """Why it cannot be tried here; empty if it can."""
        probe = ["ip", "link", "add", "rcprobe", "type", "veth", "peer", "name", "rcprobe2"]
        if not self.discipline or subprocess.run(probe, capture_output=True).returncode:
            return ""
        tried = subprocess.run(["tc", "qdisc", "add", "dev", "rcprobe", "root", *self.discipline.split()], capture_output=True)
        sh("ip", "link", "del", "rcprobe")
        return f"not tried: no {self.discipline.split()[0]} in this kernel" if tried.returncode else ""


def _each(function: Callable[[Host, Host], None], *pairs: tuple[int, int]) -> Callable[[Cluster], None]:
    """A function that does something from one host to another; -1 is the coordinator's."""

    def act(cluster: Cluster) -> None:
        hosts = [*cluster.workers, cluster.coordinator]
        for one, other in pairs:
            function(hosts[one], hosts[other])

    return act


def _nothing(cluster: Cluster) -> None:
    pass


def _queue(name: str, discipline: str) -> Fault:
    return Fault(name, lambda c: c.workers[1].queue(discipline), lambda c: c.workers[1].unqueue(), 20.0, discipline)


FAULTS = [
    Fault("no fault", _nothing, _nothing, 0.0),
    Fault("a worker's link down for 0.5 s", lambda c: c.workers[1].unplug(), lambda c: c.workers[1].plug(), 0.5),
    Fault("a worker's link down for 10 s", lambda c: c.workers[1].unplug(), lambda c: c.workers[1].plug(), 10.0),
    Fault("the coordinator's link down for 10 s", lambda c: c.coordinator.unplug(), lambda c: c.coordinator.plug(), 10.0),
    Fault("one way: worker to coordinator", _each(Host.drop, (1, -1)), _each(Host.restore, (1, -1)), 10.0),
    Fault("one way: coordinator to worker", _each(Host.drop, (-1, 1)), _each(Host.restore, (-1, 1)), 10.0),
    Fault("one way: worker to worker", _each(Host.drop, (0, 1)), _each(Host.restore, (0, 1)), 20.0),
    Fault("a cut between two workers only", _each(Host.drop, (0, 1), (1, 0)), _each(Host.restore, (0, 1), (1, 0)), 20.0),
    Fault("a cut between two peers only", _each(Host.drop, (0, 2), (2, 0)), _each(Host.restore, (0, 2), (2, 0)), 20.0),
    Fault(
        "a cut while groups are made",  # the death of another worker makes all connect anew
        lambda c: (_each(Host.drop, (0, 1), (1, 0))(c), c.workers[3].signal(signal.SIGKILL))[0],
        _each(Host.restore, (0, 1), (1, 0)),
        20.0,
    ),
    Fault(
        "a worker's host frozen for 10 s",
        lambda c: c.workers[2].signal(signal.SIGSTOP),
        lambda c: c.workers[2].signal(signal.SIGCONT),
        10.0,
    ),
    Fault(
        "the coordinator's host frozen for 10 s",
        lambda c: c.coordinator.signal(signal.SIGSTOP),
        lambda c: c.coordinator.signal(signal.SIGCONT),
        10.0,
    ),
    Fault("a worker's host killed with its disk", lambda c: c.workers[3].signal(signal.SIGKILL), _nothing, 0.0),
    Fault("the coordinator's host killed", lambda c: c.coordinator.signal(signal.SIGKILL), _nothing, 0.0),
    _queue("a link with a delay of 200 ms", "netem delay 200ms"),
    _queue("a link that loses 30 %", "netem loss 30%"),
    _queue("a link of 1 Mbit/s", "tbf rate 1mbit burst 16kb latency 400ms"),
]


def run_fault(fault: Fault, weights: str) -> tuple[str, float, list[str]]:
    """Run the job with a fault; return the problem if there was one, the seconds, and the causes of recoveries."""
    begin_s = time.monotonic()
    with TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        out, token, log = folder / "disk" / "run", folder / "token", folder / "log"
        out.parent.mkdir()
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(sh, "ip", "link", "del", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")
        hosts = []
        for number in range(5):
            hosts.append(Host(number, out.parent if number else None))
            stack.callback(hosts[-1].remove)
        cluster = Cluster(hosts[0], hosts[1:])
        address = f"{hosts[0].address}:{PORT}"
        words = ["coordinator", *JOB, "--listen", address, "--token-file", str(token), "--out", str(out), "--json"]
        hosts[0].start(folder / "result", *words)
        while not token.exists():
            time.sleep(0.1)
        places = ("W0_0", "W0_1", "W1_0", "W1_1")
        for host, place in zip(cluster.workers, places, strict=True):
            host.start(log, "worker", address, "--token-file", str(token), "--place", place)
        problem = _play(fault, cluster, out, log, folder / "result", begin_s + LIMIT_S)
        printed = (folder / "result").read_text(encoding="utf-8")
        took_s = time.monotonic() - begin_s
        if problem:
            return f"{problem}\n{printed[-900:]}\n{log.read_text()[-1500:]}", took_s, []
        summary = json.loads(printed.splitlines()[-1])
        causes = [f"{each['worker']} {'joined' if each['joins'] else 'lost'}: {each['cause']}" for each in summary["recoveries"]]
        return "" if summary["weights_sha256"] == weights else "other weights", took_s, causes


def _play(fault: Fault, cluster: Cluster, out: Path, log: Path, result: Path, deadline_s: float) -> str:
    """Begin the fault after some steps, end it, and wait for the end of the job; return the problem if there is one."""
    begun_s = ended_s = 0.0
    coordinator = cluster.coordinator
    assert coordinator.process is not None
    while coordinator.process.poll() != 0:
        now_s = time.monotonic()
        if now_s > deadline_s:
            return f"not done after {LIMIT_S:.0f} s, {_num_steps(out)} steps"
        if not begun_s and _num_steps(out) >= 40:
            begun_s = now_s
            fault.begin(cluster)
        if begun_s and not ended_s and now_s > begun_s + fault.seconds:
            ended_s = now_s
            fault.end(cluster)
        if coordinator.process.poll() not in (None, 0):
            if coordinator.num_starts > 3:
                return "the coordinator ends again and again"
            coordinator.start(result)
        for host in cluster.workers:
            if begun_s and host.process is not None and host.process.poll() not in (None, 0) and host.num_starts < 20:
                host.start(log)
        time.sleep(0.1)
    return "" if begun_s else "the job was done before the fault"


def _num_steps(out: Path) -> int:
    with contextlib.suppress(OSError):
        return (out / "record.jsonl").read_bytes().count(b'"event":"step"')
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Faults of machines and networks.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults whose name contains this")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N of them")
    args = parser.parse_args()
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        assert recycle_main(["train", *JOB, "--json"]) == 0
    weights = json.loads(printed.getvalue())["weights_sha256"]
    rows, failed = [], 0
    for fault in [fault for fault in FAULTS if args.only in fault.name][args.skip :]:
        if refusal := fault.refusal():
            rows.append(f"{fault.name:45} {refusal}")
            continue
        problem, took_s, causes = run_fault(fault, weights)
        failed += bool(problem)
        said = problem or "same weights"
        print(f"{fault.name}: {said}, {took_s:.0f} s; {'; '.join(causes)}", file=sys.stderr, flush=True)
        rows.append(f"{fault.name:45} {said.splitlines()[0]:16} {took_s:4.0f} s  {len(causes)} recoveries")
    print("\n".join(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
