"""A job as Kubernetes manifests: one coordinator or several, and an agent on each of several nodes. Nothing here starts it.

- The **coordinator** is a Deployment: its pod comes back on any node, and stays after the run, so that its results can be read.
  A pod that is taken away is a coordinator that is killed: workers go on training, and the next one takes over.
- With a **store**, coordinators are a StatefulSet: each has a name of its own, by which workers look for the one that leads, and
  a volume of its own. A Deployment's pods share one name, and a worker could not leave a pod that hangs for another one.
- The **agents** are an Indexed Job. A StatefulSet would start agents again when the run is over, and hold their GPUs for ever.
  `backoffLimitPerIndex` counts the failures of each pod by itself. With `backoffLimit`, one pod that fails too often would end
  the whole Job, healthy pods with it.
"""

import math
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from recycle.core.errors import UserError
from recycle.core.events.record_file import JOB
from recycle.core.release import RELEASE
from recycle.integrations.job_commands import PORT
from recycle.integrations.kubernetes_job import (
    CA_KEY,
    CERT_KEY,
    JOB_FOLDER,
    PRIVATE_KEY,
    STORE_FOLDER,
    TLS_FOLDER,
    TOKEN_FOLDER,
    TOKEN_KEY,
    VOLUME,
    KubernetesJob,
    Manifest,
)

# The exit code of an agent that was asked to stop: with 0, Kubernetes would take its part of the Job for done.
STOPPED_CODE = 143
# What an agent needs to end its workers, and itself, after their grace.
_MARGIN_S = 30
# How often the pod of one index may fail. Pods that the cluster takes away do not count.
_MOST_FAILURES = 100
# A coordinator's pod leaves a node that does not answer after so long. Workers wait 600 s for another coordinator.
_UNREACHABLE_S = 30
# Nodes with GPUs often have this taint, which keeps other pods away.
_GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists"}


def manifests(job: KubernetesJob) -> Iterator[tuple[str, Manifest]]:
    """Yield all manifests in the order in which they are needed, each with a sentence about it."""
    if job.token:
        yield "The job's token. It is a secret: keep this file as one.", _secret(job)
    if job.tls is not None:
        yield "The certificate of control connections, with its key. It is a secret: keep this file as one.", _tls_secret(job)
    if job.file_text is not None:
        yield "The job file. It cannot change while the run lasts.", _file_map(job)
    if not job.claim and not job.store:
        yield "The run folder, with record and checkpoints. Who deletes the claim deletes them.", _claim(job)
    yield "The name by which agents find the coordinator, wherever its pod is.", _service(job)
    if job.store:
        yield "The coordinators, of which one leads. The others are standbys, and take over.", _stateful_set(job)
    else:
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


def _tls_secret(job: KubernetesJob) -> Manifest:
    assert job.tls is not None
    made = {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(job, job.tls_secret_name, "certificate")}
    texts = {CERT_KEY: job.tls.cert, PRIVATE_KEY: job.tls.key, CA_KEY: job.tls.ca}
    # Not immutable: a renewed certificate is used from the next connection on.
    return {**made, "type": "kubernetes.io/tls", "stringData": texts}


def _file_map(job: KubernetesJob) -> Manifest:
    # Immutable: a pod that came later would have another job file, and its workers would be refused.
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, job.file_map_name, "job-file")}
    return {**made, "immutable": True, "data": {job.file: job.file_text}}


def _claim_spec(job: KubernetesJob) -> Manifest:
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": job.disk}}}
    return {**spec, "storageClassName": job.storage_class} if job.storage_class else spec


def _claim(job: KubernetesJob) -> Manifest:
    # One node at a time: a second coordinator on another node does not get the volume. On the same node, the lock of the run
    # folder refuses it. ReadWriteOncePod would refuse it as well, but a pod on a node that is lost would keep the volume.
    metadata = _metadata(job, job.claim_name, "run-folder")
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": _claim_spec(job)}


def _service(job: KubernetesJob) -> Manifest:
    # It has an address of its own. The name of a headless Service has no address while no pod is there, and workers that cannot
    # find a name are refused for good. Pods that are not ready are reached as well: being ready is only shown.
    # With a store it is headless, so that every pod has a name; workers that know several names try them again and again.
    port = {"name": "control", "port": PORT, "targetPort": "control"}
    selector = _labels(job, "coordinator")
    spec: Manifest = {"type": "ClusterIP", "publishNotReadyAddresses": True, "selector": selector, "ports": [port]}
    if job.store:
        spec["clusterIP"] = "None"
    metadata = _metadata(job, job.coordinator_name, "coordinator")
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def coordinator_script(job: KubernetesJob) -> str:
    """The shell script of the coordinator's pod. It starts the run, or goes on with the run in the folder, or finds it finished.

    It ignores SIGTERM, and so does the coordinator. SIGTERM would end the run with a checkpoint, and all agents with it. Instead,
    Kubernetes kills the pod that it takes away, workers go on training, and the next pod takes over. `config.toml` is the last
    file that a start writes: without it, nothing has begun. After the run the pod stays, so that the folder can be read.
    With a store, the same command begins the job, takes it over or stands by. A job that is over is refused there, so a pod that
    has seen the end keeps a note of it.
    """
    commands, folder = job.commands, job.run_folder
    if job.store:
        return f"""\
trap '' TERM
if [ ! -e {folder}.finished ]; then
  {shlex.join(commands.coordinator("0.0.0.0"))} || exit
  touch {folder}.finished
fi
echo 'the run is finished; its results are in {folder} of the coordinator that led at the end'
exec sleep infinity
"""
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
    spec = {
        "replicas": 1,
        # Not a rolling update, which would start a second coordinator before the first one has ended.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": _labels(job, "coordinator")},
        "template": _coordinator_template(job, {}),
    }
    metadata = _metadata(job, job.coordinator_name, "coordinator")
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _stateful_set(job: KubernetesJob) -> Manifest:
    labels = _labels(job, "coordinator")
    template = {"metadata": {"name": "run", "labels": _labels(job, "run-folder")}, "spec": _claim_spec(job)}
    spec = {
        "replicas": job.num_coordinators,
        "serviceName": job.coordinator_name,
        # The first one may never become ready, because another one leads.
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels},
        "template": _coordinator_template(job, {"topologySpreadConstraints": _spread(labels)}),
        **({} if job.claim else {"volumeClaimTemplates": [template]}),
    }
    metadata = _metadata(job, job.coordinator_name, "coordinator")
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec}


