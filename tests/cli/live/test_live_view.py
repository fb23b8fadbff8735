"""The live view: what it knows after which event, how that is drawn, and what it says where there is no terminal."""

import io
import re
from dataclasses import replace

import pytest
from msgspec import structs
from rich.console import Console

from recycle.cli.live.event_text import describe_change, format_rate
from recycle.cli.live.grid import bar_cells, draw
from recycle.cli.live.live_view import LiveView
from recycle.core.cluster import Shape, Worker
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
    Stepped,
    Suspected,
    Warned,
)
from recycle.report.record.recovery_text import describe_parts
from recycle.report.record.run_state import ALIVE, DEAD, JOINING, STARTING, SUSPECTED, RunState, initial_state, state_after
from tests.recovery_records import JOINED, LEFT, recovery_record

SECOND = 1_000_000
SHAPE = Shape(3, 4, 6)


def steps(num: int, first: int = 0) -> list[Event]:
    """Steps of 300 ms each, of which the plan gives 250."""
    events: list[Event] = []
    for iteration in range(first, first + num):
        end = SECOND + 300_000 * (iteration + 1)
        events.append(Spell(end - 300_000, end, "train", samples=36, num_live=12))
        events.append(Stepped(iteration, end, 5.5 - iteration / 100, 1.0, 1.0, 250_000))
    return events


def known(*events: Event, shape: Shape | None = SHAPE, dead: tuple[Worker, ...] = (), num_steps: int = 60) -> RunState:
    """The state after events; unless the first one gives a worker its place, all have theirs before."""
    state = initial_state(num_steps, shape, dead)
    if events and not isinstance(events[0], Placed):
        state = replace(state, places={name: ALIVE if how == STARTING else how for name, how in state.places.items()})
    for event in events:
        state = state_after(state, event)
    return state


def lines(state: RunState, width: int = 100, is_ascii: bool = False) -> list[str]:
    """The view as a reader without colours sees it."""
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(draw(state, 75.0, width, is_ascii))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_before_the_first_epoch_workers_start_and_none_is_alive() -> None:
    text = lines(known(dead=(Worker(0, 3),)))
    assert text[0].startswith("step 0 of 60 ")
    assert text[0].endswith(" 0:01:15")
    assert text[1] == "starting workers"
    assert text[3].split() == ["stage", "0", "stage", "1", "stage", "2", "stage", "3"]
    first = [word for name in ("W0_0", "W0_1", "W0_2") for word in ("○", name, "starts")]
    assert text[4].split() == ["pipeline", "0", *first, "✗", "W0_3", "dead"]
    assert text[7].strip() == "0 of 12 workers alive, 1 dead, 11 starting"


def test_a_worker_is_alive_when_it_has_a_place() -> None:
    text = lines(known(*[Placed(0, str(worker), "here", 7) for worker in (Worker(2, 0), Worker(2, 1))], dead=(Worker(0, 3),)))
    assert text[6].split()[:8] == ["pipeline", "2", "●", "W2_0", "●", "W2_1", "○", "W2_2"]
    assert "2 of 12 workers alive, 1 dead, 9 starting" in "\n".join(text)


def test_a_step_shows_loss_speed_and_time_beside_the_plan() -> None:
    text = lines(known(*steps(30), Saved(0, 20, "step-20", 5)))
    assert re.fullmatch(r"step 30 of 60 ━{20} +0:01:15, 0:00:09 left", text[0])
    assert text[1] == "loss 5.2100  120 samples/s  iteration 300.00 ms  1.20 of the plan's 250.00 ms  saved at 20"


def test_a_rate_is_written_without_an_exponent() -> None:
    assert [format_rate(rate) for rate in (0.0123, 41.44, 120.0, 2161.39)] == ["0.0123", "41.4", "120", "2161"]


