"""`KubernetesJob`: a job as Kubernetes manifests, one coordinator and an agent on each of several nodes. Nothing here starts it.

- The **coordinator** is a Deployment: its pod comes back on any node, and stays after the run, so that its results can be read.
  A pod that is taken away is a coordinator that is killed: workers go on training, and the next one takes over.
- The **agents** are an Indexed Job. A StatefulSet would start agents again when the run is over, and hold their GPUs for ever.
  `backoffLimitPerIndex` counts the failures of each pod by itself. With `backoffLimit`, one pod that fails too often would end
  the whole Job, healthy pods with it.
"""

import math
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from recycle.core.errors import UserError
from recycle.core.events.record_file import JOB
from recycle.core.release import RELEASE
from recycle.integrations.job_commands import PORT, JobCommands

Manifest = dict[str, Any]
JOB_FOLDER, TOKEN_FOLDER, VOLUME = "/recycle/job", "/recycle/token", "/recycle/volume"
TOKEN_KEY = "token"
METRICS_PORT = 29401
# The exit code of an agent that was asked to stop: with 0, Kubernetes would take its part of the Job for done.
STOPPED_CODE = 143
# What an agent needs to end its workers, and itself, after their grace.
_MARGIN_S = 30
# How often the pod of one index may fail. Pods that the cluster takes away do not count.
_MOST_FAILURES = 100
# A coordinator's pod leaves a node that does not answer after so long. Workers wait 600 s for another coordinator.
_UNREACHABLE_S = 30
# The API's limit for a ConfigMap is 1 MiB, with all its metadata.
_MOST_FILE_BYTES = 1_000_000
# Nodes with GPUs often have this taint, which keeps other pods away.
_GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists"}
# Longer names would make names of pods that are no DNS labels.
_LONGEST_NAME = 63 - len("-coordinator")
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUANTITY = re.compile(r"(?=.*[1-9])[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")


