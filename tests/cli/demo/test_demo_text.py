"""What the demo says of what came of it, and the phases that it cuts a run into; no process is started."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from recycle.cli.demo.demo import run_demo
from recycle.cli.demo.demo_text import describe_cores, describe_recoveries, describe_setting, describe_twins, phase_table
from recycle.cli.demo.twin_runs import FULL, DemoPhase, Outcome, Twins, iteration_times_us, phases
from recycle.cli.main import make_parser
from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import OpRan, Recovered, Spell, Stepped

SAME, OTHER = "ab" * 32, "cd" * 32
TWINS = Twins((5.5, 4.25, 3.125), (5.5, 4.25, 3.125), SAME, SAME)
KILLED = Recovered(9_000, 9_100, 2, ("W1_2",), False, "its connection closed", 5, abort_us=600_000, num_live=11)
HUNG = Recovered(19_000, 19_100, 3, ("W0_1",), False, "silent for 2.0 s", 10, detect_us=2_000_000, num_live=10)
BACK = Recovered(29_000, 29_100, 4, ("W1_2",), True, "it asked to join", 16, transfer_us=150_000, num_live=11)
ALL = Outcome(TWINS, (), (KILLED, HUNG, BACK), (), 81.0)


@dataclass(frozen=True)
class Planned:
    """A source whose plans take 216 µs, and 36 more for everybody who is dead."""

    def answer(self, failed: frozenset[Worker]) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(period_us=216 + 36 * len(failed)))


def test_the_paragraph_names_the_failures_their_steps_and_the_comparison() -> None:
    text = describe_setting(FULL)
    assert "\n" not in text
    for words in (
        "with 12 workers",
        "3 pipelines of 4 stages, 6 micro-batches in each",
        "In step 6 of 40, W1_2 is killed with SIGKILL",
        "In step 11, W0_1 hangs",
        "silent for 2 s",
        "Before step 16, a new process starts for W1_2",
        "whether losses and weights are equal, bit for bit",
    ):
        assert words in text


def test_equal_twins_are_called_equal_with_both_hashes() -> None:
    assert TWINS.are_equal
    assert describe_twins(TWINS) == [
        "EQUAL: all 3 losses and all weights are, bit for bit, those of a run in which nobody failed.",
        f"weights with failures     sha256 {SAME}",
        f"weights without failures  sha256 {SAME}",
    ]


@pytest.mark.parametrize(
    ("twins", "sentence"),
    [
        (
            replace(TWINS, twin_weights_sha256=OTHER),
            "NOT EQUAL: all 3 losses are equal bit for bit, but the weights are not those of a run in which nobody failed.",
        ),
        (
            replace(TWINS, twin_losses=(5.5, 4.1, 3.1), twin_weights_sha256=OTHER),
            (
                "NOT EQUAL: the losses differ from step 2 on (4.25, and without failures 4.1), and the weights are not those of "
                "a run in which nobody failed."
            ),
        ),
        (
            replace(TWINS, twin_losses=(5.5, 4.25)),
            "NOT EQUAL: the losses differ from step 3 on (3.125, and without failures none), but the weights are equal.",
        ),
    ],
)
def test_a_sentence_says_what_differs_between_twins_and_from_which_step(twins: Twins, sentence: str) -> None:
    assert not twins.are_equal
    verdict, *hashes = describe_twins(twins)
    assert verdict == f"{sentence} This is a bug: please report it."
    assert [line.split()[-1] for line in hashes] == [SAME, twins.twin_weights_sha256]


@pytest.mark.parametrize(("one", "other", "are_equal"), [(0.0, -0.0, False), (float("nan"), float("nan"), True)])
def test_losses_are_compared_bit_for_bit_and_not_as_numbers(one: float, other: float, are_equal: bool) -> None:
    assert Twins((one,), (other,), SAME, SAME).are_equal is are_equal


@pytest.mark.parametrize(("twins", "code"), [(TWINS, 0), (replace(TWINS, twin_weights_sha256=OTHER), 1)])
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_the_exit_code_says_whether_the_twins_are_equal(
    twins: Twins, code: int, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("recycle.cli.demo.demo.make_demo_job", lambda setting: None)
    monkeypatch.setattr("recycle.cli.demo.demo.perform", lambda setting, job, say, out, injections: replace(ALL, twins=twins))
    assert run_demo(make_parser().parse_args(["demo", *words])) == code
    captured = capsys.readouterr()
    text = captured.err if words else captured.out
    assert ("NOT EQUAL" in text) is bool(code)
    assert all(line in text.splitlines() for line in describe_twins(twins)[1:])
    assert captured.out.startswith('{"equal": ') is bool(words)


def test_a_run_by_the_script_needs_one_sentence() -> None:
    assert describe_recoveries(ALL, FULL) == ["3 recoveries cost 2750 ms in all."]


def test_deviations_from_the_script_are_named() -> None:
    fenced = structs.replace(KILLED, workers=("W2_0",), iteration=12)
    sentences = describe_recoveries(replace(ALL, recoveries=(KILLED, HUNG, fenced), twin_recoveries=(fenced,)), FULL)
    assert sentences[1] == "W1_2 was still loading when the run ended, and did not join: let it run for more than 40 --steps."
    assert sentences[2].startswith("W2_0 also counted as dead: this machine was too busy")
    assert sentences[3].startswith("The twin lost a worker too")


def test_a_run_is_cut_where_a_worker_leaves_or_joins() -> None:
    times_us = {iteration: (100 * (iteration + 1), iteration + 1) for iteration in range(20)}
    assert phases(FULL.shape, (KILLED, HUNG, BACK), times_us, Planned()) == (
        DemoPhase((), (), 12, 5, 300, 3, 216),
        DemoPhase(("W1_2",), (), 11, 5, 800, 8, 252),
        DemoPhase(("W0_1", "W1_2"), (), 10, 6, 1350, 14, 288),
        DemoPhase(("W0_1",), ("W1_2",), 11, 4, 1850, 18, 252),
    )


def test_a_phase_without_a_step_is_left_out() -> None:
    both = structs.replace(HUNG, iteration=KILLED.iteration)
    made = phases(FULL.shape, (KILLED, both), dict.fromkeys(range(8), (100, 90)), Planned())
    assert [(phase.dead, phase.num_steps) for phase in made] == [((), 5), (("W0_1", "W1_2"), 3)]
    assert phases(FULL.shape, (), {}, Planned()) == ()


def test_of_an_iteration_the_time_of_its_spell_and_of_its_plan_are_remembered() -> None:
    before = [Spell(0, 70, "pause", "start"), OpRan(0, "W0_0", "0F0", 70, 90)]
    step = [Spell(70, 370, "train", samples=18), Stepped(0, 370, 5.5, 1.0, 1.0, 250)]
    assert iteration_times_us([*before, *step, KILLED]) == {0: (300, 250)}


def test_the_table_holds_iterations_against_those_before() -> None:
    lines = phase_table(
        (
            DemoPhase((), (), 12, 5, 600_000, 500_000, 216),
            DemoPhase(("W1_2",), (), 11, 5, 660_000, 500_000, 288),
            DemoPhase(("W0_1", "W1_2"), (), 10, 6, 1_200_000, 500_000, 298),
            DemoPhase(("W0_1",), ("W1_2",), 11, 24, 570_000, 500_000, 288),
        )
    )
    assert [" ".join(line.split()) for line in lines] == [
        "iterations workers steps median beside before planned",
        "before, nobody dead 12 5 600.00 ms",
        "with one dead: W1_2 11 5 660.00 ms +10% +33%",
        "with two dead: W0_1, W1_2 10 6 1.200 s +100% +38%",
        "W1_2 back, one dead: W0_1 11 24 570.00 ms -5% +33%",
    ]


def test_a_table_of_a_run_without_a_step_is_its_head() -> None:
    assert len(phase_table(())) == 1


def test_a_sentence_says_that_workers_share_cores() -> None:
    assert describe_cores(FULL.shape, 12) == []
    assert "share 2 cores" in describe_cores(FULL.shape, 2)[0]
    assert "share 1 core," in describe_cores(Shape(2, 2, 2), 1)[0]
