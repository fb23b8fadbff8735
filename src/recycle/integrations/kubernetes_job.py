"""`KubernetesJob`: what a job on Kubernetes is made of, and the commands in its containers. `kubernetes.py` has its manifests."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from recycle.control.net.tls import TlsFiles
from recycle.control.store.etcd_access import StoreAccess
from recycle.control.store.etcd_gateway import StoreAddress
from recycle.core.errors import UserError
from recycle.integrations.job_commands import PORT, JobCommands

Manifest = dict[str, Any]
JOB_FOLDER, TOKEN_FOLDER, TLS_FOLDER, VOLUME = "/recycle/job", "/recycle/token", "/recycle/tls", "/recycle/volume"
STORE_FOLDER = "/recycle/store"
TOKEN_KEY, PASSWORD_KEY = "token", "password"
# The keys of a Secret of type kubernetes.io/tls; the last one is that of cert-manager.
CERT_KEY, PRIVATE_KEY, CA_KEY = "tls.crt", "tls.key", "ca.crt"
METRICS_PORT = 29401
# The API's limit for a ConfigMap is 1 MiB, with all its metadata.
_MOST_FILE_BYTES = 1_000_000
# Longer names would make names of pods that are no DNS labels.
_LONGEST_NAME = 63 - len("-coordinator")
# The pods of a StatefulSet have a label with its name, and eleven characters behind it.
_LONGEST_NAME_WITH_STORE = _LONGEST_NAME - 11
# More standbys would wait for the same event.
_MOST_COORDINATORS = 5
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"(?=.*[1-9])[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")


def _check_name(name: str, namespace: str, longest: int) -> None:
    if len(name) > longest or not _LABEL.fullmatch(name):
        rule = f"at most {longest} small letters, digits and '-', a letter first and no '-' last"
        raise UserError(f"{name!r} cannot name a job on Kubernetes: give it a --name of {rule}")
    if namespace and (len(namespace) > 63 or not _LABEL.fullmatch(namespace)):
        raise UserError(f"{namespace!r} is no namespace: it has at most 63 small letters, digits and '-'")


def _check_quantity(text: str, example: str) -> None:
    if not _QUANTITY.fullmatch(text):
        raise UserError(f"{text!r} is no quantity: write it as Kubernetes does, such as {example}")


def _check_file(file: str, text: str | None) -> None:
    path = PurePosixPath(file)
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"{file} is no job file: name a Python file, of letters, digits and underscores")
    if text is None and not path.is_absolute():
        raise UserError(f"{file} is no path in the image: it must begin with /")
    if text is not None and len(text.encode()) > _MOST_FILE_BYTES:
        raise UserError(f"{file} is larger than {_MOST_FILE_BYTES} bytes: put it into the image, and say so with --file-in-image")


@dataclass(frozen=True, slots=True)
class Resources:
    """What a container asks for, as Kubernetes writes quantities ("4", "500m", "16Gi"); empty is no request."""

    cpus: str = ""
    memory: str = ""
    num_gpus: int = 0

    def __post_init__(self) -> None:
        for value, example in ((self.cpus, "4 or 500m"), (self.memory, "16Gi")):
            if value:
                _check_quantity(value, example)
        if self.num_gpus < 0:
            raise UserError(f"{self.num_gpus} GPUs are fewer than none: give a number from 0 on")

    def to_manifest(self, limits_memory: bool) -> Manifest:
        """The resources of a container; empty if there are none. A limit of processor time would slow workers down."""
        gpus = {"nvidia.com/gpu": self.num_gpus} if self.num_gpus else {}
        memory = {"memory": self.memory} if self.memory else {}
        requests = {**({"cpu": self.cpus} if self.cpus else {}), **memory, **gpus}
        limits = {**(memory if limits_memory else {}), **gpus}
        return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


@dataclass(frozen=True, slots=True)
class TlsPems:
    """The texts of a certificate, its key and the authority, which become a Secret of the job."""

    cert: str
    key: str
    ca: str

    @staticmethod
    def read(files: TlsFiles) -> "TlsPems":
        """The texts of files that were checked."""
        return TlsPems(*(path.read_text(encoding="ascii") for path in (files.cert, files.key, files.ca)))


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """A job on Kubernetes. Raises UserError, with one sentence, for what the cluster would refuse or could not run.

    `file` is the job file: its name if `file_text` is its text, else its path in the image. The job's secret is a new `token`, or
    in an existing Secret `secret`. The run folder lies on a new volume of `disk`, or on that of an existing `claim`. `flags` are
    the coordinator's. Control connections use TLS with the texts `tls`, or with an existing Secret `tls_secret`. With a `store`,
    `num_coordinators` coordinators run, each with a volume of its own unless there is a `claim`, and one leads. An existing
    Secret `store_secret` has their certificate for etcd, and the password of `store_user` if that is given.
    """

    name: str
    image: str
    file: str
    num_nodes: int
    file_text: str | None = None
    token: str = ""
    secret: str = ""
    namespace: str = ""
    flags: tuple[str, ...] = ()
    workers_per_node: int | None = None
    agent: Resources = Resources(num_gpus=1)
    coordinator: Resources = Resources("1", "2Gi")
    grace_s: float = 600.0
    disk: str = "50Gi"
    storage_class: str = ""
    claim: str = ""
    metrics_port: int = METRICS_PORT
    tls: TlsPems | None = None
    tls_secret: str = ""
    store: str = ""
    num_coordinators: int = 1
    store_secret: str = ""
    store_user: str = ""

    def __post_init__(self) -> None:
        _check_name(self.name, self.namespace, _LONGEST_NAME_WITH_STORE if self.store else _LONGEST_NAME)
        secrets = (("Secret", self.secret), ("Secret", self.tls_secret), ("Secret", self.store_secret))
        for what, name in (*secrets, ("claim", self.claim), ("storage class", self.storage_class)):
            if name and (len(name) > 253 or not _SUBDOMAIN.fullmatch(name)):
                raise UserError(f"{name!r} is no name of a {what}: it has small letters, digits, '-' and '.' only")
        if bool(self.token) == bool(self.secret):
            raise UserError("the job's secret is either a new token or in an existing Secret: give one of them")
        if self.tls is not None and self.tls_secret:
            raise UserError("the certificate is either in files or in an existing Secret: give one of them")
        self._check_store()
        if not self.image or re.search(r"\s", self.image):
            raise UserError(f"{self.image!r} is no image: write it as docker pull takes it, such as registry.example/train:1")
        if self.num_nodes < 1:
            raise UserError(f"{self.num_nodes} nodes cannot train: give at least one")
        if not self.agent.num_gpus and self.workers_per_node is None:
            raise UserError("agents without GPUs cannot tell how many workers to run: say so with --workers")
        if self.workers_per_node is not None and self.workers_per_node < 1:
            raise UserError(f"{self.workers_per_node} workers of an agent cannot train: give at least one")
        if not 0 < self.grace_s <= 86400:
            raise UserError(f"a grace of {self.grace_s:g} s cannot be kept: give more than 0 and at most 86400 s")
        if self.metrics_port == PORT:
            raise UserError(f"workers connect to port {PORT}: choose another one with --metrics-port")
        _check_quantity(self.disk, "50Gi")
        _check_file(self.file, self.file_text)

    def _check_store(self) -> None:
        if not self.store:
            if self.num_coordinators != 1 or self.store_secret or self.store_user:
                raise UserError("several coordinators of a job need etcd, which says who leads: name it with --store")
            return
        if self.store_user and not self.store_secret:
            raise UserError("a user of etcd has a password: name the Secret that has it with --store-secret")
        StoreAddress.parse(self.store, self._store_access)
        if not 2 <= self.num_coordinators <= _MOST_COORDINATORS:  # one alone comes back with its volume, and needs no store
            raise UserError(f"a job with --store has 2 to {_MOST_COORDINATORS} coordinators, and not {self.num_coordinators}")

    @property
    def commands(self) -> JobCommands:
        """The commands in the containers."""
        metrics = (f"--metrics-port={self.metrics_port}", "--metrics-host=0.0.0.0") if self.metrics_port else ()
        file = self.file if self.file_text is None else f"{JOB_FOLDER}/{self.file}"
        token, flags = f"{TOKEN_FOLDER}/{TOKEN_KEY}", (*self.flags, *metrics)
        tls = None
        if self.tls_secret_name:
            tls = TlsFiles(*(Path(TLS_FOLDER, key) for key in (CERT_KEY, PRIVATE_KEY, CA_KEY)))
        paths = file, self.run_folder, token, PORT
        store = ("--store", self.store, *self._store_access.flags()) if self.store else ()
        return JobCommands(*paths, flags, self.workers_per_node, self.grace_s, tls=tls, store_flags=store)

    @property
    def _store_access(self) -> StoreAccess:
        if not self.store_secret:
            return StoreAccess()
        ca, cert, key = (Path(STORE_FOLDER, name) for name in (CA_KEY, CERT_KEY, PRIVATE_KEY))
        return StoreAccess(ca, cert, key, self.store_user, Path(STORE_FOLDER, PASSWORD_KEY) if self.store_user else None)

    @property
    def coordinator_hosts(self) -> list[str]:
        """The names by which agents reach the coordinators: that of the Service, or with a store that of each pod."""
        if not self.store:
            return [self.coordinator_name]
        return [f"{self.coordinator_name}-{number}.{self.coordinator_name}" for number in range(self.num_coordinators)]

    @property
    def run_folder(self) -> str:
        """The folder of the run on its volume: below the root, in which some file systems have a folder of their own."""
        return f"{VOLUME}/{self.name}"

    @property
    def coordinator_name(self) -> str:
        return f"{self.name}-coordinator"

    @property
    def agents_name(self) -> str:
        return f"{self.name}-agents"

    @property
    def secret_name(self) -> str:
        return self.secret or f"{self.name}-token"

    @property
    def tls_secret_name(self) -> str:
        """The Secret with the certificate; empty if control connections do not use TLS."""
        return self.tls_secret or (f"{self.name}-tls" if self.tls is not None else "")

    @property
    def claim_name(self) -> str:
        return self.claim or f"{self.name}-run"

    @property
    def file_map_name(self) -> str:
        return f"{self.name}-job"
