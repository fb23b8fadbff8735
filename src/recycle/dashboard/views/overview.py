"""The overview of a run as JSON: workers, series with recoveries, shares of time, what the job waits for; and what is pushed."""

import math
import time
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from recycle.core.events.record import PARTS, Recovered
from recycle.core.events.record_file import CONFIG, SUMMARY
from recycle.dashboard.reading.run_reader import RunReader
from recycle.dashboard.reading.served_folder import ServedFolder
from recycle.dashboard.views.series import thin
from recycle.report.record.hindsight import in_hindsight
from recycle.report.record.metrics import measure
from recycle.report.record.recovery_text import PART_LOOKS, describe_link, describe_rest, who
from recycle.report.record.run_state import ALIVE, DEAD, JOINING, STARTING, SUSPECTED
from recycle.report.render.palette import PAINTS

_NUM_BINS = 600
_MOST_NODES = 5000
_MOST_POINTS = 200
_MOST_CHANGES = 400


def overview(run: RunReader) -> dict[str, Any]:
    """Return everything that the overview shows. It is as large as the number of workers, not as the length of the run."""
    return {
        **overview_head(run),
        "source": run.started.source,
        "name": run.started.name,
        "shape": _shape(run),
        "series": series(run, None),
        "shares": spent_time(run),
        "changes": [] if run.recoveries else [[one.at_us / 1e6, one.node, one.joins] for one in run.changes[-_MOST_CHANGES:]],
        "recoveries": [recovery(number, one) for number, one in enumerate(run.recoveries)],
        "iterations": run.op_ranges.bounds,
        "paints": {
            look: {"fill": paint.fill, "pale": paint.pale, "ink": paint.ink, "meaning": paint.meaning}
            for look, paint in PAINTS.items()
        },
        "part_looks": PART_LOOKS,
    }


def overview_head(run: RunReader) -> dict[str, Any]:
    """Return the small part of the overview, which is pushed with every change."""
    facts = run.state.facts
    return {
        "generation": run.generation,
        "version": run.version,
        "end_us": run.end_us,
        "steps_done": facts.num_done,
        "num_steps": _wanted_steps(run),
        "loss": _finite(facts.step.loss if facts.step else None),
        "samples_per_s": _finite(facts.samples_per_s),
        "iteration_us": facts.iteration_us,
        "planned_us": facts.step.planned_us if facts.step else None,
        "num_live": facts.num_live,
        "num_recoveries": facts.num_recoveries,
        "lost_us": sum(facts.lost_us.values()),
        "num_warnings": facts.num_warnings,
        "checkpoint_steps": facts.checkpoint.num_steps if facts.checkpoint else None,
        "workers": workers(run),
        "waiting": waits_for(run),
        "has_ended": has_ended(run),
        "share_read": round(run.share_read, 3),
        "problem": run.problem,
        "problems": run.problems,
        "iterations": run.op_ranges.bounds,
        "slow_links": [describe_link(link) for link in facts.slow_links.values()],
        "idle_s": _idle_s(run),
    }


def workers(run: RunReader) -> dict[str, dict[str, Any]]:
    """Return the state of every place, or of every node that the record names if the run has no plan.

    A place that was taken by a worker of another place is `moved`, until another worker joins there.
    """
    facts, places = run.state.facts, dict(run.state.places)
    if run.shape is None:
        names = sorted({change.node for change in run.changes})[:_MOST_NODES]
        places = {name: ALIVE if facts.is_up.get(name, True) else DEAD for name in names}
    moved = moves_in_force(run)
    found: dict[str, dict[str, Any]] = {}
    for name, how in places.items():
        about: dict[str, Any] = {"state": how}
        speed = facts.speeds.get(name, 1.0)
        if how == ALIVE and speed < 1:
            about |= {"state": "slow", "speed": speed}
        elif how == ALIVE and name in moved:
            about |= {"state": "moved", "from": moved[name]}
        if name in run.state.processes:
            about["process"] = run.state.processes[name]
        if how == SUSPECTED:
            about["reason"] = run.suspected.get(name, "")
        found[name] = about
    return found


def moves_in_force(run: RunReader) -> dict[str, str]:
    """Return the places whose worker came from another place, with that place."""
    moved: dict[str, str] = {}
    for one in run.recoveries:
        for name in (*one.emptied, *(one.workers if one.joins else ())):
            moved.pop(name, None)
        moved |= {to: start for start, _, to in (move.partition(">") for move in one.moves)}
    return moved


