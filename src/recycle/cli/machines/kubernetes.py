"""`recycle kubernetes`: a job on a Kubernetes cluster, as manifests that `kubectl` applies."""

import argparse
import ast
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from recycle.cli.arguments import Subparsers, add_command
from recycle.cli.machines.endpoint_flags import add_tls_arguments, read_tls
from recycle.cli.training.train_config import add_config_arguments, read_config
from recycle.control.net.wire import new_token
from recycle.core.errors import FileProblem, UserError
from recycle.integrations.kubernetes import manifests, to_yaml
from recycle.integrations.kubernetes_job import METRICS_PORT, KubernetesJob, Resources, TlsPems

_DESCRIPTION = """\
Train a job file on a Kubernetes cluster: a coordinator that comes back wherever its pod is started again, and an agent on each of
several nodes, which runs a worker for each of its GPUs. The manifests go to 'kubectl apply', or with --print to the standard
output. The image needs ReCycle and everything that the job file imports. Flags of the configuration change the job, as those of
'recycle coordinator' do; paths among them are paths in the image."""
_EXAMPLES = """\
examples:
  four nodes, with eight GPUs each
    recycle kubernetes train.py --image registry.example/train:1 --nodes 4 --gpus 8 --device cuda
  the manifests in a file, to read and change before they are applied; it holds the job's token, a secret
    recycle kubernetes train.py --image registry.example/train:1 --nodes 4 --gpus 8 --device cuda --print > job.yaml
  nodes without GPUs
    recycle kubernetes train.py --image registry.example/train:1 --nodes 2 --gpus 0 --workers 4 --agent-cpus 4 --steps 1000
  a job file of the image, with the modules beside it, and a Secret that the cluster has
    recycle kubernetes /app/train.py --file-in-image --image registry.example/train:1 --nodes 4 --gpus 8 --device cuda \\
      --secret job-token
  control connections with TLS, by a Secret that cert-manager keeps, and three coordinators, of which one leads
    recycle kubernetes train.py --image registry.example/train:1 --nodes 4 --gpus 8 --device cuda \\
      --tls-secret train-certificate --coordinators 3 --store etcd://etcd.etcd:2379/jobs/a

With --tls-cert, --tls-key and --tls-ca, which are files of this machine, the manifests have a Secret with them."""


def add_kubernetes_parser(subparsers: Subparsers) -> None:
    summary, usage = "train a job file on a Kubernetes cluster", "recycle kubernetes FILE --image IMAGE --nodes N [options]"
    parser = add_command(subparsers, "kubernetes", run_kubernetes, summary, _DESCRIPTION, _EXAMPLES, usage)
    add_config_arguments(parser, "the job file (.py)")
    about = "the container image of coordinator and agents"
    parser.add_argument("--image", required=True, metavar="IMAGE", help=about)
    parser.add_argument(
        "--nodes", required=True, type=int, metavar="N", help="how many agents; each has a node, if there are enough"
    )
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs of each agent (%(default)s)")
    parser.add_argument("--workers", type=int, metavar="N", help="workers of each agent (one for each of its GPUs)")
    about = "how long the workers of an agent may take to leave, in seconds (%(default)g)"
    parser.add_argument("--grace", type=float, default=600.0, metavar="S", help=about)
    parser.add_argument("--agent-cpus", default="", metavar="N", help="processor cores that each agent asks for")
    parser.add_argument("--agent-memory", default="", metavar="SIZE", help="memory of each agent, such as 64Gi")
    about = "processor cores that the coordinator asks for (%(default)s)"
    parser.add_argument("--coordinator-cpus", default="1", metavar="N", help=about)
    about = "memory of the coordinator, which loads the model once (%(default)s)"
    parser.add_argument("--coordinator-memory", default="2Gi", metavar="SIZE", help=about)
    about = "GPUs of the coordinator, which tries the model once on the device of the job (1 with --device cuda, else 0)"
    parser.add_argument("--coordinator-gpus", type=int, metavar="N", help=about)
    parser.add_argument("--name", default="", metavar="NAME", help="the name of the job on the cluster (that of the job file)")
    parser.add_argument("--namespace", default="", metavar="NAME", help="its namespace (the one that kubectl uses)")
    about = "FILE is a path in the image, and not on this machine"
    parser.add_argument("--file-in-image", action="store_true", help=about)
    about = "an existing Secret, whose key 'token' is the job's token (a new one)"
    parser.add_argument("--secret", default="", metavar="NAME", help=about)
    parser.add_argument("--disk", default="50Gi", metavar="SIZE", help="size of the volume of the run folder (%(default)s)")
    parser.add_argument(
        "--storage-class", default="", metavar="NAME", help="storage class of that volume (the cluster's default)"
    )
    parser.add_argument("--claim", default="", metavar="NAME", help="an existing claim for the run folder (a new one)")
    add_tls_arguments(parser)
    about = "use TLS with an existing Secret, whose keys are tls.crt, tls.key and ca.crt, as those of cert-manager"
    parser.add_argument("--tls-secret", default="", metavar="NAME", help=about)
    about = "keep the journal and the leader there, as etcd://HOST:PORT[,HOST:PORT...]/PREFIX; etcds:// uses TLS"
    parser.add_argument("--store", default="", metavar="URL", help=about)
    about = "an existing Secret with the certificate for etcd: its keys are ca.crt, tls.crt and tls.key"
    parser.add_argument("--store-secret", default="", metavar="NAME", help=about)
    about = "a user of etcd, whose password is the key 'password' of that Secret"
    parser.add_argument("--store-user", default="", metavar="NAME", help=about)
    about = "how many coordinators, of which one leads (2 with --store, else 1)"
    parser.add_argument("--coordinators", type=int, metavar="N", help=about)
    parser.add_argument("--print", action="store_true", help="print the manifests, and apply nothing")