def test_a_worker_is_dead_from_when_it_left_and_its_work_is_being_taken_over() -> None:
    state = known(*steps(5), Changed(LEFT.at_us, "W1_2", False, 11))
    assert state.places["W1_2"] == DEAD
    text = "\n".join(lines(state))
    assert "✗ W1_2 dead" in text
    assert "11 of 12 workers alive, 1 dead   recovering: W1_2 left" in text
    assert "recovering" not in "\n".join(lines(state_after(state, LEFT)))


def test_a_recovery_is_shown_with_where_its_milliseconds_went() -> None:
    text = lines(known(*steps(5), Changed(LEFT.at_us, "W1_2", False, 11), LEFT))
    head = next(number for number, line in enumerate(text) if line.startswith("recoveries"))
    assert text[head] == "recoveries  1, which cost 446 ms"
    assert text[head + 1].split() == ["detect", "abort", "plan", "regroup", "transfer", "redo", "lost"]
    assert text[head + 2] == "step 6      ✗ W1_2 left: its connection closed; 14 ops run again"
    bar, *times = text[head + 3].split(maxsplit=1)
    assert re.fullmatch("a+g+r+", bar)
    assert times[0].split() == ["3", "ms", "41", "ms", "0", "ms", "92", "ms", "0", "ms", "310", "ms", "446", "ms"]


def test_a_job_that_goes_back_to_a_checkpoint_has_done_so_many_steps_again() -> None:
    assert known(*steps(5)).facts.num_done == known(*steps(5), LEFT).facts.num_done == 5
    assert known(*steps(5), structs.replace(LEFT, iteration=2)).facts.num_done == 2


def test_the_newest_recovery_is_the_first_and_bars_have_one_scale() -> None:
    text = lines(known(LEFT, JOINED))
    newest, bars = [line for line in text if line.startswith("step ")][1], [line.split()[0] for line in text if " ms" in line][1:]
    assert newest == "step 12     ● W1_2 joined: it asked to join"
    assert [len(bar) for bar in bars] == [3, 28]
    assert set(bars[0]) == {"t"}


def test_only_the_last_recoveries_are_shown_but_all_are_counted() -> None:
    state = known(*[LEFT, JOINED] * 10)
    assert (state.facts.num_recoveries, sum(state.facts.lost_us.values())) == (20, 10 * (446_000 + 50_000))
    assert sum(line.startswith("step ") and "W1_2" in line for line in lines(state)) == 4


def test_a_worker_that_rejoins_is_joining_and_then_alive() -> None:
    gone = known(Changed(LEFT.at_us, "W1_2", False, 11), LEFT)
    loading = state_after(gone, Joining(19 * SECOND, "W1_2"))
    assert (gone.places["W1_2"], loading.places["W1_2"]) == (DEAD, JOINING)
    assert "+ W1_2 joins" in "\n".join(lines(loading))
    assert (
        state_after(loading, JOINED).places["W1_2"] == state_after(loading, Changed(0, "W1_2", True, 12)).places["W1_2"] == ALIVE
    )


def test_a_worker_that_rejoins_before_the_recovery_is_alive() -> None:
    state = known(Changed(0, "W1_2", False, 11), Changed(5, "W1_2", True, 12), LEFT)
    assert state.places["W1_2"] == ALIVE


def test_a_worker_that_hangs_is_suspected_until_it_is_fenced() -> None:
    state = known(Suspected(5, "W0_1", "silent for 2.0 s"))
    assert state.places["W0_1"] == SUSPECTED
    assert "? W0_1 hangs" in "\n".join(lines(state))
    assert state_after(state, Changed(9, "W0_1", False, 11)).places["W0_1"] == DEAD


def test_a_worker_that_moves_takes_the_place_of_a_dead_worker_and_leaves_its_own() -> None:
    moved = Recovered(0, 9, 1, ("W1_2",), False, "its connection closed", 5, moves=("W0_2>W1_2",), num_live=11)
    state = known(Changed(0, "W1_2", False, 11), moved)
    assert (state.places["W1_2"], state.places["W0_2"]) == (ALIVE, DEAD)


