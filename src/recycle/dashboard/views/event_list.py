"""The events of a record as a list that can be searched, newest first, and as files: CSV, and a trace for Perfetto."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

from recycle.core.errors import UserError
from recycle.core.events.record import OpRan
from recycle.core.events.record_file import parse_line, refuse_other_head
from recycle.core.problem import Memory
from recycle.dashboard.reading.run_reader import RunReader
from recycle.report.export.perfetto import draw_run_trace

MOST_EVENTS = 500
# A search that finds little ends after so many lines; the page can ask for more.
_MOST_SCANNED = 50_000
_MOST_TRACED = 300_000
_MOST_OF_RECOVERY = 200
_LONGEST_LINE_BYTES, _PART_BYTES = 1 << 26, 1 << 18
_COLUMNS = ("at_us", "end_us", "event", "worker", "iteration", "details")
_WHO = ("node", "worker", "link")


def find_events(run: RunReader, text: str, kind: str, before: int | None, limit: int) -> dict[str, Any]:
    """Return the newest events that contain `text`, in any case, of one kind or of all; ops are not among them.

    `before` is the number of a line; the answer's `next` continues from there, and is None at the start of the record.
    """
    limit, wanted = max(1, min(limit, MOST_EVENTS)), text.lower()
    number = len(run.line_starts) if before is None else max(0, min(before, len(run.line_starts)))
    lowest, found = max(0, number - _MOST_SCANNED), list[dict[str, Any]]()
    with run.open() as stream:
        while number > lowest and len(found) < limit:
            number -= 1
            event = _read_event(stream, run.line_starts[number])
            if (not kind or event.get("event") == kind) and (
                not wanted or wanted in json.dumps(event, ensure_ascii=False).lower()
            ):
                found.append({"number": number, **event})
    return {"events": found, "next": number or None, "total": len(run.line_starts)}


def events_of_recovery(run: RunReader, number: int) -> dict[str, Any]:
    """Return the events that led to a recovery and happened in it, in order."""
    if not 0 <= number < len(run.recoveries):
        raise UserError(f"there is no recovery {number}: there are {len(run.recoveries)}")
    one, last = run.recoveries[number], run.recovery_lines[number]
    with run.open() as stream:
        events = [_read_event(stream, start) for start in run.line_starts[max(0, last - _MOST_OF_RECOVERY) : last]]
    times_us = (one.at_us - one.redo_us, one.end_us)
    found = [event for event in events if event.get("event") != "step" and _lies_in(event, times_us)]
    return {"events": sorted(found, key=_time_us)}


def _lies_in(event: dict[str, Any], times_us: tuple[int, int]) -> bool:
    return times_us[0] <= _time_us(event) <= times_us[1]


def _time_us(event: dict[str, Any]) -> int:
    """When an event was or began; before all times if that is not known."""
    at_us = event.get("at_us", event.get("start_us"))
    return at_us if isinstance(at_us, int) else -1


def _read_event(stream: BinaryIO, start: int) -> dict[str, Any]:
    stream.seek(start)
    try:
        parse_line(line := stream.readline())
    except UserError:
        return {"event": "damaged", "text": "this line cannot be read"}
    return {key: value for key, value in json.loads(line).items() if key != "line"}


def events_as_lines(run: RunReader) -> Iterator[bytes]:
    """Yield the record in parts: its head, and every line that is an event, ops as well; nothing else of the file."""
    part = bytearray()
    with run.open() as stream:
        refuse_other_head(head := stream.readline(_LONGEST_LINE_BYTES), run.record)
        part += head
        while line := stream.readline(_LONGEST_LINE_BYTES):
            if not _is_event(line):
                continue
            part += line
            if len(part) > _PART_BYTES:
                yield bytes(part)
                part.clear()
    yield bytes(part)


def _is_event(line: bytes) -> bool:
    try:
        parse_line(line)
    except UserError:
        return False
    return line.endswith(b"\n")


def events_as_csv(run: RunReader) -> Iterator[bytes]:
    """Yield the lines of a table of all events but ops."""
    yield _csv_line(_COLUMNS)
    with run.open() as stream:
        for start in list(run.line_starts):
            event = _read_event(stream, start)
            at_us = event.pop("at_us", event.pop("start_us", ""))
            who = next((event.pop(key) for key in _WHO if key in event), "")
            end_us, kind, iteration = event.pop("end_us", ""), event.pop("event"), event.pop("iteration", "")
            yield _csv_line((at_us, end_us, kind, who, iteration, json.dumps(event, ensure_ascii=False) if event else ""))


def _csv_line(values: tuple[Any, ...]) -> bytes:
    text = io.StringIO()
    # A spreadsheet would run a text that begins like a formula.
    csv.writer(text).writerow(
        [f"'{value}" if isinstance(value, str) and value[:1] in tuple("=+-@\t\r") else value for value in values]
    )
    return text.getvalue().encode()


def trace_for_perfetto(run: RunReader, iteration: int) -> str:
    """Return an iteration and its neighbours as a Chrome trace; of a huge one, the iteration alone."""
    if iteration not in run.op_ranges:
        raise UserError(f"the record holds no op of iteration {iteration}, so there is nothing to draw")
    ops = _traced(run, iteration)
    problem = replace(run.plan_of(iteration).problem, memory=Memory.unlimited())
    around = range(iteration - 1, iteration + 2)
    return draw_run_trace(problem, ops, [one for one in run.recoveries if one.iteration in around])


def _traced(run: RunReader, iteration: int) -> list[OpRan]:
    own = list(run.ops(iteration))
    if 3 * len(own) > _MOST_TRACED:
        return own
    before, after = (list(run.ops(iteration + by)) for by in (-1, 1))
    return [*before, *own, *after]
