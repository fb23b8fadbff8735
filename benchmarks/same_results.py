"""Hold the results of a refactoring against those from before it: plan files, trained weights, simulator tables.

    python benchmarks/same_results.py --save     # at the commit that is trusted
    python benchmarks/same_results.py            # at any later one: exit code 1 if a result differs

Every case is a command of the public CLI, so that the script survives any move inside the package. A result is the sha256 of a
plan file without its planning time, the `weights_sha256` of an exact run, or the sha256 of a printed table.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

EXPECTED = Path(__file__).with_suffix(".json")
SHAPE = "--pipelines 3 --stages 4 --microbatches 6"
SMALL = "--pipelines 2 --stages 2 --microbatches 3"
WIDE = "--pipelines 4 --stages 8 --microbatches 16"

PLANS = [
    f"{SHAPE} --costs 1,1,1 --techniques none",
    f"{SHAPE} --costs 1,1,1 --techniques decoupled",
    f"{SHAPE} --costs 1,1,1 --techniques staggered",
    f"{SHAPE} --costs 1,1,1 --techniques decoupled,staggered",
    f"{SHAPE} --costs 10,13,9 --memory 4,3,2,1 --techniques none",
    f"{SHAPE} --costs 10,13,9 --memory 4,3,2,1",
    f"{SHAPE} --costs 10,13,9 --comm 2 --memory unlimited",
    f"{SHAPE} --costs 10,13,9 --comm 2 --memory 8",
    f"{SHAPE} --costs 1,1,1 --memory 6 --fail W1_2 --techniques adaptive",
    f"{SHAPE} --costs 1,1,1 --memory 6 --fail W1_2 --techniques adaptive,decoupled",
    f"{SHAPE} --costs 1,1,1 --memory 6 --fail W1_2 --techniques adaptive,staggered",
    f"{SHAPE} --costs 1,1,1 --memory 6 --fail W1_2",
    f"{SHAPE} --costs 10,13,9 --memory 6 --fail W1_2 --method greedy",
    f"{SHAPE} --costs 10,13,9 --memory 8 --fail W1_2,W0_0 --method greedy",
    f"{SHAPE} --costs 10,13,9 --fail W0_0,W1_1,W2_2,W0_3 --method greedy",
    f"{SHAPE} --costs 7,11,5 --comm 3 --fail W0_0,W1_0 --method greedy --techniques adaptive",
    f"{SHAPE} --costs 10,13,9 --memory 6 --failures 1",
    f"{SHAPE} --costs 10,13,9 --memory 6 --failures 2 --method greedy",
    f"{SHAPE} --costs 10,13,9 --memory 6 --failures 3 --techniques adaptive,decoupled --method greedy",
    f"{SHAPE} --costs 10,13,9 --failures 5 --method greedy",
    f"{SMALL} --costs 1,1,1 --method milp",
    f"{SMALL} --costs 1,1,1 --fail W0_1 --method milp",
    f"{SMALL} --costs 2,3,1 --fail W0_1 --method milp --techniques adaptive",
    f"{SMALL} --costs 2,3,1 --memory 2 --fail W1_0 --method milp --techniques adaptive,decoupled",
    f"{SMALL} --costs 1,1,1 --method cpsat",
    f"{SMALL} --costs 1,1,1 --fail W0_1 --method cpsat",
    f"{SMALL} --costs 2,3,1 --fail W0_1 --method cpsat --techniques adaptive",
    f"{SMALL} --costs 2,3,1 --memory 2,1 --fail W1_0 --method cpsat",
    f"{SMALL} --costs 10,13,9 --fail W1_1 --method auto",
    "--pipelines 3 --stages 2 --microbatches 3 --costs 2,2,1 --fail W0_0 --method cpsat",
    "--pipelines 2 --stages 3 --microbatches 4 --costs 2,2,1 --memory 3 --fail W0_1",
    "--pipelines 1 --stages 4 --microbatches 8 --costs 10,13,9 --memory 4 --method greedy",
    "--pipelines 1 --stages 1 --microbatches 2 --costs 10,13,9",
    f"{WIDE} --costs 10,13,9 --memory 16 --method greedy",
    f"{WIDE} --costs 10,13,9 --memory 8 --failures 4 --method greedy",
    f"{WIDE} --costs 10,13,9 --fail W0_0,W1_3 --method greedy --techniques adaptive",
    f"{WIDE} --profile {{profile}} --method greedy",
    f"{WIDE} --profile {{profile}} --memory 80GiB --failures 3 --method greedy",
    f"{WIDE} --profile {{profile}} --memory 60GiB --fail W2_5 --method greedy",
    f"{WIDE} --profile {{profile}} --memory unlimited --fail W2_5 --techniques adaptive,decoupled --method greedy",
]
TRAINED = "--pipelines 3 --stages 2 --microbatches 4 --steps 8 --layers 4 --exact"
RUNS = {
    "nobody dead": TRAINED,
    "dead from the start": f"{TRAINED} --dead W1_1",
    "killed": f"{TRAINED} --kill W1_1@3",
    "killed in the reduction": f"{TRAINED} --kill W0_0@3:reduce",
    "hung": f"{TRAINED} --hang W0_1@3",
    "re-joined": f"{TRAINED} --kill W1_1@2 --rejoin W1_1@5",
    "clipped": f"{TRAINED} --max-norm 0.5 --kill W1_0@4:step",
    "synchronous": f"{TRAINED} --techniques adaptive,decoupled --kill W2_1@3",
    "coordinator killed": f"{TRAINED} --kill coordinator@4 --dropout 0.1",
    "sgd, tied": f"{TRAINED} --optimizer sgd --momentum 0.9 --tied --schedule cosine --warmup 2",
}
SIMULATE = "simulate --model gpt3-6.7b --gpu a100-80 --pipelines 4 --stages 8 --microbatches 32 --no-cache"
TABLES = {
    "simulate at intervals": f"{SIMULATE} --interval 30m --rejoin 2h --json",
    "simulate at intervals, as text": f"{SIMULATE} --interval 2h --hours 12",
    "simulate by MTBF": f"{SIMULATE} --mtbf 10d --hours 24 --seed 3 --json",
    "simulate with constants": f"{SIMULATE} --interval 1h --set oobleck.reconfigure=57s --fault-free 5.33 --json",
    "trace": "trace make --kind every --pipelines 4 --stages 8 --interval 30m --hours 6 --out {folder}/trace.csv",
    "replay": "replay {plan} --jitter 5% --iterations 20 --json",
    "estimate": "estimate --model gpt3-6.7b --gpu a100-80 --stages 8 --json",
    "reproduce table": "reproduce table --no-cache --json",
    "reproduce ablation": "reproduce ablation --no-cache --json",
    "reproduce scale": "reproduce scale --no-cache --json",
}


def main() -> int:
    """Make every result, and compare it with the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="write the results as the expected ones")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    args = parser.parse_args()
    expected: dict[str, str] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    num_cases = num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, make in cases(Path(folder)):
            if args.only not in name:
                continue
            start_s = time.monotonic()
            found = make()
            num_cases += 1
            is_same = found == expected.get(name)
            num_different += not is_same
            print(f"{'same' if is_same else 'DIFFERENT'}  {time.monotonic() - start_s:6.1f} s  {name}", flush=True)
            if args.save:
                expected[name] = found
                EXPECTED.write_text(json.dumps(expected, indent=1) + "\n")
    print(f"{num_cases - num_different} of {num_cases} results are the same")
    return 0 if args.save else int(num_different > 0)


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of every case, and the function that makes its result."""
    profile, plan = folder / "profile.json", folder / "example.json"
    recycle(f"estimate --model gpt3-6.7b --gpu a100-80 --stages 8 --out {profile}")
    recycle(f"plan {SHAPE} --costs 10,13,9 --fail W1_2 --out {plan}")
    for options in PLANS:
        yield f"plan {options}", lambda options=options: plan_digest(options.format(profile=profile), folder)
    for name, options in RUNS.items():
        yield f"train: {name}", lambda options=options: weights(f"train {options} --json")
    yield "train: resumed", lambda: resumed(folder)
    for name, command in TABLES.items():
        yield f"table: {name}", lambda command=command: table_digest(command.format(folder=folder, plan=plan), folder)


def recycle(command: str) -> str:
    """Run a command of the CLI, and return what it printed."""
    done = subprocess.run([sys.executable, "-m", "recycle", *command.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"recycle {command} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def plan_digest(options: str, folder: Path) -> str:
    """The digest of a plan file, without the seconds that the planner took."""
    path = folder / "plan.json"
    recycle(f"plan {options} --time-limit 120 --out {path}")
    return digest(re.sub(r'"seconds": [0-9.e-]+', '"seconds": 0', path.read_text(), count=1))


def weights(command: str) -> str:
    return str(json.loads(recycle(command))["weights_sha256"])


def resumed(folder: Path) -> str:
    """A run of eight steps that stops after five, and goes on with another worker dead."""
    run = folder / "run"
    recycle(f"train {TRAINED.replace('--steps 8', '--steps 5')} --dead W1_1 --out {run}")
    return weights(f"train --resume {run} --steps 8 --dead W0_0 --json")


def table_digest(command: str, folder: Path) -> str:
    """The digest of a printed table, without times of the planner and paths of this run."""
    printed = recycle(command).replace(str(folder), "")
    return digest(re.sub(r'"(seconds|took_s|wall_s)": [0-9.e-]+', "", printed))


if __name__ == "__main__":
    sys.exit(main())