def test_a_name_outside_the_shape_is_not_drawn() -> None:
    assert known(Changed(0, "W9_9", False, 11)).places == known(Warned(0, "slow")).places


def test_without_a_shape_it_is_one_line_whose_bar_gives_way_to_words() -> None:
    state = known(*steps(30), shape=None)
    words = "loss 5.2100  120 samples/s  iteration 300.00 ms  1.20 of the plan's 250.00 ms"
    (wide,) = lines(state, 140)
    assert re.fullmatch(rf"step 30 of 60 ━+ +{re.escape(words)} 0:01:15, 0:00:09 left", wide)
    (narrow,) = lines(state, 80)
    assert narrow.startswith("step 30 of 60  loss 5.2100  120 samples/s  iteration 300.00 ms")


def test_the_strip_shows_the_last_iterations_the_longest_the_highest() -> None:
    state = known(*steps(3), Spell(0, 9, "pause", "detect"), Spell(0, 600_000, "train"), Stepped(3, 600_000, 1.0, 1.0, 1.0, 1))
    (strip,) = [line for line in lines(state) if line.startswith("iterations")]
    assert strip == "iterations  ▅▅▅█  longest 600.00 ms"
    (plain,) = [line for line in lines(state, is_ascii=True) if line.startswith("iterations")]
    assert plain == "iterations  +++#  longest 600.00 ms"


def test_a_step_and_its_spell_may_come_in_either_order() -> None:
    spell, step = steps(1)
    assert known(spell, step).paces == known(step, spell).paces
    assert len(known(spell, step).paces) == 1


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    text = lines(known(*steps(60), Suspected(0, "W2_3", "far behind its plan"), LEFT, JOINED), width)
    assert max(map(len, text)) <= width


def test_a_terminal_that_knows_ascii_only_gets_signs_of_it() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    state = known(*steps(9), LEFT, JOINED, Changed(0, "W0_0", False, 11))
    console = Console(file=stream, width=100, color_system=None)
    console.print(draw(state, 1.0, 100, is_ascii=console.options.ascii_only))
    stream.flush()
    text = raw.getvalue().decode("ascii")
    assert "x W0_0 dead" in text
    assert "o W1_2" in text


def test_a_cluster_without_room_for_names_is_drawn_in_signs() -> None:
    state = known(Changed(0, "W1_20", False, 63), shape=Shape(2, 32, 4))
    rows = [line for line in lines(state) if line.startswith("pipeline")]
    assert rows == ["pipeline 0  " + "●" * 32, "pipeline 1  " + "●" * 20 + "✗" + "●" * 11]


def test_of_many_pipelines_those_with_a_missing_worker_are_shown() -> None:
    text = lines(known(Changed(0, "W30_1", False, 127), shape=Shape(32, 4, 4)))
    rows = [line for line in text if line.startswith("pipeline")]
    assert len(rows) == 12
    assert "✗ W30_1 dead" in rows[-1]
    assert "20 more" in text


def test_cells_of_a_bar_add_up() -> None:
    assert bar_cells({"a": 1, "b": 1, "c": 2}, 8) == {"a": 2, "b": 2, "c": 4}
    assert bar_cells({"a": 1, "b": 998, "c": 1}, 10) == {"a": 0, "b": 10, "c": 0}
    assert bar_cells({"a": 0, "b": 0}, 10) == {"a": 0, "b": 0}


def test_colour_says_the_same_as_the_signs() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor")
    console.print(draw(known(LEFT, Joining(0, "W1_2")), 1.0, 100))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[38;2;0;0;0;48;2;0;158;115m ● W0_0 " in text  # black on green
    assert "\x1b[38;2;255;255;255;48;2;0;114;178m + W1_2 joins" in text  # white on blue


def printed(*events: Event, shape: Shape | None = SHAPE, terminal: bool = False) -> str:
    """What the view prints, where there is no terminal, or on one."""
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=terminal, color_system=None)
    with LiveView(20, shape, console=console) as view:
        for event in events:
            view.observe(event)
    return stream.getvalue()


