"""A run in Prometheus' text format, read back by a strict parser of that format."""

import math
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.events.record import Changed, Event, Held, OpRan, Recovered, Saved, Spell, Started, Stepped, Warned
from recycle.report.export.prometheus import Gauges

SECOND = 1_000_000
RUN: list[Event] = [
    Started("train", "8-layer GPT"),
    OpRan(0, "W0_0", "0F0@0", 0, 5),
    Stepped(0, 2 * SECOND, 5.5, 1.25, 1.0),
    Spell(0, 2 * SECOND, "train", samples=36, busy_us=SECOND, num_live=12),
    Stepped(1, 5 * SECOND // 2, None, None, None),
    Spell(2 * SECOND, 5 * SECOND // 2, "train", samples=36, num_live=12),
    Changed(5 * SECOND // 2, "W1_2", False, 11),
    Spell(5 * SECOND // 2, 3 * SECOND, "pause", "regroup"),
    Spell(3 * SECOND, 4 * SECOND, "redo", discarded=7),
    Held("W0_0", 1000, 600, 500),
    Held("W0_1", 2000, 700, 650),
    Held("W0_0", 1500, 600, 500),
    Saved(4 * SECOND, 2, "runs/a", 123456),
    Warned(4 * SECOND, "the loss is not finite"),
    Stepped(2, 5 * SECOND, 4.75, 0.5, 0.25),
    Spell(4 * SECOND, 5 * SECOND, "train", samples=36, num_live=11),
]

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
HELP = re.compile(rf"# HELP ({NAME}) ((?:[^\\\n]|\\\\|\\n)*)")
TYPE = re.compile(rf"# TYPE ({NAME}) (counter|gauge|histogram|summary|untyped)")
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{LABEL},)*{LABEL})\}})? (NaN|[+-]Inf|[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


@dataclass
class Family:
    """A metric as the format has it: one HELP, one TYPE, then its samples, by their labels."""

    about: str
    kind: str = ""
    samples: dict[str, float] = field(default_factory=dict)


def parse(text: str) -> dict[str, Family]:
    """Read the text by the format's published rules, and refuse whatever it does not allow or leaves to chance.

    A HELP or TYPE line stands once a metric and before its samples; the lines of a metric are one block; no sample occurs
    twice; every line ends in a line feed; a counter is a number of at least 0 and is called `_total`.
    """
    assert text == "" or text.endswith("\n")
    families: dict[str, Family] = {}
    for line in text.split("\n")[:-1]:
        if match := HELP.fullmatch(line):
            assert match[1] not in families, f"{match[1]} comes twice"
            families[match[1]] = Family(match[2])
            continue
        last = list(families)[-1]
        family = families[last]
        if match := TYPE.fullmatch(line):
            assert (match[1], family.kind, family.samples) == (last, "", {}), line
            family.kind = match[2]
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, f"not a line of the format: {line!r}"
        assert match[1] == last, f"{line!r} is not in the block of its metric"
        assert family.kind != ""
        assert (match[2] or "") not in family.samples, f"{line!r} comes twice"
        family.samples[match[2] or ""] = float(match[3])
    for name, family in families.items():
        assert family.samples, f"{name} has no sample"
        assert (family.kind == "counter") == name.endswith("_total")
        assert family.kind != "counter" or min(family.samples.values()) >= 0
    return families


def told(events: list[Event]) -> dict[str, Family]:
    gauges = Gauges()
    for event in events:
        gauges.hear(event)
    return parse(gauges.text())


def values(events: list[Event]) -> dict[str, float]:
    """The metrics without labels."""
    return {name: family.samples[""] for name, family in told(events).items() if "" in family.samples}


def test_a_run_is_told_in_numbers() -> None:
    assert values(RUN) == {
        "recycle_step": 3,
        "recycle_loss": 4.75,
        "recycle_gradient_norm": 0.5,
        "recycle_samples_total": 108,
        "recycle_discarded_samples_total": 7,
        "recycle_samples_per_second": 36,
        "recycle_iteration_seconds": 2.5,
        "recycle_live_workers": 11,
        "recycle_recoveries_total": 0,
        "recycle_skipped_steps_total": 1,
        "recycle_checkpoint_step": 2,
        "recycle_checkpoint_bytes": 123456,
        "recycle_warnings_total": 1,
    }


def test_what_has_labels_has_a_line_for_each() -> None:
    run = told(RUN)
    assert run["recycle_worker_memory_bytes"].samples == {'worker="W0_0"': 1500, 'worker="W0_1"': 2000}
    assert run["recycle_worker_activation_bytes"].samples == {'worker="W0_0"': 600, 'worker="W0_1"': 700}
    assert run["recycle_worker_planned_activation_bytes"].samples == {'worker="W0_0"': 500, 'worker="W0_1"': 650}
    assert run["recycle_state_seconds_total"].samples == {'state="train"': 3.5, 'state="pause"': 0.5, 'state="redo"': 1}


def test_recoveries_are_counted_and_what_they_cost_part_by_part() -> None:
    left = Recovered(0, 9, 1, ("W1_2",), False, "silent for 2.0 s", 4, detect_us=2 * SECOND, regroup_us=SECOND // 2, num_live=11)
    joined = Recovered(0, 9, 2, ("W1_2",), True, "it asked to join", 8, regroup_us=SECOND // 4, transfer_us=SECOND, num_live=12)
    assert values([left])["recycle_live_workers"] == 11
    run = told([left, joined])
    assert run["recycle_recoveries_total"].samples == {"": 2}
    assert run["recycle_live_workers"].samples == {"": 12}
    lost = {
        name.removeprefix('part="').removesuffix('"'): time for name, time in run["recycle_lost_seconds_total"].samples.items()
    }
    assert lost == {"detect": 2, "abort": 0, "plan": 0, "regroup": 0.75, "transfer": 1, "redo": 0}


def test_samples_of_steps_that_a_checkpoint_threw_away_are_counted_once_and_no_counter_falls() -> None:
    def done(*iterations: int) -> list[Event]:
        return [event for n in iterations for event in (Spell(n, n + 1, "train", samples=36), Stepped(n, n + 1, 5.0, 1.0, 1.0))]

    back = Recovered(5, 9, 2, ("W0_1", "W1_1"), False, "its connection closed", 2)
    run = [*done(0, 1, 2, 3, 4), back, *done(2, 3), back, *done(2, 3, 4, 5)]
    counts = [values(run[:length])["recycle_samples_total"] for length in range(len(run) + 1)]
    assert counts == sorted(counts)
    assert counts[-1] == 6 * 36
    assert values(run)["recycle_discarded_samples_total"] == 5 * 36


def test_the_text_is_written_as_the_format_says() -> None:
    gauges = Gauges()
    gauges.hear(Stepped(0, SECOND, 5.5, None, None))
    gauges.hear(Held("W0_0", 10, 5, 4))
    text = gauges.text()
    assert text.startswith(
        "# HELP recycle_step Steps done since the run first began.\n# TYPE recycle_step gauge\nrecycle_step 1\n"
    )
    assert "\nrecycle_loss 5.5\n" in text
    assert "\nrecycle_gradient_norm NaN\n" in text
    assert '\n# TYPE recycle_worker_memory_bytes gauge\nrecycle_worker_memory_bytes{worker="W0_0"} 10\n' in text


def test_what_is_not_known_yet_is_left_out() -> None:
    nothing = {"samples_total", "discarded_samples_total", "recoveries_total", "skipped_steps_total", "warnings_total"}
    assert values([]) == {f"recycle_{name}": 0 for name in nothing}
    first = values(RUN[:4])
    assert "recycle_iteration_seconds" not in first
    assert "recycle_checkpoint_step" not in first
    assert first["recycle_samples_per_second"] == 18


def test_a_loss_that_is_not_finite_is_no_number_and_its_step_is_skipped() -> None:
    run = values([*RUN[:3], Stepped(1, 3 * SECOND, None, None, None)])
    assert math.isnan(run["recycle_loss"])
    assert math.isnan(run["recycle_gradient_norm"])
    assert (run["recycle_step"], run["recycle_skipped_steps_total"]) == (2, 1)


def test_an_iteration_time_is_that_of_neighbours_only() -> None:
    resumed = [Stepped(4, SECOND, 1.0, 1.0, 1.0), Stepped(9, 2 * SECOND, 1.0, 1.0, 1.0)]
    assert "recycle_iteration_seconds" not in values(resumed)
    assert values([*resumed, Stepped(10, 5 * SECOND, 1.0, 1.0, 1.0)])["recycle_iteration_seconds"] == 3


def test_a_pause_says_nothing_about_pace_or_who_is_alive() -> None:
    before, later = values(RUN[:7]), values(RUN[:9])
    for name in ("recycle_samples_per_second", "recycle_live_workers", "recycle_samples_total"):
        assert later[name] == before[name]


def test_whoever_is_alive_is_told_before_the_first_step() -> None:
    assert values([Spell(0, SECOND, "pause", "start", num_live=12)])["recycle_live_workers"] == 12


def test_a_step_before_it_and_after_it_are_two_texts() -> None:
    gauges = Gauges()
    gauges.hear(RUN[2])
    before = gauges.text()
    gauges.hear(RUN[4])
    assert parse(before)["recycle_step"].samples == {"": 1}
    assert parse(gauges.text())["recycle_step"].samples == {"": 2}


@given(name=st.text(), loss=st.floats(), size=st.integers(0, 2**70))
def test_whatever_names_and_numbers_there_are_the_format_holds(name: str, loss: float, size: int) -> None:
    run = told([Stepped(0, 0, loss, loss, 1.0), Held(name, size, 0, 0), Spell(0, 1, name)])
    assert run["recycle_loss"].samples[""] == pytest.approx(loss, nan_ok=True, abs=0, rel=0)
    ((label, value),) = run["recycle_worker_memory_bytes"].samples.items()
    escaped = re.fullmatch(r'worker="(.*)"', label, re.DOTALL)
    assert escaped is not None
    letters = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
    assert re.sub(r'\\[\\"n]', lambda found: letters[found[0]], escaped[1]) == name
    assert value == float(size)


@pytest.mark.parametrize(
    "text",
    [
        "# HELP a b\n# TYPE a gauge\na 1",
        "# HELP a b\n# TYPE a gauge\na one\n",
        "# HELP a b\n# TYPE a gauge\na inf\n",
        "# HELP a b\n# TYPE a gauge\n",
        "# HELP a b\n# TYPE a number\na 1\n",
        "# HELP a b\n# TYPE a gauge\na 1\na 2\n",
        '# HELP a b\n# TYPE a gauge\na{b="c"d"} 1\n',
        "# HELP a b\n# TYPE a gauge\nb 1\n",
        "# HELP a b\na 1\n",
        "# HELP a b\n# TYPE a counter\na 1\n",
        "# HELP a_total b\n# TYPE a_total counter\na_total -1\n",
        "# HELP a b\n# TYPE a gauge\na 1\n# HELP a b\n# TYPE a gauge\na 1\n",
    ],
)
def test_the_parser_of_these_tests_refuses_what_the_format_does(text: str) -> None:
    with pytest.raises(AssertionError):
        parse(text)