def _check_name(name: str, namespace: str) -> None:
    if len(name) > _LONGEST_NAME or not _LABEL.fullmatch(name):
        rule = f"at most {_LONGEST_NAME} small letters, digits and '-', a letter first and no '-' last"
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
class KubernetesJob:
    """A job on Kubernetes. Raises UserError, with one sentence, for what the cluster would refuse or could not run.

    `file` is the job file: its name if `file_text` is its text, else its path in the image. The job's secret is a new `token`, or
    in an existing Secret `secret`. The run folder lies on a new volume of `disk`, or on that of an existing `claim`. `flags` are
    the coordinator's.
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

    def __post_init__(self) -> None:
        _check_name(self.name, self.namespace)
        for what, name in (("Secret", self.secret), ("claim", self.claim), ("storage class", self.storage_class)):
            if name and (len(name) > 253 or not _SUBDOMAIN.fullmatch(name)):
                raise UserError(f"{name!r} is no name of a {what}: it has small letters, digits, '-' and '.' only")
        if bool(self.token) == bool(self.secret):
            raise UserError("the job's secret is either a new token or in an existing Secret: give one of them")
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

    @property
    def commands(self) -> JobCommands:
        """The commands in the containers."""
        metrics = (f"--metrics-port={self.metrics_port}", "--metrics-host=0.0.0.0") if self.metrics_port else ()
        file = self.file if self.file_text is None else f"{JOB_FOLDER}/{self.file}"
        token, flags = f"{TOKEN_FOLDER}/{TOKEN_KEY}", (*self.flags, *metrics)
        return JobCommands(file, self.run_folder, token, PORT, flags, self.workers_per_node, self.grace_s)

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
    def claim_name(self) -> str:
        return self.claim or f"{self.name}-run"

    @property
    def file_map_name(self) -> str:
        return f"{self.name}-job"


def manifests(job: KubernetesJob) -> Iterator[tuple[str, Manifest]]:
    """Yield all manifests in the order in which they are needed, each with a sentence about it."""
    if job.token:
        yield "The job's token. It is a secret: keep this file as one.", _secret(job)
    if job.file_text is not None:
        yield "The job file. It cannot change while the run lasts.", _file_map(job)
    if not job.claim:
        yield "The run folder, with record and checkpoints. Who deletes the claim deletes them.", _claim(job)
    yield "The name by which agents find the coordinator, wherever its pod is.", _service(job)
    yield "The coordinator, at most one. Its pod starts the run, or goes on with it, or finds it finished.", _deployment(job)
    yield "The agents. The Job is complete when the run is over, and frees their GPUs.", _agents(job)


def to_yaml(documents: Iterable[tuple[str, Manifest]]) -> str:
    """One stream of YAML documents, which `kubectl apply -f -` takes; each begins with its sentence as a comment."""
    try:
        import yaml
    except ImportError:
        raise UserError(
            "manifests are written with PyYAML: install it with pip install -e '.[kubernetes]' in a clone of ReCycle"
        ) from None

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes texts of several lines as such, and what occurs twice twice."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def write_text(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, write_text)
    options = {"sort_keys": False, "allow_unicode": True, "width": 130}
    return "".join(f"---\n# {about}\n{yaml.dump(made, Dumper=Dumper, **options)}" for about, made in documents)


def _labels(job: KubernetesJob, component: str) -> Manifest:
    """The labels by which a component is selected; they never change, as selectors cannot."""
    parts = {"name": "recycle", "instance": job.name, "component": component}
    return {f"app.kubernetes.io/{name}": value for name, value in parts.items()}


def _metadata(job: KubernetesJob, name: str, component: str) -> Manifest:
    more = {"app.kubernetes.io/version": RELEASE, "app.kubernetes.io/managed-by": "recycle"}
    place = {"namespace": job.namespace} if job.namespace else {}
    return {"name": name, **place, "labels": {**_labels(job, component), **more}}


def _secret(job: KubernetesJob) -> Manifest:
    # Immutable: a second token would keep every new pod out of the job that runs.
    made = {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(job, job.secret_name, "token")}
    return {**made, "immutable": True, "type": "Opaque", "stringData": {TOKEN_KEY: job.token}}


def _file_map(job: KubernetesJob) -> Manifest:
    # Immutable: a pod that came later would have another job file, and its workers would be refused.
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, job.file_map_name, "job-file")}
    return {**made, "immutable": True, "data": {job.file: job.file_text}}


def _claim(job: KubernetesJob) -> Manifest:
    # One node at a time: a second coordinator on another node does not get the volume. On the same node, the lock of the run
    # folder refuses it. ReadWriteOncePod would refuse it as well, but a pod on a node that is lost would keep the volume.
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": job.disk}}}
    if job.storage_class:
        spec["storageClassName"] = job.storage_class
    metadata = _metadata(job, job.claim_name, "run-folder")
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _service(job: KubernetesJob) -> Manifest:
    # It has an address of its own. The name of a headless Service has no address while no pod is there, and workers that cannot
    # find a name are refused for good. Pods that are not ready are reached as well: being ready is only shown.
    port = {"name": "control", "port": PORT, "targetPort": "control"}
    selector = _labels(job, "coordinator")
    spec = {"type": "ClusterIP", "publishNotReadyAddresses": True, "selector": selector, "ports": [port]}
    metadata = _metadata(job, job.coordinator_name, "coordinator")
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def coordinator_script(job: KubernetesJob) -> str:
    """The shell script of the coordinator's pod. It starts the run, or goes on with the run in the folder, or finds it finished.

    It ignores SIGTERM, and so does the coordinator. SIGTERM would end the run with a checkpoint, and all agents with it. Instead,
    Kubernetes kills the pod that it takes away, workers go on training, and the next pod takes over. `config.toml` is the last
    file that a start writes: without it, nothing has begun. After the run the pod stays, so that the folder can be read.
    """
    commands, folder = job.commands, job.run_folder
    return f"""\
trap '' TERM
if [ -e {folder}/config.toml ]; then
  {shlex.join(commands.resumed_coordinator("0.0.0.0"))}
else
  rm -f {folder}/{JOB}
  {shlex.join(commands.coordinator("0.0.0.0"))}