def test_without_a_terminal_a_line_is_printed_for_every_tenth_of_the_run() -> None:
    lines_printed = printed(*steps(20)).splitlines()
    assert len(lines_printed) == 10
    assert lines_printed[0] == "step 2 of 20  loss 5.4900  120 samples/s  iteration 300.00 ms  1.20 of the plan's"
    assert lines_printed[-1].startswith("step 20 of 20  loss 5.3100")


def test_without_a_terminal_every_death_join_and_recovery_is_a_line() -> None:
    events = (
        Suspected(5, "W1_2", "silent for 2.0 s"),
        Changed(10, "W1_2", False, 11),
        Spell(10, 20, "pause", "detect"),
        LEFT,
        Joining(30, "W1_2"),
        Changed(40, "W1_2", True, 12),
        JOINED,
        Warned(50, "the disk is full"),
    )
    assert printed(*events).splitlines() == [
        "W1_2 is suspected, and will be fenced: silent for 2.0 s",
        "W1_2 left: 11 workers are live",
        f"recovered, from step 6 on: W1_2 left (its connection closed; 14 ops run again); {describe_parts(LEFT)}",
        "W1_2 is loading, and joins at the next iteration",
        "W1_2 joined: 12 workers are live",
        f"recovered, from step 12 on: W1_2 joined (it asked to join); {describe_parts(JOINED)}",
        "warning: the disk is full",
    ]


def test_a_worker_that_leaves_or_joins_is_named_with_its_host_and_process() -> None:
    events = (
        Placed(0, "W1_2", "a", 4711),
        Suspected(5, "W1_2", "silent for 2.0 s"),
        Changed(10, "W1_2", False, 11),
        Placed(30, "W1_2", "b", 12),
        Joining(30, "W1_2"),
        Changed(40, "W1_2", True, 12),
    )
    assert printed(*events).splitlines() == [
        "W1_2 (host a, pid 4711) is suspected, and will be fenced: silent for 2.0 s",
        "W1_2 (host a, pid 4711) left: 11 workers are live",
        "W1_2 (host b, pid 12) is loading, and joins at the next iteration",
        "W1_2 (host b, pid 12) joined: 12 workers are live",
    ]


def test_below_the_grid_are_the_processes_of_workers_that_are_not_alive() -> None:
    placed = Placed(0, "W1_2", "a", 4711), Placed(0, "W0_1", "b", 12), Placed(0, "W0_0", "a", 7)
    state = known(*placed, Changed(5, "W1_2", False, 11), Suspected(6, "W0_1", "silent for 2.0 s"))
    assert lines(state)[8].strip() == "W0_1 hangs: host b, pid 12; W1_2 dead: host a, pid 4711"
    assert all("pid" not in line for line in lines(known(*placed)))


def test_ops_and_spells_are_no_news() -> None:
    assert describe_change(OpRan(0, "W0_0", "0F0@0", 0, 5), {}) is None
    assert describe_change(Spell(0, 5, "redo", "failure"), {}) is None


@pytest.mark.timeout(60)
def test_on_a_terminal_the_last_picture_stays_and_warnings_stand_above_it() -> None:
    shown = printed(*steps(20), Warned(0, "the disk is full"), Changed(0, "W1_2", False, 11), LEFT, terminal=True)
    last = shown.rpartition("step 20 of 20")[2]
    assert "✗ W1_2 dead" in last
    assert "recoveries  1, which cost 446 ms" in last
    assert "warning: the disk is full" in shown
    assert "workers are live" not in shown


@pytest.mark.timeout(60)
def test_on_a_terminal_without_a_shape_there_is_one_line_and_news_above_it() -> None:
    shown = printed(*steps(20), Changed(0, "W1_2", False, 11), shape=None, terminal=True)
    assert "W1_2 left: 11 workers are live" in shown
    assert "loss 5.3100" in shown
    assert "pipeline" not in shown