def run_kubernetes(args: argparse.Namespace) -> None:
    job = _job_of(args)
    text = to_yaml(manifests(job))
    if args.print:
        print(text, end="")
        return
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise UserError("there is no kubectl on this machine: add --print, and give the output to 'kubectl apply -f -' elsewhere")
    code = subprocess.run([kubectl, "apply", "-f", "-"], input=text, text=True, check=False).returncode
    if code:
        raise UserError(f"kubectl apply failed with exit code {code}: see above why; 'kubectl delete' removes what it has made")
    place = f" --namespace {job.namespace}" if job.namespace else ""
    pods = f"--prefix --selector app.kubernetes.io/instance={job.name},app.kubernetes.io/component=coordinator"
    which = pods if job.store else f"deployment/{job.coordinator_name}"
    print(f"follow it with: kubectl logs{place} --follow {which}", file=sys.stderr)


def _job_of(args: argparse.Namespace) -> KubernetesJob:
    """The job of parsed arguments. Raises UserError for input that cannot be used."""
    if args.config is None:
        raise UserError("name a job file, whose function job returns the recycle.Job to train")
    read_config(args)  # wrong values of flags are refused now, and not by the coordinator
    given = {name.partition(".")[2]: value for name, value in vars(args).items() if "." in name}
    metrics_port = given.pop("metrics_port", METRICS_PORT)
    path: Path = args.config
    tls = read_tls(args)
    coordinator_gpus = int(given.get("device") == "cuda") if args.coordinator_gpus is None else args.coordinator_gpus
    return KubernetesJob(
        name=args.name or path.stem.lower().replace("_", "-"),
        image=args.image,
        file=str(path) if args.file_in_image else path.name,
        num_nodes=args.nodes,
        file_text=None if args.file_in_image else _read_job_file(path),
        token="" if args.secret else new_token(),
        secret=args.secret,
        namespace=args.namespace,
        flags=tuple(_flag(key, value) for key, value in given.items()),
        workers_per_node=args.workers,
        agent=Resources(args.agent_cpus, args.agent_memory, args.gpus),
        coordinator=Resources(args.coordinator_cpus, args.coordinator_memory, coordinator_gpus),
        grace_s=args.grace,
        disk=args.disk,
        storage_class=args.storage_class,
        claim=args.claim,
        metrics_port=metrics_port,
        tls=TlsPems.read(tls) if tls is not None else None,
        tls_secret=args.tls_secret,
        store=args.store,
        store_secret=args.store_secret,
        store_user=args.store_user,
        num_coordinators=args.coordinators if args.coordinators is not None else 2 if args.store else 1,
    )


def _flag(key: str, value: Any) -> str:
    """The flag that gives a key of the configuration this value."""
    dashed = key.replace("_", "-")
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed}={value}"


def _read_job_file(path: Path) -> str:
    """The text of a job file. Raises if it is no Python, or imports a module beside it, which pods would not have."""
    try:
        text = path.read_bytes().decode()
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text in UTF-8"
        raise FileProblem(f"cannot read the job file {path}: {reason}; one in the image is named with --file-in-image") from None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as problem:
        where = f": line {problem.lineno}: {problem.msg}" if isinstance(problem, SyntaxError) else f": {problem}"
        raise UserError(f"{path} is no Python{where}") from None
    for name in _imported_modules(tree):
        if name != path.stem and ((path.parent / f"{name}.py").is_file() or (path.parent / name / "__init__.py").is_file()):
            raise UserError(
                f"{path} imports {name}, which lies beside it, but only the file itself goes to the cluster: "
                "put both into the image, and name the file there with --file-in-image"
            )
    return text


def _imported_modules(tree: ast.Module) -> list[str]:
    """The first part of the name of every module that a file imports."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module.partition(".")[0])
    return found
