"""Print how far the policies of `sim.systems`, fed with the published tables, are from the reference, on each public trace.

`python -m tests.sim.reference.compare_policies FOLDER` reads `peers_reference.json` and `traces/` of the folder. For each system
and trace it gives the largest difference over all models of the table: from the reference without its deviations, and from the
reference as it is. The last column is the deviation that alone moves the reference most.
"""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path

from recycle.core.events.trace import Trace
from recycle.report.record.tables import markdown
from tests.sim.reference.reference_policies import reference_average, reference_start_ms
from tests.sim.reference.reference_simulation import ALL_DEVIATIONS, NO_DEVIATIONS, Deviations
from tests.sim.reference.table_mode import from_start, table_average

TRACES = ("6h", "3h", "1h", "30m", "10m", "5m", "scale_p3-trace")
SYSTEMS = ("oobleck", "varuna", "bamboo")


def compare(folder: Path) -> list[list[str]]:
    """The head and a row for each system and trace."""
    tables = json.loads((folder / "peers_reference.json").read_text(encoding="utf-8"))["throughput_by_nodes_30_to_15"]
    rows = [["system, trace", "from the policy of the reference", "from the reference as it is", "largest deviation"]]
    for system in SYSTEMS:
        for name in TRACES:
            trace = Trace.load(folder / "traces" / f"{name}.csv")
            given = [(model, table[system], trace) for model, table in tables.items() if system in table]
            policies, whole = zip(*(_differences(system, *each) for each in given), strict=True)
            largest = [f"{max(found, key=abs):+.1%}" for found in (policies, whole)]
            rows.append([f"{system}, {name}", *largest, _largest_deviation(system, given)])
    return rows


def _differences(system: str, model: str, table: list[float], trace: Trace) -> tuple[float, float]:
    start_ms = reference_start_ms(system, model, table, trace)
    found = table_average(system, model, table, from_start(trace, start_ms))
    share = trace.end_us / (trace.end_us - start_ms * 1000)
    policy = reference_average(system, model, table, trace, NO_DEVIATIONS) * share
    return _over(found, policy), _over(found, reference_average(system, model, table, trace))


def _over(found: float, wanted: float) -> float:
    """By how much `found` is above `wanted`; anything is 100 % above nothing."""
    return found / wanted - 1 if wanted else float(found > 0)


def _largest_deviation(system: str, given: list[tuple[str, list[float], Trace]]) -> str:
    moved = {item.name: sum(_moved(system, item.name, *each) for each in given) for item in fields(Deviations)}
    name = max(moved, key=lambda name: moved[name])
    return f"`{name}`" if moved[name] > 0 else ""


def _moved(system: str, name: str, model: str, table: list[float], trace: Trace) -> float:
    with_all = reference_average(system, model, table, trace, ALL_DEVIATIONS)
    without = reference_average(system, model, table, trace, replace(ALL_DEVIATIONS, **{name: False}))
    return abs(with_all - without) / max(with_all, without, 1e-9)


if __name__ == "__main__":
    print(markdown(compare(Path(sys.argv[1]))))