def waits_for(run: RunReader) -> str:
    """Say in one sentence what the job waits for; empty while it trains."""
    if run.problem:
        return run.problem
    state = run.state
    if has_ended(run) or not run.version:
        return "" if run.version else "the run has not written anything yet"
    suspected = [name for name, how in state.places.items() if how == SUSPECTED]
    if suspected:
        return f"{_names(suspected)} makes no progress and is being fenced: {run.suspected.get(suspected[0], '')}"
    if state.gone:
        return f"{_names(state.gone)} left: the others stop, plan and regroup"
    if joining := [name for name, how in state.places.items() if how == JOINING]:
        return f"{_names(joining)} is loading, and joins at the next iteration; the others train"
    if state.facts.step is None and run.started.source == "train":
        starting = [name for name, how in state.places.items() if how == STARTING]
        return f"{len(starting)} workers are starting" if starting else "the first step is running"
    return ""


def _names(names: Any) -> str:
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def has_ended(run: RunReader) -> bool:
    """Whether the run has written its summary after its last event; a record that was simulated or replayed is always whole."""
    if run.started.source in ("simulate", "replay"):
        return True
    try:
        return (run.record.parent / SUMMARY).lstat().st_mtime_ns >= run.record.lstat().st_mtime_ns - 2_000_000_000
    except OSError:
        return False


def _idle_s(run: RunReader) -> float | None:
    """How long ago the record grew, by the clock of this machine."""
    try:
        return round(max(0.0, time.time() - run.record.lstat().st_mtime), 1)
    except OSError:
        return None


def _wanted_steps(run: RunReader) -> int | None:
    """The number of steps of the whole run, as its configuration says."""
    path = run.record.parent / CONFIG
    try:
        return _steps_in(run.folder, path, path.lstat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=64)
def _steps_in(folder: ServedFolder, path: Path, modified_ns: int) -> int | None:
    try:
        steps = tomllib.loads(folder.read_text(path))["training"]["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def series(run: RunReader, span: tuple[int, int] | None, num_bins: int = _NUM_BINS) -> dict[str, Any]:
    """Return loss, throughput, iteration time and live workers over time, with few points; `span` in µs."""
    columns = run.columns
    return {
        "loss": thin(columns.at_us, columns.loss, num_bins, span),
        "rate": thin(columns.spell_end_us, columns.spell_rate, num_bins, span),
        "live": thin(columns.spell_end_us, columns.spell_live, num_bins, span),
    }


def points_since(run: RunReader, num_steps: int, num_spells: int) -> dict[str, Any] | None:
    """Return the points that were added after so many steps and spells; None if they are too many to be pushed."""
    columns = run.columns
    if len(columns.at_us) - num_steps > _MOST_POINTS or len(columns.spell_end_us) - num_spells > _MOST_POINTS:
        return None
    return {
        "loss": [[at / 1e6, _finite(loss)] for at, loss in zip(columns.at_us[num_steps:], columns.loss[num_steps:], strict=True)],
        "rate": [
            [at / 1e6, rate] for at, rate in zip(columns.spell_end_us[num_spells:], columns.spell_rate[num_spells:], strict=True)
        ],
        "live": [
            [at / 1e6, live] for at, live in zip(columns.spell_end_us[num_spells:], columns.spell_live[num_spells:], strict=True)
        ],
    }


def spent_time(run: RunReader) -> dict[str, Any] | None:
    """Return the time by use, which adds up to the length of the run, as steps lost later are known now; None without spells."""
    if not any(spell.length_us for spell in run.spells):
        return None
    return measure([*in_hindsight(run.spells, run.progress), *run.changes]).to_json()


def recovery(number: int, one: Recovered) -> dict[str, Any]:
    """Return a recovery with its parts in order of time; redone work lies before the failure."""
    return {
        **one.to_json(),
        "number": number,
        "end_us": one.end_us,
        "who": who(one),
        "about": describe_rest(one),
        "parts": [{"part": part, "time_us": one.parts_us[part]} for part in PARTS],
        "emptied": sorted(one.emptied),
        "filled": sorted(one.filled),
        "layers": list(one.layers),
    }


def _shape(run: RunReader) -> dict[str, int] | None:
    if run.shape is None:
        return None
    shape = run.shape
    return {"pipelines": shape.num_pipelines, "stages": shape.num_stages, "microbatches": shape.num_microbatches}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
