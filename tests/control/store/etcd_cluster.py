"""`EtcdCluster`: members of a real etcd on ports of this machine, each a process of its own that a test can kill or stop."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from recycle.control.net.tls import TlsFiles
from tests.processes import wait_for

INSTALL = "apt-get install --no-install-recommends etcd-server"


def missing() -> str:
    """Why there can be no etcd here; empty if there can."""
    return "" if shutil.which("etcd") else f"etcd is not installed: {INSTALL}"


def free_ports(num: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class EtcdCluster:
    """An etcd cluster in a folder. `kill` and `stop_all` end members; `start` starts one again with what it has on disk.

    With `tls`, clients need TLS and a certificate of the same authority.
    """

    def __init__(self, folder: Path, num_members: int = 3, tls: TlsFiles | None = None) -> None:
        self._folder, self._tls = folder, tls
        ports = free_ports(2 * num_members)
        self.ports, self._peer_ports = ports[:num_members], ports[num_members:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(num_members):
            self.start(number)
        self.wait_until_healthy()

    def address(self, prefix: str = "jobs/a") -> str:
        return f"etcd{'s' if self._tls is not None else ''}://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{prefix}"

    def start(self, number: int) -> None:
        peers = ",".join(f"m{index}=http://127.0.0.1:{port}" for index, port in enumerate(self._peer_ports))
        client, peer = f"{self._scheme}://127.0.0.1:{self.ports[number]}", f"http://127.0.0.1:{self._peer_ports[number]}"
        words = ["etcd", "--name", f"m{number}", "--data-dir", str(self._folder / f"m{number}"), "--log-level", "error"]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        words += ["--initial-advertise-peer-urls", peer, "--initial-cluster", peers, "--initial-cluster-state", "new"]
        if self._tls is not None:
            words += ["--cert-file", str(self._tls.cert), "--key-file", str(self._tls.key)]
            words += ["--bcrypt-cost", "4"]  # the least, because checking a password is slow by intention
            words += ["--client-cert-auth", "--trusted-ca-file", str(self._tls.ca)]
        words += ["--unsafe-no-fsync"] if "unsafe-no-fsync" in _flags() else []
        with (self._folder / f"m{number}.log").open("ab") as log:
            environment = {**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine.replace("aarch64", "arm64")}
            self._processes[number] = subprocess.Popen(words, stdout=log, stderr=log, env=environment)

    @property
    def _scheme(self) -> str:
        return "http" if self._tls is None else "https"

    def wait_until_healthy(self, seconds: float = 30.0) -> None:
        wait_for(lambda: all(self._is_healthy(number) for number in self._processes), seconds, "etcd does not become healthy")

    def _is_healthy(self, number: int) -> bool:
        try:
            context = self._tls.client_context() if self._tls is not None else None
            url = f"{self._scheme}://127.0.0.1:{self.ports[number]}/health"
            with urllib.request.urlopen(url, timeout=1, context=context) as answer:
                return b"true" in answer.read()
        except OSError:
            return False

    def kill(self, number: int) -> None:
        process = self._processes.pop(number)
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(10)

    def freeze(self, number: int) -> None:
        self._processes[number].send_signal(signal.SIGSTOP)

    def kill_all(self) -> None:
        for number in list(self._processes):
            self.kill(number)

    def start_all(self) -> None:
        for number in range(len(self.ports)):
            if number not in self._processes:
                self.start(number)
        self.wait_until_healthy()


def _flags() -> str:
    return subprocess.run(["etcd", "--help"], capture_output=True, text=True).stdout


@contextlib.contextmanager
def etcd_cluster(folder: Path, num_members: int = 3, tls: TlsFiles | None = None) -> Iterator[EtcdCluster]:
    cluster = EtcdCluster(folder, num_members, tls)
    try:
        yield cluster
    finally:
        cluster.kill_all()
