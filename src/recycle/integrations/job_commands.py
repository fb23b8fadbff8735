"""`JobCommands`: the commands by which an engine runs a job file, one coordinator and an agent on each machine."""

from dataclasses import dataclass

from recycle.control.net.tls import TlsFiles

PORT = 29400
PROGRAM = "recycle"


@dataclass(frozen=True, slots=True)
class JobCommands:
    """The command lines of one job. `flags` override the job's options, and are the coordinator's.

    `workers_per_machine`, `grace_s` and `gpus` are those of an agent, which decides itself where they are None. `tls` are
    files on every machine. `store_flags` are those of coordinators that share a store.
    """

    file: str
    out: str
    token_file: str
    port: int = PORT
    flags: tuple[str, ...] = ()
    workers_per_machine: int | None = None
    grace_s: float | None = None
    interface: str = ""
    gpus: str | None = None
    tls: TlsFiles | None = None
    store_flags: tuple[str, ...] = ()

    def coordinator(self, listen: str) -> list[str]:
        """Start the job, or fail if the folder has a run already."""
        return [PROGRAM, "coordinator", self.file, *self._at(listen), "--out", self.out, *self.flags]

    def resumed_coordinator(self, listen: str) -> list[str]:
        """Take over the job in the folder if it is not over, or else go on with its run from the last checkpoint.

        Flags may change how long it computes, but not what.
        """
        return [PROGRAM, "coordinator", "--resume", self.out, *self._at(listen), *self.flags]

    def agent(self, *hosts: str) -> list[str]:
        """Run the workers of one machine: one for each GPU, unless it is told how many. A coordinator is on each of the hosts."""
        addresses = ",".join(self._address(host) for host in hosts)
        command = [PROGRAM, "agent", addresses, self.file, *self._secrets()]
        if self.workers_per_machine is not None:
            command += ["--workers", str(self.workers_per_machine)]
        if self.grace_s is not None:
            command += ["--grace", f"{self.grace_s:g}"]
        if self.interface:
            command += ["--interface", self.interface]
        if self.gpus is not None:
            command += ["--gpus", self.gpus]
        return command

    def _at(self, listen: str) -> list[str]:
        return ["--listen", self._address(listen), *self._secrets(), *self.store_flags]

    def _secrets(self) -> list[str]:
        return ["--token-file", self.token_file, *(self.tls.flags() if self.tls is not None else [])]

    def _address(self, host: str) -> str:
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
