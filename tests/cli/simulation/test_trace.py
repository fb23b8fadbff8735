"""`recycle trace`: making traces, looking at them, and what a user can get wrong."""

import json
import re
from io import BytesIO
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from recycle.cli.main import main
from recycle.core.events.trace import Trace
from recycle.report.figures.trace_chart import draw_strip, draw_trace_png, levels, ticks
from recycle.report.render.palette import PAINTS
from tests.cli.commands import output_of, refusal

H, D = 3600 * 10**6, 86400 * 10**6
EVERY = "trace make --kind every --pipelines 2 --stages 2 --interval 30m --hours 2"
# Four nodes; two leave after 2 h, one of them is back after 4 h, and another comes after 8 h; the end is at 10 h.
TEXT = """\
0,add,a
0,add,b
0,add,c
0,add,d
7200000,remove,a
7200000,remove,b
14400000,add,a
28800000,add,e
# end 36000000
"""


def test_a_trace_without_a_file_is_printed_so_that_it_can_be_piped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace.parse(output_of(EVERY))
    assert trace.initial == ("W0_0", "W0_1", "W1_0", "W1_1")
    assert [(change.at_us, change.joins) for change in trace.later] == [(H // 2, False), (H, False), (3 * H // 2, False)]
    assert trace.end_us == 2 * H


def test_a_written_trace_is_summed_up_and_says_how_it_was_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = output_of(EVERY)
    out = output_of(f"{EVERY} --out deep/trace.csv")
    assert (folder / "deep" / "trace.csv").read_text() == printed
    assert "failures  3, one every 40 min; a node lives 1 h 40 min on average" in out
    assert "written   deep/trace.csv  (recycle trace show deep/trace.csv)" in out
    remark, *_ = printed.splitlines()
    assert remark == ("# recycle trace make --kind every --pipelines 2 --stages 2 --interval 30m --hours 2 --seed 1")
    assert output_of(remark.removeprefix("# recycle ")) == printed


@pytest.mark.parametrize(
    "options",
    [
        "--kind every --interval 30m",
        "--kind poisson --mtbf 2d",
        "--kind bursts --interval 3h",
        "--kind bursts --interval 3h --burst 5",
        "--kind racks --mtbf 5d --rack 4",
    ],
)
def test_every_kind_is_made_and_shown(options: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = {output_of(f"trace make {options} --nodes 32 --rejoin 1h --days 2 --seed {seed}") for seed in (1, 2)}
    assert len(made) == 2
    output_of(f"trace make {options} --nodes 32 --rejoin 1h --days 2 --out trace.csv")
    facts = json.loads(output_of("trace show trace.csv --json"))
    assert facts["num_initial"] == 32
    assert facts["num_failures"] >= facts["num_joins"] > 0
    assert facts["end_us"] == 2 * D


def test_show_says_what_is_in_a_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace.csv").write_text(TEXT)
    assert output_of("trace show trace.csv").splitlines()[:5] == [
        "nodes     4 at the start, 5 in all",
        "failures  2, one every 5 h; a node lives 16 h on average",
        "joins     2 after the start",
        "live      2 to 4, 3.2 on average",
        "end       10 h",
    ]
    # 4 nodes for 2 h, 2 for 2 h, 3 for 4 h and 4 for 2 h are 32 node-hours in 10 h.
    assert json.loads(output_of("trace show trace.csv --json")) == {
        "num_initial": 4,
        "num_nodes": 5,
        "num_failures": 2,
        "num_hangs": 0,
        "num_joins": 2,
        "num_slow": 0,
        "num_slow_links": 0,
        "fewest_live": 2,
        "most_live": 4,
        "mean_live": 3.2,
        "end_us": 10 * H,
        "mean_between_failures_us": 5 * H,
        "mean_between_failures_of_a_node_us": 16 * H,
    }


def test_a_trace_without_failures_has_no_time_between_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace.csv").write_text("0,add,a\n# end 5000\n")
    facts = json.loads(output_of("trace show trace.csv --json"))
    assert facts["mean_between_failures_us"] is None
    assert facts["mean_live"] == 1
    assert "failures  0\n" in output_of("trace show trace.csv")


def test_the_chart_shows_steps_and_counts_who_left_and_who_came(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace.csv").write_text(TEXT)
    out = output_of("trace show trace.csv --width 46")
    assert out.splitlines()[6:] == [
        "live",
        "   4 ▕████████                        ████████",
        "   3 ▕████████        ████████████████████████",
        "   2 ▕████████████████████████████████████████",
        "   1 ▕████████████████████████████████████████",
        "   0 ▕┬───────────────┬───────────────┬───────",
        "      0               4 h             8 h",
        "left  ········2·······························",
        "came  ················1···············1·······",
        "a column is 15 min and shows the fewest live",
        "nodes in it",
    ]
    assert "\x1b" not in out


def chart(text: str, width: int = 60, is_ascii: bool = False) -> list[str]:
    return ["".join(cell.text for cell in line) for line in draw_strip(Trace.parse(text), width, is_ascii)]


def test_a_dip_shorter_than_a_column_is_seen() -> None:
    rows = chart("0,add,a\n0,add,b\n500,remove,a\n501,add,a\n# end 1000000")
    assert rows[1].endswith("▕ " + "█" * 53)
    assert rows[2].endswith("▕" + "█" * 54)


def test_what_happens_at_the_very_end_is_in_the_last_column() -> None:
    rows = chart("0,add,a\n0,add,b\n1000,remove,a")
    assert rows[1].endswith("█" * 53)
    assert not rows[1].endswith("█" * 54)
    assert rows[-3].endswith("·1")


def test_many_nodes_share_a_row_and_a_part_of_it_is_a_lower_block() -> None:
    joins = "".join(f"0,add,n{number}\n" for number in range(80))
    leaves = "".join(f"1000,remove,n{number}\n" for number in range(45))
    rows = chart(f"{joins}{leaves}# end 2000", width=46)
    assert [row[:4].strip() for row in rows[1:10]] == ["80", "70", "60", "50", "40", "30", "20", "10", "0"]
    assert rows[1] == "  80 ▕" + "█" * 20
    assert rows[5] == "  40 ▕" + "█" * 20 + "▄" * 20
    assert next(row for row in rows if row.startswith("left")) == "left  " + "·" * 20 + "+" + "·" * 19


def test_a_chart_of_few_failures_among_many_nodes_does_not_start_at_zero_and_says_so() -> None:
    joins = "".join(f"0,add,n{number}\n" for number in range(80))
    text = f"{joins}1000,remove,n5\n1200,remove,n6\n# end 2000"
    assert levels(Trace.parse(text)) == (77, 80)
    assert "the lowest line is 77 nodes, not 0" in " ".join(chart(text, width=120))


@pytest.mark.parametrize("width", [40, 41, 55, 120, 3000])
def test_no_line_is_wider_than_was_asked_for(width: int) -> None:
    for text in (TEXT, "0,add,a\n1,remove,a", "0,add,a\n5,remove,a\n# end 1000000000000"):
        assert max(map(len, chart(text, width))) <= width


def test_a_terminal_that_knows_only_ascii_gets_ascii(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "trace.csv").write_text(TEXT)
    monkeypatch.setattr("rich.console.Console.encoding", "ascii")
    out = output_of("trace show trace.csv --width 46")
    assert out.isascii()
    assert "   3 |########        ########################" in out.splitlines()


def test_a_terminal_gets_colours_unless_it_wants_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "trace.csv").write_text(TEXT)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "50")
    orange = "48;2;213;94;0m2"
    assert orange in output_of("trace show trace.csv")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = output_of("trace show trace.csv")
    assert orange not in plain
    assert "2" in next(line for line in plain.splitlines() if "left" in line)


@pytest.mark.parametrize("end_us", [20_000, 7_000_000, H, 6 * H, 36 * H, 60 * D, 10**15])
def test_ticks_are_few_and_reach_over_the_time(end_us: int) -> None:
    for most in (1, 3, 10):
        times = ticks(end_us, most)
        assert times[0] == 0
        assert len(times) <= max(2, most)
        assert times[-1] <= end_us
    assert len(ticks(end_us, 10)) >= 4


def test_hours_have_round_ticks() -> None:
    assert ticks(6 * H, 10) == [hour * H for hour in range(7)]
    assert ticks(D, 10) == [hour * H for hour in range(0, 25, 3)]


def test_the_picture_shows_the_steps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace.csv").write_text(TEXT)
    out = output_of("trace show trace.csv --png pictures/trace.png")
    assert out.endswith("wrote pictures/trace.png\n")
    image = imread(folder / "pictures" / "trace.png")[..., :3]
    filled = (abs(image - to_rgb(PAINTS["F"].pale)) < 0.02).all(axis=2)
    heights = filled.sum(axis=0)[filled.any(axis=0)]
    at_1h, at_3h, at_6h, at_9h = (heights[round(len(heights) * share)] for share in (0.07, 0.33, 0.63, 0.93))
    assert at_1h == at_9h
    assert at_3h == pytest.approx(at_1h * 2 / 4, rel=0.05)
    assert at_6h == pytest.approx(at_1h * 3 / 4, rel=0.05)
    for look in "BW":
        assert (abs(image - to_rgb(PAINTS[look].fill)) < 0.02).all(axis=2).any()


def test_a_picture_of_a_trace_where_nothing_happens_can_be_drawn() -> None:
    assert imread(BytesIO(draw_trace_png(Trace.parse("0,add,a\n# end 1"), "quiet")), format="png").shape[1] == 2000


def test_json_and_a_picture_can_be_had_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace.csv").write_text(TEXT)
    assert json.loads(output_of("trace show trace.csv --json --png trace.png"))["num_failures"] == 2
    assert (folder / "trace.png").read_bytes().startswith(b"\x89PNG\r\n")


# (arguments of make, what the sentence says)
SIX = "--nodes 8 --hours 6"
WRONG = {
    "no kind": (SIX, r"the following arguments are required: --kind"),
    "an unknown kind": (f"{SIX} --kind meteor", r"--kind: invalid choice: 'meteor' \(choose from .*every.*racks"),
    "no interval": (f"{SIX} --kind every", r"--kind every needs --interval: give it, such as --interval 30m"),
    "no mean": (f"{SIX} --kind poisson", r"--kind poisson needs --mtbf: give it, such as --mtbf 30d"),
    "no rack": (f"{SIX} --kind racks --mtbf 1d", r"--kind racks needs --rack: give it, such as --rack 4"),
    "a mean for every": (f"{SIX} --kind every --interval 1h --mtbf 1d", r"--mtbf means nothing for --kind every, .*--interval"),
    "a rack for bursts": (f"{SIX} --kind bursts --interval 1h --rack 2", r"--rack means nothing .* --interval and --burst"),
    "interval 0": (f"{SIX} --kind every --interval 0m", r"the interval is 0 s, but it must be from 1 ms to 30 years"),
    "a negative interval": (f"{SIX} --kind every --interval=-5m", r"'-5m' is not a duration: write a number and one of ms, s"),
    "an interval without a unit": (f"{SIX} --kind every --interval 30", r"'30' is not a duration"),
    "an interval that is not a number": (f"{SIX} --kind every --interval nanm", r"'nanm' is not a duration"),
    "mtbf 0": (f"{SIX} --kind poisson --mtbf 0s", r"the mean time between failures is 0 s, but it must be from 1 ms"),
    "an absurd mtbf": (f"{SIX} --kind poisson --mtbf 99999999d", r"'99999999d' is longer than 100 years"),
    "rejoin 0": (f"{SIX} --kind poisson --mtbf 1d --rejoin 0s", r"the time to rejoin is 0 s, but it must be from 1 ms"),
    "no hours given": ("--nodes 8 --kind every --interval 1h", r"one of the arguments --hours --days is required"),
    "hours and days": (f"{SIX} --days 1 --kind every --interval 1h", r"--days: not allowed with argument --hours"),
    "hours 0": ("--nodes 8 --kind every --interval 1h --hours 0", r"--hours is 0, but a trace lasts from 1 ms to 30 years"),
    "negative days": ("--nodes 8 --kind every --interval 1h --days=-1", r"--days is -1, but a trace lasts from 1 ms"),
    "hours that are not a number": ("--nodes 8 --kind every --interval 1h --hours nan", r"--hours is nan, but a trace lasts"),
    "infinite hours": ("--nodes 8 --kind every --interval 1h --hours inf", r"--hours is inf, but a trace lasts"),
    "absurd hours": ("--nodes 8 --kind every --interval 1h --hours 1e9", r"--hours is 1e\+09, but a trace lasts"),
    "no nodes": (
        "--kind every --interval 1h --hours 6",
        r"give the nodes once: either --pipelines D and --stages S, or --nodes N",
    ),
    "nodes twice": (f"{SIX} --pipelines 2 --stages 4 --kind every --interval 1h", r"give the nodes once"),
    "pipelines without stages": ("--pipelines 2 --kind every --interval 1h --hours 6", r"give the nodes once"),
    "nodes 0": ("--nodes 0 --kind every --interval 1h --hours 6", r"the number of nodes is 0, .* at least 1"),
    "negative stages": ("--pipelines 2 --stages=-3 --kind every --interval 1h --hours 6", r"the number of stages is -3"),
    "half a node": ("--nodes 1.5 --kind every --interval 1h --hours 6", r"argument --nodes: invalid int value: '1.5'"),
    "absurd nodes": ("--nodes 99999999999 --kind every --interval 1h --hours 6", r"would have about 99,999,999,999 changes"),
    "too many changes": (f"{SIX} --kind every --interval 1ms --rejoin 1s", r"would have about 43,200,006 changes, more than the"),
    "too large a rack": (f"{SIX} --kind racks --mtbf 1d --rack 9", r"a rack of 9 nodes is not possible: there are 8"),
    "rack 0": (f"{SIX} --kind racks --mtbf 1d --rack 0", r"a rack of 0 nodes is not possible"),
    "too large a burst": (f"{SIX} --kind bursts --interval 1h --burst 9", r"a burst of 9 nodes is not possible: there are 8"),
    "burst 0": (f"{SIX} --kind bursts --interval 1h --burst 0", r"a burst of 0 nodes is not possible"),
    "a burst that is a word": (f"{SIX} --kind bursts --interval 1h --burst all", r"'all' is neither a count nor a share"),
    "a negative seed": (f"{SIX} --kind every --interval 1h --seed=-1", r"the seed is -1, but it must be a whole number"),
    "half a seed": (f"{SIX} --kind every --interval 1h --seed 0.5", r"argument --seed: invalid int value: '0.5'"),
    "a folder to write to": (f"{SIX} --kind every --interval 1h --out .", r"cannot write \.: it is a folder; name a file"),
}


@pytest.mark.parametrize(("arguments", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_explained(arguments: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = "" if "--out" in arguments else "--out trace.csv"
    assert re.search(sentence, refusal(f"trace make {arguments} {out}"))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        pytest.param(b"", r"trace.csv is not a usable trace: the trace has no node: give", id="empty"),
        pytest.param(b"\xff\xfe\0\1", r"trace.csv is not text: a trace has a line", id="binary"),
        pytest.param(b"\0" * 100_000, r"trace.csv is not a usable trace: line 1 is '.{,99}', but a change is", id="zeros"),
        pytest.param(b"0,add,a\n9,remove,a\n5,add,a\n", r"a changes at 5 ms, after a change at 9 ms: sort", id="out of order"),
        pytest.param(b"0,add,a\n5,remove,b\n", r"b is removed, but it is not there at 5 ms", id="an absent node leaves"),
        pytest.param(b"0,add,a\n5,add,a\n", r"a is added, but it is there already at 5 ms", id="a present node joins"),
    ],
)
def test_a_file_that_is_no_trace_is_explained(
    data: bytes, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "trace.csv").write_bytes(data)
    for options in ("", "--json", "--png trace.png"):
        assert re.search(sentence, refusal(f"trace show trace.csv {options}"))


def test_a_place_that_cannot_be_read_or_written_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read nowhere.csv: No such file or directory" in refusal("trace show nowhere.csv")
    assert "cannot read .: Is a directory" in refusal("trace show .")
    (folder / "trace.csv").write_text(TEXT)
    assert "it is a folder; name a file" in refusal("trace show trace.csv --png .")
    assert "is not a folder that you may write to" in refusal(f"{EVERY} --out trace.csv/inside.csv")
    assert (folder / "trace.csv").read_text() == TEXT


def test_a_wrong_action_or_width_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace.csv").write_text(TEXT)
    assert "the following arguments are required: ACTION" in refusal("trace")
    assert "invalid choice: 'bend'" in refusal("trace bend")
    assert "the following arguments are required: TRACE" in refusal("trace show")
    assert "--width is 7, too narrow for a chart" in refusal("trace show trace.csv --width 7")


@pytest.mark.parametrize("command", ["trace", "trace make", "trace show"])
def test_help_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    assert f"recycle {command}" in capsys.readouterr().out.split("examples:")[1]


def test_slow_nodes_are_made_counted_and_read_by_the_same_seed(folder: Path) -> None:
    made = "trace make --kind none --pipelines 4 --stages 8 --slow published --slow-links published --days 2 --seed 3"
    first = output_of(made)
    assert first == output_of(made)
    assert first.startswith("# recycle trace make --kind none --pipelines 4 --stages 8 --slow published --slow-links published")
    trace = Trace.parse(first)
    assert not trace.later
    assert {slow.speed for slow in trace.slowdowns if slow.is_link} == {0.5}
    (folder / "slow.csv").write_text(first)
    facts = json.loads(output_of("trace show slow.csv --json"))
    assert facts["num_slow"] == sum(not slow.is_link for slow in trace.slowdowns) > 0
    assert f"{facts['num_slow_links']} times a link" in output_of("trace show slow.csv")


def test_nobody_returns_where_nobody_leaves() -> None:
    assert "with --kind none no node fails" in refusal("trace make --kind none --nodes 3 --rejoin 1h --hours 1")
