"""A private Slurm cluster on this machine: one slurmctld, and a slurmd for each node, in namespaces of its own.

A node has its own host name and its own processes: what kills the node kills all that runs on it. Needs root, and Debian's
packages slurmctld, slurmd and slurm-client, whose build can run several slurmd on one machine (`slurmd -N`). There is no munge:
all daemons trust this machine (auth/none).
"""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

from tests.processes import wait_for

INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client"
# A requeued job waits until its old credentials have expired; 5 s is the least that Slurm takes. Lost nodes are noticed soon.
CONFIG = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=1
ReturnToService=2
SlurmdTimeout=10
KillWait=5
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NAMESPACES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts")


def missing() -> str:
    """Why there can be no such cluster here; empty if there can."""
    if any(shutil.which(program) is None for program in ("slurmctld", "slurmd", "sbatch")):
        return f"Slurm is not installed: {INSTALL}"
    if os.geteuid() != 0:
        return "the nodes of a private Slurm cluster are namespaces, which need root"
    tried = subprocess.run([*NAMESPACES, "hostname", "probe"], capture_output=True, text=True)
    return f"this system refuses namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def free_ports(num: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(num)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class SlurmCluster:
    """A cluster with these nodes, as a context. `environment` is what commands of Slurm need to find it."""

    def __init__(self, folder: Path, nodes: tuple[str, ...]) -> None:
        self.folder, self.nodes = folder, nodes
        self.config, self._hosts = folder / "slurm.conf", folder / "hosts"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        port, *ports = free_ports(len(nodes) + 1)
        lines = [
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for node, port in zip(nodes, ports, strict=True)
        ]
        text = CONFIG.format(host=socket.gethostname(), port=port, folder=folder, nodes="\n".join(lines))
        self.config.write_text(text)
        self._hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()} {' '.join(nodes)}\n")
        (folder / "state").mkdir()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.config)}

    def __enter__(self) -> "SlurmCluster":
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.config)])
        for node in self.nodes:
            self.start_node(node)
        self.wait_for(lambda: self.states() == dict.fromkeys(self.nodes, "idle"), 60, "the nodes did not come up")
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait()

    def start_node(self, node: str) -> None:
        (self.folder / f"spool-{node}").mkdir(exist_ok=True)
        slurmd = shlex.join(["slurmd", "-D", "-N", node, "-f", str(self.config)])
        names = f"hostname {node} && mount --bind {shlex.quote(str(self._hosts))} /etc/hosts"
        self._start(node, [*NAMESPACES, "sh", "-c", f"{names} && exec {slurmd}"])

    def kill_node(self, node: str) -> None:
        """End a node with all its processes at once."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def _start(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def ask(self, *words: str) -> str:
        """The output of a command of Slurm, empty if it fails."""
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    def states(self) -> dict[str, str]:
        """The state of each node, as `idle`."""
        return dict(line.split() for line in self.ask("sinfo", "-h", "-N", "-o", "%N %T").splitlines())

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.ask("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def steps(self, number: str) -> dict[str, str]:
        """The steps of a job's agents, by the node on which they run."""
        lines = [line.split() for line in self.ask("squeue", "-h", "-s", "-j", number, "-o", "%i %N").splitlines()]
        return {node: step for step, node in lines if not step.endswith(("batch", "extern"))}

    def wait_for(self, what, seconds: float, problem: str) -> None:
        wait_for(what, seconds, lambda: f"{problem}\n{self.words()}")

    def words(self) -> str:
        """The last words of the daemons."""
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log")))
