"""Run folders for tests of the page: a run with a death and a join, whole or growing; and a client that asks as browsers do."""

import json
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace
from starlette.testclient import TestClient

from recycle.core.events.record import (
    Changed,
    Event,
    Joining,
    LinkChanged,
    OpRan,
    Placed,
    Recovered,
    Saved,
    SpeedChanged,
    Spell,
    Started,
    Suspected,
    Warned,
)
from recycle.core.events.record_file import RecordWriter, plan_file, write_record
from recycle.core.files import write_text
from recycle.dashboard.views.run_list import RunList
from recycle.dashboard.web.guard import Access
from recycle.dashboard.web.injection import Injector
from recycle.dashboard.web.routes import PageServer
from tests.recovery_records import EPOCHS, degraded_plan, recovery_record, whole_plan

PORT = 8265
HOST = f"127.0.0.1:{PORT}"


def write_run(folder: Path, events: Iterable[Event] | None = None, is_ended: bool = True) -> Path:
    """Write a run with all its plans: 2 pipelines of 2 stages, of which W1_1 dies and comes back."""
    folder.mkdir(parents=True, exist_ok=True)
    write_plans(folder)
    write_record(folder / "record.jsonl", recovery_record() if events is None else events)
    if is_ended:
        facts = {
            "steps": EPOCHS[-1][1],
            "saved_steps": 14,
            "losses": [5.0, 3.7],
            "samples_per_s": 9.5,
            "recoveries": [{"lost_us": 5}],
        }
        write_text(folder / "summary.json", json.dumps(facts))
    return folder


def write_plans(folder: Path) -> None:
    whole_plan().save(folder / "plan.json")
    degraded_plan().save(folder / plan_file(EPOCHS[1][0]))
    whole_plan().save(folder / plan_file(EPOCHS[2][0]))


# An element that is made of this text runs a script, and can be counted.
HTML = """<img src="x" onerror="document.title='owned'"></script><script>document.title='owned'</script><b>bold</b>"""


def hostile_events() -> list[Event]:
    """A run in which every text that a user or another machine gives is HTML: names, hosts, workers, ops, reasons, sentences."""
    normal = recovery_record()[1:]
    hurt = [replace(event, cause=f"{HTML} left") if isinstance(event, Recovered) else event for event in normal]
    last = max(event.end_us for event in normal if isinstance(event, Recovered))
    return [
        Started("train", HTML),
        Placed(10, "W0_0", HTML, 4711),
        *hurt,
        OpRan(6, "W0_0", HTML, last, last + 1000),
        OpRan(6, HTML, "0F0@0", last, last + 1000),
        Recovered(last + 1, last + 9, 3, (HTML,), True, HTML, 13, transfer_us=8, moves=(f"{HTML}>{HTML}",), num_live=4),
        Suspected(last + 10, "W1_0", HTML),
        Joining(last + 11, HTML),
        SpeedChanged(last + 12, HTML, 0.5, 13),
        LinkChanged(last + 13, HTML, 0.5, 13, 20, 10),
        Saved(last + 14, 13, HTML, 5),
        Warned(last + 15, HTML),
    ]


def hostile_trace() -> list[Event]:
    """A record without a plan, whose workers are called HTML."""
    return [Started("simulate", HTML), Changed(5, HTML, False, 3), Spell(0, 9, "train", HTML, 8, num_live=4), Warned(9, HTML)]


def hostile_campaign() -> dict[str, object]:
    """Results whose names are HTML."""
    return {"experiment": HTML, "assumptions": [HTML], "results": {HTML: {HTML: [0.9, 0.8]}}}


def growing(folder: Path) -> RecordWriter:
    """A run folder with plans and a record that grows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_plans(folder)
    return RecordWriter(folder / "record.jsonl", [Started("train", "8-layer GPT")])


def make_client(
    root: Path, token: str = "", injector: Injector | None = None, host: str = HOST, access: Access | None = None
) -> TestClient:
    """A client of a server for the runs under `root`, which asks by the server's own name."""
    access = access or Access.at(PORT, ("127.0.0.1", "localhost"), token, injector is not None)
    server = PageServer(RunList(root), access, injector=injector)
    return TestClient(server.application(), base_url=f"http://{host}", follow_redirects=False)