def _coordinator_template(job: KubernetesJob, more: Manifest) -> Manifest:
    """The template of a coordinator's pod, with `more` in its spec."""
    labels, ports = _labels(job, "coordinator"), [{"name": "control", "containerPort": PORT}]
    annotations = {}
    if job.metrics_port:
        ports.append({"name": "metrics", "containerPort": job.metrics_port})
        scrape = {"scrape": "true", "port": str(job.metrics_port), "path": "/metrics"}
        annotations = {"annotations": {f"prometheus.io/{name}": value for name, value in scrape.items()}}
    # Its memory has no limit: it loads the model, of which nothing is known here.
    resources = job.coordinator.to_manifest(limits_memory=False)
    mounts = [{"name": "run", "mountPath": VOLUME}, *_secret_mount("store", STORE_FOLDER, job.store_secret)]
    container = {
        **_container(job, ["sh", "-c", coordinator_script(job)], resources, mounts),
        "ports": ports,
        # It shows whether workers can connect, and ends nothing. A connection that closes at once takes a place of the
        # coordinator's limit of handshakes only until then. There is no liveness probe: a coordinator may be slow for minutes,
        # while it plans or reads a long record, and workers train on without it. Kubernetes starts one that dies anyway.
        "readinessProbe": {"tcpSocket": {"port": "control"}, "periodSeconds": 10, "timeoutSeconds": 5},
    }
    lost = [f"node.kubernetes.io/{state}" for state in ("not-ready", "unreachable")]
    volumes = _secret_volume("store", job.store_secret)
    if job.claim or not job.store:
        volumes.append({"name": "run", "persistentVolumeClaim": {"claimName": job.claim_name}})
    pod = {
        # The coordinator ignores SIGTERM, so there is nothing to wait for.
        "terminationGracePeriodSeconds": 1,
        "tolerations": [
            *({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _UNREACHABLE_S} for key in lost),
            *([_GPU_TOLERATION] if job.coordinator.num_gpus else []),
        ],
        **more,
        **_pod(job, container, volumes),
    }
    return {"metadata": {"labels": labels, **annotations}, "spec": pod}


def _spread(labels: Manifest) -> list[Manifest]:
    """Pods with these labels go to nodes of their own, if there are enough."""
    even = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    return [{**even, "labelSelector": {"matchLabels": labels}}]


def _agents(job: KubernetesJob) -> Manifest:
    labels = _labels(job, "agent")
    command = [*job.commands.agent(*job.coordinator_hosts), "--stopped-code", str(STOPPED_CODE)]
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    container = _container(job, command, job.agent.to_manifest(limits_memory=True), mounts)
    pod = {
        # The agent starts workers that die again itself. If the agent fails, the Job makes another pod, perhaps on another node.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.grace_s) + _MARGIN_S,
        "topologySpreadConstraints": _spread(labels),
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
    secrets = [
        *_secret_mount("token", TOKEN_FOLDER, job.secret_name),
        *_secret_mount("tls", TLS_FOLDER, job.tls_secret_name),
    ]
    # As a file, and not as a folder, in which it would be a link to a path that changes: the run folder keeps the resolved path.
    path = f"{JOB_FOLDER}/{job.file}"
    files = [] if job.file_text is None else [{"name": "job", "mountPath": path, "subPath": job.file, "readOnly": True}]
    return {
        "name": "recycle",
        "image": job.image,
        "command": command,
        **({"resources": resources} if resources else {}),
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [*secrets, *files, *mounts],
    }


def _secret_volume(name: str, secret: str) -> list[Manifest]:
    """The volume of a Secret, if there is one. Files in it follow a Secret that is changed.

    Only its owner may read the token, else `recycle` refuses it. The owner of a Secret's files is root. So the user is root, and
    there is no fsGroup, which would let a group read them.
    """
    return [{"name": name, "secret": {"secretName": secret, "defaultMode": 0o400}}] if secret else []


def _secret_mount(name: str, folder: str, secret: str) -> list[Manifest]:
    return [{"name": name, "mountPath": folder, "readOnly": True}] if secret else []


def _pod(job: KubernetesJob, container: Manifest, volumes: list[Manifest]) -> Manifest:
    """What the pods of coordinator and agents share."""
    files = [] if job.file_text is None else [{"name": "job", "configMap": {"name": job.file_map_name}}]
    secrets = [*_secret_volume("token", job.secret_name), *_secret_volume("tls", job.tls_secret_name)]
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [*secrets, *files, *volumes],
    }
