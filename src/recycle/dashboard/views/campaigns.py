"""Results of `recycle simulate --json`, `recycle reproduce` and `recycle advise` as one kind of table, for the page."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem
from recycle.dashboard.reading.served_folder import ServedFolder
from recycle.dashboard.views.campaign_columns import CampaignRow, TableColumn, named_numbers
from recycle.dashboard.views.reproduced_rows import SYSTEM, ReproducedRows

_MOST_ROWS, _MOST_COLUMNS = 2000, 60
_WHICH = TableColumn("which")


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
    """Return the results in a file as a title, notes, and a table whose rows are names and numbers, each column with its unit."""
    try:
        data = json.loads(folder.read_file(path), parse_constant=lambda _: None)
        return _campaign(path.name, data)
    except (ValueError, RecursionError) as problem:
        raise FileProblem(f"cannot read {path.name}: {problem}") from None


def _campaign(name: str, data: Any) -> dict[str, Any]:
    kind, left_out = campaign_kind(data), set[str]()
    if kind == "simulate":
        what, when = f"{data.get('model')} on {data.get('nodes')} x {data.get('gpu')}", f"{data.get('hours')} h"
        title = f"{what}, {when}, failures: {_listed(data.get('failures'))}"
        notes = [
            f"fault-free 1F1B: {data.get('fault_free')} samples/s",
            f"best fault-free schedule: {data.get('best_schedule')}, {data.get('best_fault_free')} samples/s",
            f"failure model: {data.get('failure_model') or 'none, failures as given'}",
        ]
        rows = list(_simulated_rows(data, left_out))
    elif kind == "reproduce":
        title, notes = str(data["experiment"]), [*map(str, _list(data.get("assumptions")))]
        made = ReproducedRows(title)
        made.add_results(data["results"])
        rows, left_out = list(made.rows.values()), made.left_out
    elif kind == "advise":
        choices = data.get("choices")
        title, notes = (
            "advice",
            [f"choices, {key}: {value}" for key, value in (choices if isinstance(choices, dict) else {}).items()],
        )
        rows = list(_advised_rows(data, left_out))
    else:
        raise FileProblem(f"{name} holds no results of simulate, reproduce or advise")
    return {"kind": kind, "title": title, "notes": notes, **_table(rows, left_out)}


def _simulated_rows(data: dict[str, Any], left_out: set[str]) -> Iterator[CampaignRow]:
    """Yield a row for each system; with several seeds that of the mean, and one for each run."""
    paid = data.get("paid")
    for system, facts in data["systems"].items():
        if not isinstance(facts, dict):
            continue
        runs = [run for run in _list(facts.get("runs")) if isinstance(run, dict)]
        whole = {"paid": paid.get(system)} if isinstance(paid, dict) else {}
        which: CampaignRow = {_WHICH: f"mean of {len(runs)} runs"} if runs else {}
        own = {key: value for key, value in facts.items() if key != "runs"}
        yield {SYSTEM: system, **which, **dict(named_numbers({**own, **whole}, left_out))}
        for number, run in enumerate(runs):
            yield {SYSTEM: system, _WHICH: f"run {number + 1}", **dict(named_numbers(run, left_out))}


def _advised_rows(data: dict[str, Any], left_out: set[str]) -> Iterator[CampaignRow]:
    """Yield a row for the first choice, for each alternative, and for the best choice of each system that is neither."""
    choices = [("first", data.get("first")), *(("alternative", one) for one in _list(data.get("alternatives")))]
    bests = [group.get("best") for group in _list(data.get("systems")) if isinstance(group, dict)]
    choices += [("best of its system", one) for one in bests if all(one != other for _, other in choices)]
    for which, one in choices:
        if isinstance(one, dict):
            yield {SYSTEM: str(one.get("system")), _WHICH: which, **dict(named_numbers(one, left_out))}
    left_out |= {name for name in ("thresholds", "curves") if data.get(name)}


def _table(rows: list[CampaignRow], left_out: Iterable[str]) -> dict[str, Any]:
    """Return the rows with the columns that they have, names before numbers, and in sentences what is not shown."""
    known = {column for row in rows for column, value in row.items() if value is not None}
    found = [column for column in dict.fromkeys(column for row in rows for column in row) if column in known]
    texts = [column for column in found if any(isinstance(row.get(column), str) for row in rows)]
    ordered = [*texts, *(column for column in found if column not in texts)]
    shown = ordered[:_MOST_COLUMNS]
    missing = [f"not in this table, but in the file: {', '.join(sorted(left_out))}"] if left_out else []
    if len(ordered) > len(shown):
        missing.append(f"{len(ordered) - len(shown)} of {len(ordered)} columns are not shown")
    if len(rows) > _MOST_ROWS:
        missing.append(f"{len(rows) - _MOST_ROWS} of {len(rows)} rows are not shown")
    return {
        "columns": [column.name for column in shown],
        "units": [column.unit for column in shown],
        "texts": [column.name for column in texts],
        "rows": [[row.get(column) for column in shown] for row in rows[:_MOST_ROWS]],
        "missing": missing,
    }


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
