"""The manifests of a job on Kubernetes: valid by the API's schema, and safe for the pods that are healthy."""

import base64
import copy
import os
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from recycle.cli.machines.endpoint_flags import read_token
from recycle.cli.main import main, make_parser
from recycle.core.errors import UserError
from recycle.integrations.kubernetes import manifests, to_yaml
from recycle.integrations.kubernetes_job import KubernetesJob, Resources, TlsPems

TOKEN = "a-token-that-nobody-else-has"
TEXT = "import recycle\n\n\ndef job():\n    return recycle.Job(...)\n"
JOB = KubernetesJob("gpt", "registry.example/gpt:1", "train.py", 4, TEXT, TOKEN)
FULL = KubernetesJob(
    name="gpt",
    image="registry.example/gpt@sha256:00",
    file="train.py",
    num_nodes=64,
    file_text=TEXT,
    token=TOKEN,
    namespace="research",
    flags=("--steps=2000", "--exact"),
    workers_per_node=16,
    agent=Resources("32", "512Gi", 8),
    grace_s=90.5,
    storage_class="fast.example",
)
BARE = KubernetesJob(
    "gpt", "gpt", "/app/train.py", 1, secret="mine", claim="runs", agent=Resources("4"), workers_per_node=4, metrics_port=0
)
JOBS = [JOB, FULL, BARE]
STORE = "etcd://etcd.etcd:2379/jobs/gpt"
SECURE = KubernetesJob("gpt", "gpt", "train.py", 4, TEXT, TOKEN, tls=TlsPems("the certificate", "the key", "the authority"))
SEVERAL = KubernetesJob(
    "gpt", "gpt", "train.py", 4, TEXT, TOKEN, tls_secret="mine", store=STORE, num_coordinators=3, storage_class="fast.example"
)
SHARED = KubernetesJob(
    *("gpt", "gpt", "train.py", 4, TEXT, TOKEN),
    store=STORE.replace("etcd:", "etcds:"),
    num_coordinators=2,
    claim="runs",
    store_secret="for-etcd",
    store_user="gpt",
)
# From the first version on in which all fields are enabled without a switch.
VERSIONS = [f"1.{minor}" for minor in range(31, int(kubernetes_validate.latest_version().split(".")[1]) + 1)]


def loaded(job: KubernetesJob) -> dict[str, dict[str, Any]]:
    """The manifests by their kind, as kubectl reads them; the caller may change them."""
    return copy.deepcopy(_loaded(job))


@cache
def _loaded(job: KubernetesJob) -> dict[str, dict[str, Any]]:
    found = list(yaml.safe_load_all(to_yaml(manifests(job))))
    return {manifest["kind"] + ("/tls" if manifest.get("type") == "kubernetes.io/tls" else ""): manifest for manifest in found}


