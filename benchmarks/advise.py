"""The benchmark of `recycle advise`: how long it takes on three clusters, and what it chooses.

python benchmarks/advise.py                    64 A100, 1,024 H100 and 16,384 H100: about ten minutes on two cores
python benchmarks/advise.py --quick            four small GPUs, in some seconds
python benchmarks/advise.py --save             also writes docs/benchmarks/<date>-advise.md
"""

import json
import subprocess
import sys
import time
from functools import partial
from typing import Any

from sheet import NO, UNJUDGED, YES, Case, Row, Script, Section

ASKED_S = 300
_FAILURES = "--mtbf 264d --repair 1d"  # of a server of eight GPUs, as in the Llama 3 report
CLUSTERS = {
    "64 A100": f"--model gpt3-6.7b --gpu a100-80 --gpus 64 --batch 512 {_FAILURES}",
    "1,024 H100": f"--model gpt-145.6b --gpu h100 --gpus 1024 --batch 1024 {_FAILURES}",
    "16,384 H100": f"--model gpt-145.6b --gpu h100 --gpus 16384 --batch 16384 {_FAILURES}",
}
_SMALL = "--model layers=4,hidden=512,heads=8,sequence=512,vocabulary=1000 --gpu a100-80 --gpus 4 --gpus-per-server 1 --batch 8"
QUICK = {"4 A100": f"{_SMALL} --seeds 2 --systems recycle,replica-drop --mtbf 3d --repair 6h"}


def advice(quick: bool) -> Section:
    clusters = QUICK if quick else CLUSTERS
    cases = tuple(Case(name, partial(_advice, name, arguments, quick)) for name, arguments in clusters.items())
    about = (
        "A fresh `recycle advise --no-cache` process for each cluster, from its start until the page is printed; a server of "
        f"eight GPUs fails once in 264 days, and is back after a day. The target is {ASKED_S / 60:g} minutes on two cores. "
        "Goodput is the share of the choice's own fault-free throughput; ± is half of the 90 % interval of the mean over seeds."
    )
    header = ("cluster", "first choice", "tokens/s", "goodput", "of best", "next", "slower by", "choices", "seconds", "met")
    return Section("advice", "Advice for three clusters", about, header, cases)


def _advice(name: str, arguments: str, quick: bool) -> Row:
    began = time.perf_counter()
    command = [sys.executable, "-m", "recycle", "advise", *arguments.split(), "--no-cache", "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds = time.perf_counter() - began
    facts = json.loads(printed)
    first, others = facts["first"], facts["alternatives"]
    behind = f"{1 - others[0]['samples_per_s'] / first['samples_per_s']:.2%}" if others else "–"
    shares = (_share(first, "goodput"), _share(first, "of_best_fault_free"))
    found = (_choice(first), _rate(first), *shares, _choice(others[0]) if others else "–", behind)
    met = UNJUDGED if quick else YES if seconds < ASKED_S else NO
    return (name, *found, f"{facts['choices']['all']:,}", f"{seconds:.0f}", met)


def _choice(one: dict[str, Any]) -> str:
    shape = one["shape"]
    cuts = f", {one['shared_layers']} shared" if one["shared_layers"] else ""
    layout = f"{shape['num_pipelines']} × {shape['num_stages']}, {shape['num_microbatches']}"
    return f"{one['system']} {layout}, tp {one['tensor_parallel']}{cuts}, {one['spare_gpus']} spare GPUs"


def _rate(one: dict[str, Any]) -> str:
    low, high = one["interval_90"]
    each = one["tokens_per_s"] / one["samples_per_s"]
    return f"{one['tokens_per_s']:,.0f} ± {(high - low) / 2 * each:,.0f}"


def _share(one: dict[str, Any], name: str) -> str:
    low, high = one[f"{name}_interval_90"]
    return f"{one[name]:.2%} ± {(high - low) / 2:.2%}"


SECTIONS = {"advice": advice}
SCRIPT = Script(
    "advise",
    "Measure how long recycle advise takes on three clusters, and print what it chooses.",
    tuple(SECTIONS),
    quick="one cluster of four GPUs, in some seconds",
    quantity="seconds",
    width=220,
)

if __name__ == "__main__":
    sys.exit(SCRIPT.run(lambda name, quick: [SECTIONS[name](quick)]))