fi || exit
echo 'the run is finished; its results are in {folder}'
exec sleep infinity
"""


def _deployment(job: KubernetesJob) -> Manifest:
    labels, ports = _labels(job, "coordinator"), [{"name": "control", "containerPort": PORT}]
    annotations = {}
    if job.metrics_port:
        ports.append({"name": "metrics", "containerPort": job.metrics_port})
        scrape = {"scrape": "true", "port": str(job.metrics_port), "path": "/metrics"}
        annotations = {"annotations": {f"prometheus.io/{name}": value for name, value in scrape.items()}}
    # Its memory has no limit: it loads the model, of which nothing is known here.
    resources, mounts = job.coordinator.to_manifest(limits_memory=False), [{"name": "run", "mountPath": VOLUME}]
    container = {
        **_container(job, ["sh", "-c", coordinator_script(job)], resources, mounts),
        "ports": ports,
        # It shows whether workers can connect, and ends nothing. A connection that closes at once takes a place of the
        # coordinator's limit of handshakes only until then. There is no liveness probe: a coordinator may be slow for minutes,
        # while it plans or reads a long record, and workers train on without it. Kubernetes starts one that dies anyway.
        "readinessProbe": {"tcpSocket": {"port": "control"}, "periodSeconds": 10, "timeoutSeconds": 5},
    }
    lost = [f"node.kubernetes.io/{state}" for state in ("not-ready", "unreachable")]
    pod = {
        # The coordinator ignores SIGTERM, so there is nothing to wait for.
        "terminationGracePeriodSeconds": 1,
        "tolerations": [
            *({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _UNREACHABLE_S} for key in lost),
            *([_GPU_TOLERATION] if job.coordinator.num_gpus else []),
        ],
        **_pod(job, container, [{"name": "run", "persistentVolumeClaim": {"claimName": job.claim_name}}]),
    }
    spec = {
        "replicas": 1,
        # Not a rolling update, which would start a second coordinator before the first one has ended.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels, **annotations}, "spec": pod},
    }
    metadata = _metadata(job, job.coordinator_name, "coordinator")
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _agents(job: KubernetesJob) -> Manifest:
    labels = _labels(job, "agent")
    command = [*job.commands.agent(job.coordinator_name), "--stopped-code", str(STOPPED_CODE)]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    container = _container(job, command, job.agent.to_manifest(limits_memory=True), mounts)
    pod = {
        # The agent starts workers that die again itself. If the agent fails, the Job makes another pod, perhaps on another node.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.grace_s) + _MARGIN_S,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
        ],
        **({"tolerations": [_GPU_TOLERATION]} if job.agent.num_gpus else {}),
        **_pod(job, container, [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]),
    }
    spec = {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimitPerIndex": _MOST_FAILURES,
        # A pod that the cluster takes away is no failure of the agent.
        "podFailurePolicy": {
            "rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "podReplacementPolicy": "Failed",
        # An agent succeeds only when the run is over: then agents that come late, or come back, have nothing to do.
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job, job.agents_name, "agent"), "spec": spec}


def _container(job: KubernetesJob, command: list[str], resources: Manifest, mounts: list[Manifest]) -> Manifest:
    """A container of the job's image, with the token and the job file. `command` outranks the image's entry point."""
    token = {"name": "token", "mountPath": TOKEN_FOLDER, "readOnly": True}
    # As a file, and not as a folder, in which it would be a link to a path that changes: the run folder keeps the resolved path.
    path = f"{JOB_FOLDER}/{job.file}"
    files = [] if job.file_text is None else [{"name": "job", "mountPath": path, "subPath": job.file, "readOnly": True}]
    return {
        "name": "recycle",
        "image": job.image,
        "command": command,
        **({"resources": resources} if resources else {}),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [token, *files, *mounts],
    }


def _pod(job: KubernetesJob, container: Manifest, volumes: list[Manifest]) -> Manifest:
    """What the pods of coordinator and agents share."""
    files = [] if job.file_text is None else [{"name": "job", "configMap": {"name": job.file_map_name}}]
    # Only its owner may read the token, else `recycle` refuses it. The owner of a Secret's files is root. So the user is root,
    # and there is no fsGroup, which would let a group read them.
    token = {"name": "token", "secret": {"secretName": job.secret_name, "defaultMode": 0o400}}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [token, *files, *volumes],
    }