def pod(job: KubernetesJob, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = loaded(job)[kind]["spec"]["template"]["spec"]
    return found


def container(job: KubernetesJob, kind: str) -> dict[str, Any]:
    (found,) = pod(job, kind)["containers"]
    return dict(found)


def commands(job: KubernetesJob) -> list[list[str]]:
    """Every `recycle` command in the manifests: two of the coordinator, and the agents'."""
    script = container(job, "Deployment")["command"][-1]
    lines = [line.split() for line in script.splitlines() if line.strip().startswith("recycle ")]
    return [*lines, container(job, "Job")["command"]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("job", [*JOBS, SECURE, SEVERAL, SHARED], ids=["plain", "full", "bare", "secure", "several", "shared"])
def test_every_manifest_is_valid_by_the_schema_of_the_api(job, version):
    for manifest in loaded(job).values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schema_refuses_a_field_that_is_not_there():
    manifest = loaded(JOB)["Job"]
    manifest["spec"]["maxRestarts"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl: apt-get install kubectl")
def test_kubectl_reads_the_stream(tmp_path):
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": os.devnull}  # it asks no cluster
    command = ["kubectl", "label", "--local", "-f", "-", "-o", "name", "a=b"]
    text = to_yaml(manifests(FULL))
    done = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (
        0,
        [
            "secret/gpt-token",
            "configmap/gpt-job",
            "persistentvolumeclaim/gpt-run",
            "service/gpt-coordinator",
            "deployment.apps/gpt-coordinator",
            "job.batch/gpt-agents",
        ],
    ), done.stderr


def test_what_exists_already_is_not_made():
    assert set(loaded(JOB)) == {"Secret", "ConfigMap", "PersistentVolumeClaim", "Service", "Deployment", "Job"}
    assert set(loaded(BARE)) == {"Service", "Deployment", "Job"}


@pytest.mark.parametrize("job", JOBS)
def test_at_most_one_coordinator_runs(job):
    spec = loaded(job)["Deployment"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert job.claim or loaded(job)["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]


@pytest.mark.parametrize("job", JOBS)
def test_the_failure_of_a_pod_ends_no_other_pod(job):
    spec = loaded(job)["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", job.num_nodes, job.num_nodes)
    assert spec["backoffLimitPerIndex"] >= 1
    # Each of these would end the whole Job after some failures.
    assert {"backoffLimit", "maxFailedIndexes", "activeDeadlineSeconds"}.isdisjoint(spec)
    assert {rule["action"] for rule in spec["podFailurePolicy"]["rules"]} == {"Ignore"}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # which a podFailurePolicy demands


@pytest.mark.parametrize("job", JOBS)
def test_only_the_end_of_the_run_completes_the_agents(job):
    """One agent that succeeds completes all; so an agent that is taken away must not succeed."""
    assert loaded(job)["Job"]["spec"]["successPolicy"] == {"rules": [{"succeededCount": 1}]}
    assert make_parser().parse_args(commands(job)[-1][1:]).stopped_code > 0


@pytest.mark.parametrize("job", JOBS)
def test_no_probe_can_kill_a_coordinator_that_is_slow(job):
    found = container(job, "Deployment")
    assert {"livenessProbe", "startupProbe"}.isdisjoint(found)
    assert found["readinessProbe"]["tcpSocket"] == {"port": "control"}
    assert not {name for name in container(job, "Job") if name.endswith("Probe")}


@pytest.mark.parametrize("job", JOBS)
def test_a_pod_outlives_the_grace_of_its_workers(job):
    grace_s = make_parser().parse_args(commands(job)[-1][1:]).grace
    assert grace_s == job.grace_s
    assert pod(job, "Job")["terminationGracePeriodSeconds"] >= grace_s + 10


@pytest.mark.parametrize("job", [JOB, FULL])
def test_the_token_is_in_the_secret_only(job):
    others = [manifest for kind, manifest in loaded(job).items() if kind != "Secret"]
    assert loaded(job)["Secret"]["stringData"] == {"token": TOKEN}
    written = yaml.safe_dump(others)
    assert TOKEN not in written
    assert base64.b64encode(TOKEN.encode()).decode() not in written


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
@pytest.mark.parametrize("job", JOBS)
def test_recycle_accepts_the_permissions_of_the_token_file(job, kind, tmp_path):
    (volume,) = [volume["secret"] for volume in pod(job, kind)["volumes"] if "secret" in volume]
    (mount,) = [mount for mount in container(job, kind)["volumeMounts"] if mount["name"] == "token"]
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(volume["defaultMode"])
    assert read_token(file, makes_one=False) == TOKEN
    assert (volume["defaultMode"], mount["readOnly"], volume["secretName"]) == (0o400, True, job.secret_name)
    assert {f"{mount['mountPath']}/token"} == {str(make_parser().parse_args(words[1:]).token_file) for words in commands(job)}
    assert "fsGroup" not in pod(job, kind)["securityContext"]  # with it, a group could read the file


@pytest.mark.parametrize(("job", "secret"), [(SECURE, "gpt-tls"), (SEVERAL, "mine")])
def test_every_container_gets_the_certificate_at_the_paths_of_its_command(job, secret):
    for kind in ("StatefulSet" if job.store else "Deployment", "Job"):
        (volume,) = [volume for volume in pod(job, kind)["volumes"] if volume["name"] == "tls"]
        (mount,) = [mount for mount in container(job, kind)["volumeMounts"] if mount["name"] == "tls"]
        assert volume["secret"] == {"secretName": secret, "defaultMode": 0o400}
        assert "subPath" not in mount  # which would not follow a Secret that is renewed
        command = " ".join(container(job, kind)["command"])
        flags = zip(("cert", "key", "ca"), ("tls.crt", "tls.key", "ca.crt"), strict=True)
        assert " ".join(f"--tls-{name} {mount['mountPath']}/{key}" for name, key in flags) in command
    assert ("Secret/tls" in loaded(job)) == (job is SECURE)
    if job is SECURE:
        texts = {"tls.crt": "the certificate", "tls.key": "the key", "ca.crt": "the authority"}
        assert loaded(job)["Secret/tls"]["stringData"] == texts
        others = [manifest for kind, manifest in loaded(job).items() if kind != "Secret/tls"]
        assert "the key" not in yaml.safe_dump(others)


@pytest.mark.parametrize("job", [SEVERAL, SHARED])
def test_with_a_store_every_coordinator_has_a_name_and_agents_know_all_of_them(job):
    found = loaded(job)
    spec, service = found["StatefulSet"]["spec"], found["Service"]
    assert "Deployment" not in found
    assert (spec["replicas"], spec["serviceName"]) == (job.num_coordinators, service["metadata"]["name"])
    assert spec["podManagementPolicy"] == "Parallel"  # a standby never becomes ready
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    names = [f"gpt-coordinator-{number}.gpt-coordinator:29400" for number in range(job.num_coordinators)]
    assert make_parser().parse_args(container(job, "Job")["command"][1:]).address.split(",") == names
    (command,) = [line.split() for line in container(job, "StatefulSet")["command"][-1].splitlines() if "recycle " in line]
    args = make_parser().parse_args(command[1 : command.index("||")])
    assert (args.store, args.listen, args.resume) == (job.store, "0.0.0.0:29400", None)


def test_the_secret_for_etcd_is_mounted_in_coordinators_alone():
    (volume,) = [volume for volume in pod(SHARED, "StatefulSet")["volumes"] if volume["name"] == "store"]
    (mount,) = [mount for mount in container(SHARED, "StatefulSet")["volumeMounts"] if mount["name"] == "store"]
    assert volume["secret"] == {"secretName": "for-etcd", "defaultMode": 0o400}
    (command,) = [line for line in container(SHARED, "StatefulSet")["command"][-1].splitlines() if "recycle " in line]
    args = make_parser().parse_args(command.split()[1 : command.split().index("||")])
    keys = {"ca.crt": args.store_ca, "tls.crt": args.store_cert, "tls.key": args.store_key, "password": args.store_password_file}
    assert {key: str(path) for key, path in keys.items()} == {key: f"{mount['mountPath']}/{key}" for key in keys}
    assert args.store_user == "gpt"
    assert "for-etcd" not in yaml.safe_dump(loaded(SHARED)["Job"])


def test_with_a_store_every_coordinator_has_a_volume_unless_they_share_a_claim():
    (claim,) = loaded(SEVERAL)["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert (claim["metadata"]["name"], claim["spec"]["storageClassName"]) == ("run", "fast.example")
    assert "run" not in [volume["name"] for volume in pod(SEVERAL, "StatefulSet")["volumes"]]
    assert "volumeClaimTemplates" not in loaded(SHARED)["StatefulSet"]["spec"]
    (volume,) = [volume for volume in pod(SHARED, "StatefulSet")["volumes"] if volume["name"] == "run"]
    assert volume["persistentVolumeClaim"] == {"claimName": "runs"}
    for job in (SEVERAL, SHARED):
        assert "PersistentVolumeClaim" not in loaded(job)
        assert {"name": "run", "mountPath": "/recycle/volume"} in container(job, "StatefulSet")["volumeMounts"]


@pytest.mark.parametrize("job", JOBS)
def test_agents_find_the_coordinator_by_the_name_of_its_service(job):
    service, parsed = loaded(job)["Service"], [make_parser().parse_args(words[1:]) for words in commands(job)]
    (port,) = service["spec"]["ports"]
    ports = {each["name"]: each["containerPort"] for each in container(job, "Deployment")["ports"]}
    assert parsed[-1].address == f"{service['metadata']['name']}:{port['port']}"
    assert [args.listen for args in parsed[:-1]] == [f"0.0.0.0:{ports[port['targetPort']]}"] * 2
    selected = loaded(job)["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= selected.items()
    assert not service["spec"]["selector"].items() <= loaded(job)["Job"]["spec"]["template"]["metadata"]["labels"].items()
    assert "clusterIP" not in service["spec"]  # of a headless Service, the name has no address before the pod is there


@pytest.mark.parametrize("job", JOBS)
def test_the_run_folder_lies_on_the_volume_and_has_the_flags_whether_it_is_new_or_not(job):
    resumed, new, _ = (make_parser().parse_args(words[1:]) for words in commands(job))
    (mount,) = [each for each in container(job, "Deployment")["volumeMounts"] if each["name"] == "run"]
    assert new.out == resumed.resume
    assert str(new.out).startswith(f"{mount['mountPath']}/")
    keys = [{name: value for name, value in vars(args).items() if "." in name} for args in (new, resumed)]
    assert keys[0] == keys[1]
    assert keys[0].get("training.steps") == (2000 if job is FULL else None)


def test_a_job_file_is_mounted_as_a_file_because_the_run_folder_keeps_its_path():
    found = loaded(FULL)
    for kind in ("Deployment", "Job"):
        (mount,) = [each for each in container(FULL, kind)["volumeMounts"] if each["name"] == "job"]
        assert mount["mountPath"] == str(commands(FULL)[-1][3])
        assert found["ConfigMap"]["data"][mount["subPath"]] == TEXT
    assert commands(BARE)[-1][3] == "/app/train.py"


def test_agents_get_what_they_ask_for():
    expected = {"cpu": "32", "memory": "512Gi", "nvidia.com/gpu": 8}
    assert container(FULL, "Job")["resources"] == {"requests": expected, "limits": {"memory": "512Gi", "nvidia.com/gpu": 8}}
    assert container(BARE, "Job")["resources"] == {"requests": {"cpu": "4"}}
    for job in JOBS:
        (memory,) = [volume for volume in pod(job, "Job")["volumes"] if "emptyDir" in volume]
        mounts = {mount["name"]: mount["mountPath"] for mount in container(job, "Job")["volumeMounts"]}
        assert (memory["emptyDir"], mounts[memory["name"]]) == ({"medium": "Memory"}, "/dev/shm")


def test_prometheus_is_told_the_port_that_the_coordinator_answers_at():
    notes = loaded(JOB)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    read = [vars(make_parser().parse_args(words[1:])) for words in commands(JOB)[:2]]
    assert {flags["log.metrics_port"] for flags in read} == {int(notes["prometheus.io/port"])}
    assert {flags["log.metrics_host"] for flags in read} == {"0.0.0.0"}
    assert "annotations" not in loaded(BARE)["Deployment"]["spec"]["template"]["metadata"]


def test_all_objects_have_the_labels_and_the_namespace_of_the_job():
    for manifest in loaded(FULL).values():
        labels = manifest["metadata"]["labels"]
        assert (labels["app.kubernetes.io/name"], labels["app.kubernetes.io/instance"]) == ("recycle", "gpt")
        assert manifest["metadata"]["namespace"] == "research"


@pytest.mark.parametrize("text", ["a = 1", "a = 1 \n\tb\n", "\n\n  a: - b\n", "# é 火 \U0001f600\r\n---\n", "'\"#{}\n|\n>\n", ""])
def test_a_job_file_of_any_text_arrives_as_it_is(text):
    assert loaded(KubernetesJob("gpt", "gpt", "train.py", 1, text, TOKEN))["ConfigMap"]["data"] == {"train.py": text}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "My_Job"}, "'My_Job' cannot name a job on Kubernetes"),
        ({"name": "7b"}, "'7b' cannot name a job"),
        ({"name": "a-"}, "'a-' cannot name a job"),
        ({"name": "a" * 52}, "at most 51 small letters"),
        ({"name": "a\n"}, "cannot name a job"),
        ({"namespace": "Research"}, "'Research' is no namespace"),
        ({"token": "", "secret": "no_secret"}, "'no_secret' is no name of a Secret"),
        ({"secret": "both"}, "give one of them"),
        ({"claim": "a..b"}, "'a..b' is no name of a claim"),
        ({"storage_class": "-"}, "'-' is no name of a storage class"),
        ({"tls_secret": "no_secret"}, "'no_secret' is no name of a Secret"),
        ({"tls_secret": "mine", "tls": TlsPems("", "", "")}, "give one of them"),
        ({"num_coordinators": 2}, "name it with --store"),
        ({"store_user": "gpt"}, "name it with --store"),
        ({"store": STORE, "num_coordinators": 2, "store_user": "gpt"}, "name the Secret that has it with --store-secret"),
        ({"store": STORE, "num_coordinators": 2, "store_secret": "mine"}, "write etcds://"),
        ({"store": STORE}, "2 to 5 coordinators, and not 1"),
        ({"store": "http://etcd", "num_coordinators": 2}, "'http://etcd' is no store"),
        ({"store": STORE, "num_coordinators": 2, "name": "a" * 41}, "at most 40 small letters"),
        ({"image": "a b"}, "'a b' is no image"),
        ({"image": ""}, "'' is no image"),
        ({"num_nodes": 0}, "0 nodes cannot train"),
        ({"agent": Resources("4")}, "say so with --workers"),
        ({"workers_per_node": 0}, "0 workers of an agent cannot train"),
        ({"grace_s": 0.0}, "a grace of 0 s cannot be kept"),
        ({"grace_s": float("nan")}, "a grace of nan s cannot be kept"),
        ({"disk": "lots"}, "'lots' is no quantity"),
        ({"disk": "0Gi"}, "'0Gi' is no quantity"),
        ({"metrics_port": 29400}, "workers connect to port 29400"),
        ({"file": "my-train.py"}, "my-train.py is no job file"),
        ({"file": "train.toml"}, "train.toml is no job file"),
        ({"file": "app/train.py", "file_text": None}, "app/train.py is no path in the image"),
        ({"file_text": "#" * 1_000_001}, "put it into the image"),
    ],
)
def test_what_no_cluster_could_run_is_refused_in_one_sentence(change, says):
    given = {"name": "gpt", "image": "gpt", "file": "train.py", "num_nodes": 2, "file_text": TEXT, "token": TOKEN}
    with pytest.raises(UserError) as refused:
        KubernetesJob(**{**given, **change})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value).replace(repr("a\n"), "")


@pytest.mark.parametrize(
    ("values", "says"), [(("four",), "'four' is no quantity"), (("", "", -1), "-1 GPUs are fewer than none")]
)
def test_resources_that_do_not_exist_are_refused(values, says):
    with pytest.raises(UserError, match=says):
        Resources(*values)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(TEXT)
    return path


WORDS = ("--image", "gpt:1", "--nodes", "4")


def test_the_command_prints_manifests_with_a_fresh_token(file, capsys):
    tokens = []
    for _ in range(2):
        assert main(["kubernetes", str(file), *WORDS, "--print", "--steps", "7", "--no-exact", "--dead", "W1_1,W0_1"]) == 0
        found = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
        assert found["ConfigMap"]["data"] == {"my_model.py": TEXT}
        assert found["Job"]["metadata"]["name"] == "my-model-agents"
        script = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]["command"][-1]
        assert script.count("--dead=W1_1,W0_1") == script.count("--steps=7") == script.count("--no-exact") == 2
        tokens.append(found["Secret"]["stringData"]["token"])
    assert tokens[0] != tokens[1]
    assert min(map(len, tokens)) >= 32


@pytest.mark.parametrize(
    ("words", "num_gpus"),
    [
        ([], 0),
        (["--device", "cuda"], 1),
        (["--device", "cuda", "--coordinator-gpus", "0"], 0),
        (["--coordinator-gpus", "1"], 1),
    ],
)
def test_the_coordinator_of_a_job_on_gpus_has_one_because_it_tries_the_model(words, num_gpus, file, capsys):
    assert main(["kubernetes", str(file), *WORDS, "--print", *words]) == 0
    found = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"].get("limits", {}) == ({"nvidia.com/gpu": 1} if num_gpus else {})
    assert [each["key"] for each in pod["tolerations"]].count("nvidia.com/gpu") == num_gpus


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name a job file"),
        (["{folder}/absent.py"], "cannot read the job file"),
        (["{folder}/binary.py"], "it is no text in UTF-8"),
        (["{folder}/broken.py"], "broken.py is no Python: line 1"),
        (["{folder}/two_files.py"], "imports layers, which lies beside it, but only the file itself goes to the cluster"),
        (["{file}", "--steps", "0"], "training.steps is 0, but it must be"),
        (["{file}", "--metrics-port", "29400"], "workers connect to port 29400"),
        (["{file}", "--file-in-image"], ""),
        (["train.py", "--file-in-image"], "train.py is no path in the image"),
        (["{file}", "--gpus", "0"], "say so with --workers"),
        (["{file}", "--agent-memory", "much"], "'much' is no quantity"),
    ],
)
def test_wrong_words_are_refused_in_one_sentence(words, says, file, capsys):
    folder = file.parent
    (folder / "binary.py").write_bytes(b"\xff\xfe")
    (folder / "broken.py").write_text("def job(:\n")
    (folder / "two_files.py").write_text("from layers import Layer\n")
    (folder / "layers.py").write_text("class Layer: ...\n")
    code = main(["kubernetes", *(word.format(file=file, folder=folder) for word in words), *WORDS, "--print"])
    printed = capsys.readouterr()
    assert code == (2 if says else 0)
    assert says in printed.err
    assert len(printed.err.splitlines()) == (1 if says else 0)


def test_without_kubectl_the_command_says_what_to_do(file, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main(["kubernetes", str(file), *WORDS]) == 2
    assert "add --print, and give the output to 'kubectl apply -f -'" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_manifests_go_to_kubectl_and_its_failure_is_said(code, file, tmp_path, monkeypatch, capsys):
    """The program in the place of kubectl keeps what it is given: no cluster is asked."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec > {tmp_path}/got\necho "$@"\n{shutil.which("cat")}\nexit {code}\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["kubernetes", str(file), *WORDS, "--namespace", "research"]) == (2 if code else 0)
    arguments, _, text = (tmp_path / "got").read_text().partition("\n")
    assert arguments == "apply -f -"
    assert len(list(yaml.safe_load_all(text))) == 6
    says = (
        "kubectl apply failed with exit code 1"
        if code
        else "kubectl logs --namespace research --follow deployment/my-model-coordinator"
    )
    assert says in capsys.readouterr().err


def test_without_pyyaml_the_command_says_how_to_install_it(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["kubernetes", str(file), *WORDS, "--print"]) == 2
    assert "pip install -e '.[kubernetes]'" in capsys.readouterr().err
