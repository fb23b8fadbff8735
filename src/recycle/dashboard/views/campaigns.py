"""Results of `recycle simulate --json`, `recycle reproduce` and `recycle advise` as one kind of table, for the page."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem
from recycle.dashboard.reading.served_folder import ServedFolder

_MOST_ROWS, _MOST_COLUMNS = 2000, 40
_CHOICE = ("system", "pipelines", "stages", "microbatches", "tensor_parallel", "shared_layers", "spare_servers")


def campaign_kind(data: Any) -> str:
    """Say which command wrote this: `simulate`, `reproduce` or `advise`; empty for anything else."""
    if not isinstance(data, dict):
        return ""
    if "experiment" in data and isinstance(data.get("results"), dict):
        return "reproduce"
    if isinstance(data.get("systems"), dict) and "fault_free" in data:
        return "simulate"
    return "advise" if "question" in data and "alternatives" in data else ""


def campaign(path: Path, folder: ServedFolder) -> dict[str, Any]:
    """Return the results in a file as a title, notes, and a table whose rows are names and numbers."""
    try:
        data = json.loads(folder.read_file(path), parse_constant=lambda _: None)
    except (ValueError, RecursionError) as problem:
        raise FileProblem(f"cannot read {path.name}: {problem}") from None
    kind = campaign_kind(data)
    if kind == "simulate":
        what, when = f"{data.get('model')} on {data.get('nodes')} x {data.get('gpu')}", f"{data.get('hours')} h"
        title = f"{what}, {when}, failures: {data.get('failures')}"
        notes = [f"fault-free 1F1B: {data.get('fault_free')} samples/s", f"failure model: {data.get('failure_model')}"]
        rows = [{"system": name, **dict(_numbers(facts))} for name, facts in data["systems"].items() if isinstance(facts, dict)]
    elif kind == "reproduce":
        title, notes = str(data["experiment"]), [*map(str, data.get("assumptions") or [])]
        rows = list(_leaf_rows(data["results"], ()))
    elif kind == "advise":
        title, notes = "advice", [f"{key}: {value}" for key, value in (data.get("choices") or {}).items()]
        choices = [data.get("first"), *(data.get("alternatives") or [])]
        rows = [{"system": str(one.get("system")), **dict(_numbers(one))} for one in choices if isinstance(one, dict)]
    else:
        raise FileProblem(f"{path.name} holds no results of simulate, reproduce or advise")
    return {"kind": kind, "title": title, "notes": notes, **_table(rows)}


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows with the columns that they have, names before numbers."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    texts = [column for column in columns if any(isinstance(row.get(column), str) for row in rows)]
    ordered = [*texts, *(column for column in columns if column not in texts)][:_MOST_COLUMNS]
    return {"columns": ordered, "texts": texts, "rows": [[row.get(column) for column in ordered] for row in rows[:_MOST_ROWS]]}


def _numbers(facts: Any, prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Yield every number in nested objects and lists, by the path to it; None for one that is not known."""
    if isinstance(facts, bool):
        return
    if facts is None or isinstance(facts, int | float):
        yield prefix, facts if facts is not None and math.isfinite(facts) else None
    elif isinstance(facts, dict):
        for key, value in facts.items():
            yield from _numbers(value, f"{prefix} {key}".strip())
    elif isinstance(facts, list) and len(facts) <= 8:
        for number, value in enumerate(facts):
            yield from _numbers(value, f"{prefix} {number + 1}".strip())


def _leaf_rows(node: dict[str, Any], path: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row for each object that holds numbers: the names on the way to it, and its numbers."""
    inner = {key: value for key, value in node.items() if isinstance(value, dict) and not _is_interval(value)}
    numbers = dict(_numbers({key: value for key, value in node.items() if key not in inner}))
    names = {("case" if level == 0 else "system" if level == 1 else f"name {level}"): name for level, name in enumerate(path)}
    lists = {key: value for key, value in node.items() if isinstance(value, list)}
    if lists and len(lists) == len(node):  # each key is a system, with a list of numbers
        for key, value in lists.items():
            yield {**names, ("system" if path else "case"): key, **dict(_numbers(value))}
    elif numbers:
        yield {**names, **numbers}
    for key, below in inner.items():
        yield from _leaf_rows(below, (*path, key))


def _is_interval(value: dict[str, Any]) -> bool:
    return {"mean", "low", "high"} <= value.keys()
