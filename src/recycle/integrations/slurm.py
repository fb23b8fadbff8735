"""`SlurmJob`: a job file as a batch job of Slurm; the text of its batch script, and its submission.

The script starts the coordinator on the first node, and on every node a step with an agent. What differs from job to job stands
in the `#SBATCH` lines and in the variables below them; the rest of the script is always the same.
"""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from recycle.core.errors import FileProblem, UserError
from recycle.core.files import write_text
from recycle.integrations.job_commands import JobCommands

SCRIPT = "job.sbatch"
# Slurm looks at time limits once a minute, and may signal a job that much too early.
_RESOLUTION_S = 60
_SUBMIT_S = 120
_HOST = "COORDINATOR"
_ALL_ADDRESSES = "0.0.0.0"
_TIME_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A batch job: the commands of a job file, what they are run on, and the folder in which the job starts.

    `grace_s` before the time limit the job is asked to stop. `program_folder` is where nodes find the program `recycle`, if it is
    not empty. `sbatch_flags` are further flags of sbatch. All paths are absolute.
    """

    commands: JobCommands
    num_nodes: int
    folder: str
    name: str
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    partition: str = ""
    account: str = ""
    time_limit: str = ""
    grace_s: int = 300
    program_folder: str = ""
    sbatch_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for flag in self.sbatch_flags:
            if not flag.startswith("-") or "\n" in flag:
                raise UserError(f"{flag!r} is no flag of sbatch: write it as --sbatch=--constraint=a100")
        least_s = self.grace_s + 2 * _RESOLUTION_S
        if self.time_limit and (limit_s := parse_time_limit(self.time_limit)) is not None and limit_s < least_s:
            raise UserError(
                f"a job of {self.time_limit} that stops {self.grace_s} s before its end makes no progress: "
                f"give it at least {least_s} s with --time, or less time to stop with --grace"
            )


def parse_time_limit(text: str) -> int | None:
    """Return the seconds of a time limit as sbatch writes it, such as 90, 24:00:00 or 2-12; None if there is no limit."""
    if text.upper() in ("INFINITE", "UNLIMITED", "0"):
        return None
    found = _TIME_LIMIT.fullmatch(text)
    if found is None:
        raise UserError(f"{text!r} is no time limit: write minutes, HH:MM:SS, or DAYS-HH:MM:SS")
    first, second, third = (int(found[name] or 0) for name in ("first", "second", "third"))
    if found["days"] is not None:
        return ((int(found["days"]) * 24 + first) * 60 + second) * 60 + third
    return (first * 60 + second) * 60 + third if found["third"] is not None else first * 60 + second


def render_batch_script(job: SlurmJob) -> str:
    """Return the text of the batch script of a job."""
    return "\n".join([*_heading(job), "", *_variables(job), _BODY])


def submit_batch_script(job: SlurmJob) -> str:
    """Write the script into the run folder and submit it; return Slurm's number of the job.

    Raises FileProblem if the folder cannot be written, UserError if there is no sbatch or it refuses the job.
    """
    folder = Path(job.commands.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / SCRIPT, render_batch_script(job))
    except OSError as problem:
        raise FileProblem(f"cannot write {folder}: {problem.strerror or problem}") from None
    try:
        command = ["sbatch", "--parsable", str(folder / SCRIPT)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SUBMIT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch has not answered for {_SUBMIT_S} s: look with squeue whether the job is there") from None
    except FileNotFoundError:
        raise UserError(
            "there is no sbatch here: run this where jobs are submitted, or print the script with --print and submit it there"
        ) from None
    if done.returncode:
        reason = done.stderr.strip().replace("\n", "; ")
        raise UserError(f"sbatch refuses {folder / SCRIPT}: {reason}")
    return done.stdout.strip().partition(";")[0]


def output_pattern(out: str) -> str:
    """The file to which Slurm writes what a job in this run folder prints; %j is the job's number."""
    return f"{out.replace('%', '%%')}/slurm-%j.out"


def _heading(job: SlurmJob) -> list[str]:
    out, flags = shlex.quote(job.commands.out), job.sbatch_flags
    wanted = {
        "job-name": job.name,
        "chdir": job.folder,
        "output": output_pattern(job.commands.out),
        "partition": job.partition,
        "account": job.account,
        "time": job.time_limit,
        "nodes": str(job.num_nodes),
        "gpus-per-node": "" if job.gpus_per_node is None else str(job.gpus_per_node),
        "cpus-per-task": "" if job.cpus_per_node is None else str(job.cpus_per_node),
    }
    return [
        "#!/bin/bash",
        f"# Trains {Path(job.commands.file).name}: a coordinator on the first node, and on every node an agent with its workers.",
        f"# `recycle slurm` made this script. To submit it yourself: mkdir -p {out} && sbatch THIS_FILE",
        *(f"#SBATCH {shlex.quote(f'--{name}={value}')}" for name, value in wanted.items() if value),
        "# One agent runs all workers of a node.",
        "#SBATCH --ntasks-per-node=1",
        "# The loss of a node does not end the job: the workers of other nodes take over the work.",
        "#SBATCH --no-kill",
        "# The job may be queued again, and then continues from its last checkpoint. Its output is one file.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"# {job.grace_s} s before the time limit this script (B), and no step, gets SIGUSR1: time for a checkpoint.",
        "# It is not SIGTERM, which scancel sends: a job that was cancelled must not be queued again.",
        f"#SBATCH --signal=B:USR1@{job.grace_s}",
        *(f"#SBATCH {shlex.quote(flag)}" for flag in flags),
    ]


