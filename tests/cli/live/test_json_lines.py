"""The progress of a run as lines of JSON."""

import io
import json
import time

from recycle.cli.live.json_lines import JsonLines
from recycle.core.events.record import OpRan, name_of
from tests.report.record.test_live_facts import RUN


def test_every_event_but_ops_is_a_line_of_json_with_its_fields() -> None:
    stream = io.StringIO()
    lines = JsonLines(stream)
    for event in RUN:
        lines.observe(event)
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    expected = [event for event in RUN if not isinstance(event, OpRan)]
    assert [facts["event"] for facts in told] == [name_of(event) for event in expected]
    step = next(facts for facts in told if facts["event"] == "step" and facts["iteration"] == 2)
    assert (step["loss"], step["norm"]) == (4.75, 0.5)
    assert all(abs(facts["time"] - time.time()) < 60 for facts in told)


def test_a_sentence_is_an_event_too() -> None:
    stream = io.StringIO()
    JsonLines(stream).say("waiting for 6 workers")
    facts = json.loads(stream.getvalue())
    assert (facts["event"], facts["text"]) == ("message", "waiting for 6 workers")