def test_a_whole_run_is_followed_to_its_end() -> None:
    state = initial_state(14, Shape(2, 2, 2))
    for event in recovery_record():
        state = state_after(state, event)
        lines(state)
    assert state.facts.num_done == 14
    assert state.gone == ()
    assert set(state.places.values()) == {ALIVE}
    assert [one.joins for one in state.recoveries] == [False, True]


def test_a_slow_worker_is_shown_with_its_speed_until_it_is_itself_again_or_gone() -> None:
    slow = SpeedChanged(5, "W1_2", 0.6, 4)
    text = lines(known(*steps(8), slow))
    assert text[5].split()[2:] == ["●", "W1_0", "●", "W1_1", "●", "W1_2", "x0.6", "●", "W1_3"]
    assert "12 of 12 workers alive; slow: W1_2 x0.6" in "\n".join(text)
    for end in (SpeedChanged(9, "W1_2", 1.0, 7), Changed(9, "W1_2", False, 11)):
        assert "x0.6" not in "\n".join(lines(known(*steps(8), slow, end)))


def test_a_line_says_who_is_slow_and_since_when() -> None:
    assert describe_change(SpeedChanged(5, "W1_2", 0.6, 4), {}) == "W1_2 is slow: 0.6 of its peers' speed, since step 5"
    assert describe_change(SpeedChanged(5, "W1_2", 1.3, 4), {}) == "W1_2 is fast: 1.3 of its peers' speed, since step 5"
    assert describe_change(SpeedChanged(5, "W1_2", 1.0, 4), {}) == "W1_2 runs at its peers' speed again, since step 5"


def test_a_slow_link_is_named_below_the_grid_until_it_is_itself_again() -> None:
    slow, well = LinkChanged(5, "W1_1-W1_2", 0.05, 4, 20_000, 1_000), LinkChanged(9, "W1_1-W1_2", 1.0, 7, 1_000, 1_000)
    assert "12 of 12 workers alive; slow: W1_1-W1_2 x0.05" in "\n".join(lines(known(*steps(8), slow)))
    assert "slow:" not in "\n".join(lines(known(*steps(8), slow, well)))


def test_a_line_says_which_link_is_slow_and_since_when() -> None:
    slow = "the link W1_1-W1_2 is slow: a message takes 20.00 ms, 20 times as long as on others, since step 5"
    assert describe_change(LinkChanged(5, "W1_1-W1_2", 0.05, 4, 20_000, 1_000), {}) == slow
    well = "the link W1_1-W1_2 is as fast as others again, since step 8"
    assert describe_change(LinkChanged(9, "W1_1-W1_2", 1.0, 7, 1_000, 1_000), {}) == well


def test_another_plan_for_the_same_workers_is_named_so() -> None:
    changed = Recovered(5, 9, 2, (), True, "W1_2 at 0.6 of the speed of peers", 7, regroup_us=4)
    sentence = describe_change(changed, {})
    assert sentence is not None
    assert sentence.startswith("recovered, from step 8 on: another plan (W1_2 at 0.6 of the speed of peers); ")
    assert known(*steps(8), changed).places == known(*steps(8)).places


def test_with_shared_layers_the_view_says_how_many_each_stage_computes() -> None:
    state = initial_state(60, SHAPE, (), (6, 6, 6, 6))
    assert re.search(r"compute +6 layers +6 layers +6 layers +6 layers", "\n".join(lines(state)))
    recovered = structs.replace(LEFT, carried=(6.4, 6.44, 4.75, 6.41))
    after = "\n".join(lines(state_after(state, recovered), 160))
    assert re.search(r"compute +6.4 layers +6.44 layers +4.75 layers +6.41 layers", after)
    assert "stages compute 6.4, 6.44, 4.75, 6.41 layers" in after
    assert "compute" not in "\n".join(lines(initial_state(60, SHAPE)))
