"""`KeptRun`: the name that a service has given a run, kept in the run folder so that a resumed run goes on under it."""

import json
from pathlib import Path

from recycle.core.files import read_json, write_text
from recycle.runtime.callbacks.callback_runner import LOGGERS

_FORMAT, _VERSION = "recycle-logged-run", 1


class KeptRun:
    """The file of one service; without a run folder nothing is kept."""

    def __init__(self, folder: Path | None, service: str) -> None:
        self._path = folder / LOGGERS / f"{service}-run.json" if folder is not None else None

    def find(self, is_continued: bool) -> str | None:
        """The name of the run before, of a run that `is_continued`; None if there is none."""
        if self._path is None or not is_continued or not self._path.exists():
            return None
        name = read_json(self._path, _FORMAT, _VERSION).get("run")
        return name if isinstance(name, str) else None

    def save(self, name: str) -> None:
        if self._path is not None:
            write_text(self._path, json.dumps({"format": _FORMAT, "version": _VERSION, "run": name}) + "\n")
