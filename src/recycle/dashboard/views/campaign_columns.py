"""Names and units of the numbers in results of campaigns, by their keys in the files of `simulate`, `reproduce` and `advise`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

RATE = "samples/s"
POINTS = "percentage points of fault-free 1F1B"


class TableColumn(NamedTuple):
    """A column of results; texts and counts have no unit."""

    name: str
    unit: str = ""

    def part(self, which: str) -> "TableColumn":
        return TableColumn(f"{self.name}, {which}", self.unit)


CampaignRow = dict[TableColumn, str | float | None]

_NAMED = {
    "throughput": TableColumn("throughput", RATE),
    "samples_per_s": TableColumn("throughput", RATE),
    "tokens_per_s": TableColumn("throughput in tokens", "tokens/s"),
    "interval_90": TableColumn("throughput", RATE),
    "own": TableColumn("without failures", RATE),
    "own_fault_free": TableColumn("without failures", RATE),
    "fault_free_samples_per_s": TableColumn("without failures", RATE),
    "one_f_one_b_share": TableColumn("share of fault-free 1F1B"),
    "goodput": TableColumn("share of its own throughput without failures"),
    "goodput_interval_90": TableColumn("share of its own throughput without failures"),
    "best_share": TableColumn("share of the best fault-free schedule"),
    "of_best_fault_free": TableColumn("share of the best choice without failures"),
    "of_best_fault_free_interval_90": TableColumn("share of the best choice without failures"),
    "bubble_share": TableColumn("share of the time in bubbles"),
    "scheduling_points": TableColumn("what scheduling adds", POINTS),
    "fault_points": TableColumn("what failures add", POINTS),
    "samples": TableColumn("samples applied"),
    "lost_samples": TableColumn("samples computed in vain"),
    "redone_samples": TableColumn("samples redone"),
    "dropped_samples": TableColumn("samples dropped"),
    "joins": TableColumn("workers that joined"),
    "num_pipelines": TableColumn("pipelines"),
    "num_stages": TableColumn("stages"),
    "num_microbatches": TableColumn("micro-batches of a pipeline"),
    "num_spare_servers": TableColumn("spare servers"),
    "spare_gpus": TableColumn("spare GPUs"),
    "tensor_parallel": TableColumn("tensor-parallel degree"),
    "memory_bytes": TableColumn("memory of a GPU", "bytes"),
    "gpus": TableColumn("GPUs that are paid for"),
    "tokens_per_s_per_gpu": TableColumn("throughput of a paid GPU in tokens", "tokens/s"),
    "samples_per_s_per_gpu": TableColumn("throughput of a paid GPU", RATE),
    "seconds": TableColumn("planning time", "s"),
    "worst_gap": TableColumn("longest period over its bound", "×"),
}
_GROUPS = {"time_us": "time", "pauses_us": "pause", "downs_us": "down", "time_shares": "share of the time"}
_UNITS = {"_us": "µs", "_bytes": "bytes", "_per_s": "1/s", "_s": "s"}


def column_of(path: Sequence[str]) -> TableColumn:
    """Return the column of a number by the keys that lead to it."""
    *groups, last = path
    group = groups[-1] if groups else ""
    if group in _GROUPS:
        return TableColumn(f"{_GROUPS[group]}: {last}", "µs" if group.endswith("_us") else "")
    if last in _NAMED:
        return _NAMED[last]
    for ending, unit in _UNITS.items():
        if last.endswith(ending):
            return TableColumn(" ".join((*groups, last.removesuffix(ending))).replace("_", " "), unit)
    return TableColumn(" ".join(path).replace("_", " "))


def named_numbers(
    facts: Mapping[str, Any], left_out: set[str], path: tuple[str, ...] = ()
) -> Iterator[tuple[TableColumn, float | None]]:
    """Yield the numbers in nested objects with their columns, and add the names of lists that are not shown to `left_out`."""
    for key, value in facts.items():
        column = column_of((*path, key))
        if is_number(value):
            yield column, finite_number(value)
        elif is_interval(value):
            yield column, finite_number(value["mean"])
            yield from bounds(column, value["low"], value["high"])
        elif key.endswith("interval_90") and isinstance(value, list) and len(value) == 2:
            yield from bounds(column, *value)
        elif isinstance(value, dict):
            yield from named_numbers(value, left_out, (*path, key))
        elif isinstance(value, list):
            left_out.add(column.name)


def bounds(column: TableColumn, low: Any, high: Any) -> Iterator[tuple[TableColumn, float | None]]:
    """Yield both ends of the 90 % interval of a column."""
    yield column.part("90 % interval from"), finite_number(low)
    yield column.part("90 % interval to"), finite_number(high)


def is_number(value: Any) -> bool:
    """Whether a value is a number, or None for one that is not known."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def is_interval(value: Any) -> bool:
    return isinstance(value, dict) and {"mean", "low", "high"} <= value.keys()


def finite_number(value: Any) -> float | None:
    """Return a number that JSON and the page can show; None for all else."""
    try:
        return value if value is not None and is_number(value) and math.isfinite(value) else None
    except OverflowError:
        return None