def _variables(job: SlurmJob) -> list[str]:
    commands = job.commands
    agent = shlex.join(commands.agent(_HOST)).replace(f"{_HOST}:{commands.port}", f'"$coordinator_host:{commands.port}"', 1)
    path = [f'export PATH={shlex.quote(job.program_folder)}:"$PATH"'] if job.program_folder else []
    return [
        *path,
        "# The first node, by the name that Slurm has for it, and by the name by which other nodes reach it.",
        "first_node=$SLURMD_NODENAME coordinator_host=$(hostname)",
        f"out={shlex.quote(commands.out)} token={shlex.quote(commands.token_file)} port={commands.port}",
        f"start=({shlex.join(commands.coordinator(_ALL_ADDRESSES))})",
        f"resume=({shlex.join(commands.resumed_coordinator(_ALL_ADDRESSES))})",
        f"agent=({agent})",
        "export first_node coordinator_host port",
    ]


_BODY = r"""
say() { echo "$(date +%T) $*" >&2; }

# Whether Slurm has taken a node out of this job. If Slurm does not answer, nothing is known, and no node counts as lost. Of a job
# that ends, Slurm takes out one node after the other: only one that runs counts.
is_lost() {
    local nodes
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --states=RUNNING --format=%N) && [ -n "$nodes" ] &&
        ! scontrol show hostnames "$nodes" | grep --quiet --line-regexp --fixed-strings -- "$1"
}

# If the first node is lost, this script is lost with it, but --no-kill keeps the job: it would wait for its time limit. So every
# step looks whether the coordinator can be reached. If it cannot, and the node is lost, the step has the job queued again. It
# prints nothing: srun, which would read that, is lost, too, and a step does not end while anything may still print. It ends
# with the agent ($$).
watch_first_node() {
    while sleep 60 && kill -0 $$; do
        if ! (exec 3<>"/dev/tcp/$coordinator_host/$port") && is_lost "$first_node"; then
            scontrol requeue "$SLURM_JOB_ID"
        fi
    done
}
export -f is_lost watch_first_node

# The agent of one node. A step that fails is started again after a pause. One that ends well has done its work, or is asked to
# leave, or its node is lost: srun returns 0 then, too. Steps overlap, so that a new one need not wait until Slurm has cleared
# away the one before; no CPU is bound, because the workers share those of the step.
run_agent() {
    local node=$1 pause=2
    shift
    until srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap --cpu-bind=none --input=none \
        bash -c 'watch_first_node &>/dev/null & exec "$@"' agent "$@"; do
        # Without the script ($$) there is no job, also if Slurm has overlooked this process.
        kill -0 $$ 2>/dev/null || return
        if is_lost "$node"; then
            say "$node is lost; the job goes on without it"
            return
        fi
        say "the agent on $node failed, and is started again in $pause s"
        sleep "$pause"
        pause=$((pause < 150 ? 2 * pause : 300))
    done
}

# SIGUSR1: the time limit is near. SIGTERM: somebody wants the job to end. Both have the coordinator write a checkpoint and end.
coordinator='' has_signal='' wants_requeue=''
stop() {
    has_signal=yes
    [ -z "$coordinator" ] || kill -TERM "$coordinator" 2>/dev/null
}
trap 'say "the time limit is near: the job stops with a checkpoint, and is queued again"; wants_requeue=yes; stop' USR1
trap 'say "the job is asked to end: it stops with a checkpoint"; stop' TERM

mkdir -p "$out"
# Workers of an earlier start of this job must not join this one, as those of a lost node that still runs: without the file, the
# coordinator begins a job of its own, from the last checkpoint if there is one.
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then rm -f "$out/job.json"; fi

# A coordinator that is killed is started again, and finds its workers. Its other exit codes are final.
start_coordinator() {
    if compgen -G "$out/checkpoints/step-*[0-9]" >/dev/null; then
        "${resume[@]}" &
    else
        "${start[@]}" &
    fi
    coordinator=$!
}
wait_for_coordinator() {
    while true; do
        has_signal=''
        wait "$coordinator"
        code=$?
        # A signal to this script ends the wait, but not the coordinator.
        [ -n "$has_signal" ] || return
    done
}

[ -z "$has_signal" ] || exit 143
start_coordinator
# Agents need the token, which the coordinator writes.
until [ -s "$token" ] || ! kill -0 "$coordinator" 2>/dev/null; do sleep 0.2; done
agents=()
# A loop of run_agent that outlived this script would start agents in the next start of the job.
end_agents() { kill "${agents[@]}" 2>/dev/null; }
trap end_agents EXIT
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    run_agent "$node" "${agent[@]}" &
    agents+=($!)
done
for restarts_left in 4 3 2 1 0; do
    wait_for_coordinator
    # 128 + the number of a signal; SIGINT (130) and SIGTERM (143) are requests to stop.
    if [ "$code" -le 128 ] || [ "$code" -eq 130 ] || [ "$code" -eq 143 ]; then break; fi
    if [ -n "$wants_requeue" ] || [ "$restarts_left" -eq 0 ]; then break; fi
    say "the coordinator was killed (exit code $code), and is started again"
    start_coordinator
done

# Agents end by themselves; those of lost nodes never do.
for _ in {1..5}; do
    kill -0 "${agents[@]}" 2>/dev/null || break
    sleep 1
done
end_agents
if [ -n "$wants_requeue" ] && [ "$code" -gt 128 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""
