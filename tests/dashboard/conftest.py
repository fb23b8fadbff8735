"""Fixtures of the tests in a browser."""

import json

import pytest

from recycle.core.events.record_file import write_record
from tests.dashboard.browser import ready_plans, serving, started_browser
from tests.dashboard.run_folders import hostile_campaign, hostile_events, hostile_trace, write_run
from tests.recovery_records import degraded_plan


@pytest.fixture(scope="module")
def browser():
    with started_browser() as made:
        yield made


@pytest.fixture
def problems():
    """Errors of the page's scripts: a test that opens a page fails if there are any."""
    found = []
    yield found
    assert found == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A server for a run that has ended, a damaged one and a hostile one, with results of a campaign."""
    root = tmp_path_factory.mktemp("runs")
    degraded_plan().save(write_run(root / "a") / "ready" / "plan-W1_1.json")
    write_run(root / "hostile", hostile_events())
    write_record(root / "trace.jsonl", hostile_trace())
    (root / "hostile.json").write_text(json.dumps(hostile_campaign()))
    damaged = write_run(root / "damaged") / "record.jsonl"
    lines = damaged.read_bytes().splitlines(keepends=True)
    lines[20:24] = [b"\xff\x00 nonsense\n"]
    damaged.write_bytes(b"".join(lines)[:-30])
    (root / "scale.json").write_text(
        '{"experiment": "scale", "assumptions": [], "results": {"4 x 8": {"recycle": [0.9], "oobleck": [0.7]}}}'
    )
    with serving(root, ready_plans) as address:
        yield address
