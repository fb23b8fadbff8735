"""`recycle show` and the rendering of charts."""

import argparse
import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import recycle
from recycle.cli.planning.plan import add_plan_parser
from recycle.cli.planning.show import add_show_parser
from recycle.cli.terminal import PIPED_WIDTH, STYLES, chart_width, print_lines
from recycle.core.errors import FileProblem, UserError
from recycle.core.plans.library import without_failures
from recycle.core.plans.plan import Plan
from recycle.report.render.palette import PAINTS
from recycle.report.render.terminal_chart import REROUTED, draw_chart
from recycle.report.timeline.plan_timeline import plan_timeline
from tests.plans import make_1f1b_plan, make_rerouted_plan


def show(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_show_parser(parser.add_subparsers())
    args = parser.parse_args(["show", *map(str, arguments)])
    return int(args.run(args) or 0)


@pytest.fixture
def fault_free(tmp_path: Path) -> Path:
    return saved(make_1f1b_plan(), tmp_path / "plan.json")


def saved(plan: Plan, path: Path) -> Path:
    plan.save(path)
    return path


def test_the_chart_is_printed_plain_when_the_output_is_no_terminal(fault_free: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(fault_free, "--width", "90") == 0
    out = capsys.readouterr().out
    assert "W1_0 ▕F0 F1 F2 F3 ··················B0    F4 B1    F5 B2    ···B3    ···B4    ···B5    ▏" in out.splitlines()
    assert "\x1b" not in out


def test_files_are_written_and_named(fault_free: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--svg": "a.svg", "--png": "a.png", "--perfetto": "a.json", "--csv": "a.csv"}
    assert show(fault_free, *(text for option, name in names.items() for text in (option, str(tmp_path / "deep" / name)))) == 0
    folder = tmp_path / "deep"
    assert (folder / "a.svg").read_text().startswith("<svg ")
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert len(json.loads((folder / "a.json").read_text())["traceEvents"]) > 144
    assert (folder / "a.csv").read_text().startswith("0F0,0F1,0F2,0F3,,")
    assert sorted(path.name for path in folder.iterdir()) == sorted(names.values())
    out = capsys.readouterr().out
    assert all(f"wrote {folder / name}" in out for name in names.values())


def test_another_pipeline_can_be_exported(fault_free: Path, tmp_path: Path) -> None:
    assert show(fault_free, "--csv", tmp_path / "two.csv", "--pipeline", "2") == 0
    assert show(fault_free, "--csv", tmp_path / "none.csv") == 0
    assert (tmp_path / "two.csv").read_text() == (tmp_path / "none.csv").read_text()
    with pytest.raises(UserError, match="no pipeline 3"):
        show(fault_free, "--csv", tmp_path / "three.csv", "--pipeline", "3")


def test_a_csv_of_a_plan_with_failures_is_refused_before_anything_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(make_rerouted_plan(), tmp_path / "plan.json")
    with pytest.raises(UserError, match="cannot say"):
        show(path, "--csv", tmp_path / "a.csv")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "a.csv").exists()


@pytest.mark.parametrize("techniques", ["adaptive,decoupled,staggered", "adaptive"])
@pytest.mark.parametrize("memory", ["6", "4,3,2,1", "unlimited"])
@pytest.mark.parametrize("comm", [0, 2])
def test_the_refusal_names_the_command_that_makes_an_exportable_plan(
    tmp_path: Path, techniques: str, memory: str, comm: int
) -> None:
    problem = recycle.problem(3, 4, 6, fail="W1_2", costs="10,13,9", comm=comm, memory=memory, techniques=techniques)
    path = saved(recycle.solve(problem, "greedy", effort=1), tmp_path / "plan.json")
    with pytest.raises(UserError, match=r"has W1_2 dead.* only a plan without failures can be exported; make one with") as caught:
        show(path, "--csv", tmp_path / "a.csv")
    command = str(caught.value).partition("make one with recycle ")[2].replace("fault-free.json", str(tmp_path / "free.json"))
    parser = argparse.ArgumentParser()
    add_plan_parser(parser.add_subparsers())
    args = parser.parse_args([*command.split(), "--method", "greedy", "--json"])
    assert not args.run(args)
    assert Plan.load(tmp_path / "free.json").problem == without_failures(problem)
    assert show(tmp_path / "free.json", "--csv", tmp_path / "a.csv") == 0
    assert (tmp_path / "a.csv").read_text().startswith("0F0,0F1,")


def test_the_refusal_asks_for_the_profile_file_where_costs_cannot_be_three_numbers(tmp_path: Path) -> None:
    profile = recycle.estimate("gpt3-medium", "h100", 2)
    plan = recycle.solve(recycle.problem(2, 2, 2, fail="W0_0", profile=profile, memory="80GiB"), "greedy", effort=1)
    with pytest.raises(UserError, match=f"--microbatches 2 --profile FILE --memory {80 * 2**30}B --out fault-free.json"):
        show(saved(plan, tmp_path / "plan.json"), "--csv", tmp_path / "a.csv")


@pytest.mark.parametrize("option", ["--svg", "--png", "--perfetto", "--csv"])
def test_a_place_that_cannot_be_written_is_named(fault_free: Path, option: str) -> None:
    with pytest.raises(FileProblem, match="cannot write"):
        show(fault_free, option, fault_free / "below-a-file.out")


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="cannot read"):
        show(tmp_path / "none.json")


def test_a_chart_narrower_than_anyone_can_read_is_refused(fault_free: Path) -> None:
    with pytest.raises(UserError, match="--width is 7, too narrow"):
        show(fault_free, "--width", "7")


def test_rows_all_prints_every_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(make_1f1b_plan(12, 8, 2), tmp_path / "plan.json")
    show(path)
    assert "56 of 96 workers are not shown" in capsys.readouterr().out
    show(path, "--rows", "all")
    assert len(re.findall(r"(?m)^W\d+_\d ", capsys.readouterr().out)) == 96


def test_a_plan_that_breaks_a_rule_is_drawn_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(replace(make_1f1b_plan(), period_us=28), tmp_path / "plan.json")
    assert show(path) == 0
    captured = capsys.readouterr()
    assert "W0_0" in captured.out
    assert f"warning: this plan is not legal; recycle check {path} lists 1 violations" in captured.err


def rendered(plan: Plan, **options: object) -> str:
    stream = StringIO()
    print_lines(draw_chart(plan_timeline(plan), 80), Console(file=stream, width=80, **options))  # type: ignore[arg-type]
    return stream.getvalue()


def test_a_terminal_gets_colours_and_underlined_rerouted_ops() -> None:
    out = rendered(make_rerouted_plan(), force_terminal=True, color_system="truecolor")
    assert "\x1b[38;2;255;255;255;48;2;0;114;178mF0   F1   \x1b[0m" in out
    assert "\x1b[4;38;2;0;0;0;48;2;179;213;232mf0@1 \x1b[0m" in out


def test_no_color_leaves_letters_and_underlines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = rendered(make_rerouted_plan(), force_terminal=True, color_system="truecolor")
    assert "48;2" not in out
    assert "38;2" not in out
    assert "\x1b[4mf0@1 \x1b[0m" in out


def test_a_terminal_that_knows_only_ascii_gets_ascii() -> None:
    class Ascii(StringIO):
        encoding = "ascii"  # type: ignore[assignment]

    stream = Ascii()
    print_lines(draw_chart(plan_timeline(make_rerouted_plan()), 80), Console(file=stream, width=80))
    assert stream.getvalue().isascii()
    assert "W0_0 |F0   F1   .....I0" in stream.getvalue()


def test_lines_are_never_wrapped_or_cropped() -> None:
    lines = draw_chart(plan_timeline(make_1f1b_plan()), 200)
    stream = StringIO()
    print_lines(lines, Console(file=stream, width=40))
    assert stream.getvalue().count("\n") == len(lines)


def test_a_pipe_gets_the_width_of_a_page() -> None:
    assert chart_width(Console(file=StringIO(), width=55)) == PIPED_WIDTH
    assert chart_width(Console(file=StringIO(), width=55, force_terminal=True)) == 55


def test_every_look_has_a_style() -> None:
    known = STYLES
    assert all(look in known and look + REROUTED in known for look in PAINTS)
    assert all(known[look + REROUTED].underline for look in PAINTS)


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        show("--help")
    assert caught.value.code == 0
    assert "recycle show plan.json --perfetto trace.json" in capsys.readouterr().out
