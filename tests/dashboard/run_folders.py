"""Run folders for tests of the page: a run with a death and a join, whole or growing; and a client that asks as browsers do."""

import json
from collections.abc import Iterable
from pathlib import Path

from starlette.testclient import TestClient

from recycle.core.events.record import Event, Placed, Started, Warned
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


def hostile_events() -> list[Event]:
    """A run whose name, hosts and warnings hold HTML."""
    return [
        Started("train", "<script>document.title='owned'</script>"),
        Placed(10, "W0_0", "<img src=x onerror=alert(1)>", 4711),
        *recovery_record()[1:],
        Warned(99, "</script><script>document.title='owned'</script><b>bold</b>"),
    ]


def growing(folder: Path) -> RecordWriter:
    """A run folder with plans and a record that grows."""
    folder.mkdir(parents=True, exist_ok=True)
    write_plans(folder)
    return RecordWriter(folder / "record.jsonl", [Started("train", "8-layer GPT")])


def make_client(root: Path, token: str = "", injector: Injector | None = None, host: str = HOST) -> TestClient:
    """A client of a server for the runs under `root`, which asks by the server's own name."""
    access = Access.at(PORT, ("127.0.0.1", "localhost"), token, injector is not None)
    server = PageServer(RunList(root), access, injector=injector)
    return TestClient(server.application(), base_url=f"http://{host}", follow_redirects=False)
