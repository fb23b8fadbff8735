"""`RunList`: the runs and the results of campaigns under one folder, each with an id; no request ever names a path."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem, UserError
from recycle.core.events.record import Started, Stepped
from recycle.core.events.record_file import CHECKPOINTS, JOB, PLAN, PLANS, RECORD, SUMMARY, parse_line, refuse_other_head
from recycle.dashboard.reading.served_folder import ServedFolder
from recycle.dashboard.views.campaigns import campaign_kind

_DEEPEST, _MOST_FOUND = 4, 2000
_LIVE_S = 30.0
_TAIL_BYTES = 65536
_LONGEST_CAMPAIGN_BYTES = 8_000_000
_NO_RUNS_IN = {CHECKPOINTS, PLANS, "tensorboard"}
_FILES_OF_RUNS = {SUMMARY, PLAN, JOB, "profile.json"}
_FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run, or a record by itself, with what can be said of it without reading all of its record."""

    id: str
    record: Path
    about: dict[str, Any] = field(default_factory=dict)


class RunList:
    """Looks for runs under `root`, which may also be a run itself or a record; it looks again if the last look is old."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.folder = ServedFolder(self.root.parent if self.root.is_file() else self.root)
        self._found: dict[str, Path] = {}
        self._campaigns: dict[str, Path] = {}
        self._looked_s = -_FRESH_S

    def record(self, run_id: str) -> Path:
        """The record of a run; raises UserError if there is no such run."""
        if run_id not in self._found:
            self._look()
        if run_id not in self._found:
            raise UserError(f"there is no run {run_id[:100]!r}")
        return self._found[run_id]

    def campaign(self, campaign_id: str) -> Path:
        """The file of a campaign's results; raises UserError if there is none."""
        if campaign_id not in self._campaigns:
            self._look()
        if campaign_id not in self._campaigns:
            raise UserError(f"there is no campaign {campaign_id[:100]!r}")
        return self._campaigns[campaign_id]

    def to_json(self) -> dict[str, Any]:
        """Return all runs, the newest first, and all campaigns."""
        self._look()
        runs = sorted(
            (about_run(run_id, path, self.folder) for run_id, path in self._found.items()), key=lambda run: -run["modified_s"]
        )
        campaigns = [
            {"id": campaign_id, "kind": _kind(path, self.folder)} for campaign_id, path in sorted(self._campaigns.items())
        ]
        return {"root": self.root.name or str(self.root), "runs": runs, "campaigns": [one for one in campaigns if one["kind"]]}

    def _look(self) -> None:
        if time.monotonic() - self._looked_s < _FRESH_S:
            return
        found, campaigns = {}, {}
        for path in _files(self.root):
            name = "." if path in (self.root, self.root / RECORD) else path.relative_to(self.root).as_posix()
            if path.name == RECORD:
                found[name.removesuffix(f"/{RECORD}")] = path
            elif path.suffix == ".jsonl" and _is_record(path, self.folder):
                found[name] = path
            elif path.suffix == ".json" and path.name not in _FILES_OF_RUNS and path.lstat().st_size < _LONGEST_CAMPAIGN_BYTES:
                campaigns[name] = path
        if not found and not self.root.is_file() and not campaigns:
            found["."] = self.root / RECORD  # a run that is about to begin
        self._found, self._campaigns, self._looked_s = found, campaigns, time.monotonic()


def _files(root: Path) -> Iterator[Path]:
    """Yield files that may be records or results, not below folders of runs' own; links are not followed."""
    if root.is_file():
        yield root
        return
    num = 0
    for folder, folders, files in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _NO_RUNS_IN and depth < _DEEPEST)
        for name in sorted(files):
            path = Path(folder) / name
            if path.suffix in (".jsonl", ".json") and not path.is_symlink():
                yield path
                num += 1
                if num >= _MOST_FOUND:
                    return


def _is_record(path: Path, served: ServedFolder) -> bool:
    try:
        with served.open(path) as stream:
            refuse_other_head(stream.readline(4096), path)
        return True
    except (OSError, FileProblem):
        return False


def _kind(path: Path, served: ServedFolder) -> str:
    try:
        return campaign_kind(json.loads(served.read_text(path)))
    except (OSError, ValueError, RecursionError):
        return ""


def about_run(run_id: str, record: Path, served: ServedFolder) -> dict[str, Any]:
    """Return a line about a run: from its summary, or from the start and the end of its record."""
    about: dict[str, Any] = {"id": run_id, "name": "", "source": "", "state": "cut off", "modified_s": 0.0}
    about |= dict.fromkeys(("steps", "loss", "samples_per_s", "iteration_us", "recoveries", "lost_us", "workers"))
    try:
        status = record.lstat()
        about |= {"modified_s": status.st_mtime, "size_bytes": status.st_size, **_from_record(record, served)}
        if time.time() - status.st_mtime < _LIVE_S:
            about["state"] = "live"
        if about["source"] in ("simulate", "replay"):
            about["state"] = "simulated"
        about |= _from_summary(record.parent / SUMMARY, status.st_mtime, served) if record.name == RECORD else {}
    except FileNotFoundError:
        about |= {"state": "waiting"}
    except (OSError, FileProblem) as problem:
        about |= {"state": "damaged", "problem": str(problem)}
    return about


def _from_record(record: Path, served: ServedFolder) -> dict[str, Any]:
    with served.open(record) as stream:
        refuse_other_head(stream.readline(4096), record)
        found: dict[str, Any] = {}
        start = stream.tell()
        if isinstance(event := _event(stream.readline(65536)), Started):
            found = {"name": event.name, "source": event.source}
        stream.seek(max(start, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
        steps = [event for line in stream.read().splitlines() if isinstance(event := _event(line), Stepped)]
        return {**found, "steps": steps[-1].iteration + 1, "loss": steps[-1].loss} if steps else found


def _event(line: bytes) -> object:
    try:
        return parse_line(line)[0]
    except UserError:
        return None


def _from_summary(path: Path, recorded_s: float, served: ServedFolder) -> dict[str, Any]:
    """Return what the summary of a run that ended says; nothing if there is none, or the run was resumed since."""
    try:
        if path.lstat().st_mtime < recorded_s - 2:
            return {}
        facts = json.loads(served.read_text(path))
        losses, recoveries = facts.get("losses") or [None], facts.get("recoveries") or []
        known = {key: facts.get(key) for key in ("steps", "samples_per_s", "iteration_us", "workers", "weights_sha256")}
        lost_us = sum(one.get("lost_us", 0) for one in recoveries)
        return {**known, "state": "ended", "loss": losses[-1], "recoveries": len(recoveries), "lost_us": lost_us}
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return {}
