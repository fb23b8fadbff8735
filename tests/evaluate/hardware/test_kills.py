"""Deaths on purpose: everybody is killed in turn and comes back, and what it took is kept."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from recycle.core.errors import FileProblem
from recycle.core.events.failure_script import Action
from recycle.evaluate.hardware.kills import PARTS, measure_recoveries, read_recoveries, script
from recycle.evaluate.hardware.setup import Setup
from tests.evaluate.hardware.tiny_setup import TINY, save_plans_for_deaths

SETUPS = [TINY, *(Setup.usual("cpu-cores", num) for num in (8, 12, 16, 28))]
# Steps that are long against the time in which a process starts, so that whoever is killed is back well before the end.
UNHURRIED = replace(TINY, width=64, context=128, samples=2)
GAP, NUM_KILLS = 12, 2


def silent(sentence):
    raise AssertionError(f"nobody was to be killed, but: {sentence}")


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup.num_workers))
def test_everybody_is_killed_before_somebody_is_killed_again(setup):
    injections = script(setup, 2 * setup.num_workers, GAP).injections
    victims = [one.target for one in injections if one.action is Action.KILL]
    assert set(victims[: setup.num_workers]) == set(setup.shape.workers())
    assert victims[setup.num_workers :] == victims[: setup.num_workers]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup.num_workers))
def test_every_gap_somebody_is_killed_and_comes_back_a_step_later(setup):
    injections = script(setup, 5, GAP).injections
    assert len(injections) == 10
    for number, (kill, rejoin) in enumerate(zip(injections[::2], injections[1::2], strict=True), 1):
        assert (kill.action, rejoin.action) == (Action.KILL, Action.REJOIN)
        assert kill.target == rejoin.target
        # Steps count from 1 where a person writes them, iterations from 0.
        assert (kill.iteration, rejoin.iteration) == (GAP * number - 1, GAP * number)


def test_those_who_are_killed_in_turn_are_not_of_one_stage():
    victims = [one.target for one in script(Setup("cpu-cores"), 12, GAP).injections[::2]]
    assert all(one.stage != next_one.stage for one, next_one in pairwise(victims))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder in which two of four workers were killed, and what was said meanwhile."""
    folder = tmp_path_factory.mktemp("measured")
    save_plans_for_deaths(folder)
    said = []
    measure_recoveries(folder, UNHURRIED, NUM_KILLS, GAP, said.append)
    return folder, said


@pytest.mark.timeout(280)
def test_every_death_is_kept_with_who_died_and_when(measured):
    deaths = [one for one in read_recoveries(measured[0]) if not one.joins]
    expected = [one for one in script(UNHURRIED, NUM_KILLS, GAP).injections if one.action is Action.KILL]
    assert [(one.worker, one.iteration) for one in deaths] == [(str(one.target), one.iteration) for one in expected]


@pytest.mark.timeout(280)
def test_whoever_comes_back_is_kept_too(measured):
    killed = [one.worker for one in read_recoveries(measured[0]) if not one.joins]
    assert [one.worker for one in read_recoveries(measured[0]) if one.joins] == killed


@pytest.mark.timeout(280)
def test_the_parts_of_a_recovery_are_the_time_that_it_took(measured):
    for one in read_recoveries(measured[0]):
        assert set(one.parts_us) == set(PARTS)
        assert sum(one.parts_us.values()) == pytest.approx(one.took_us, abs=10)
        assert one.took_us > 0


@pytest.mark.timeout(280)
def test_each_of_them_is_told_in_a_sentence_as_it_happens(measured):
    folder, said = measured
    whats = [f"{one.worker} {'is back' if one.joins else 'was killed'}: " for one in read_recoveries(folder)]
    assert len(said) == len(whats)
    assert all(sentence.startswith(what) for sentence, what in zip(said, whats, strict=True))


@pytest.mark.timeout(280)
def test_what_was_measured_is_not_measured_again(measured):
    folder, _ = measured
    before = (folder / "recoveries.json").read_bytes()
    measure_recoveries(folder, replace(TINY, width=32), 7, GAP, silent)
    assert (folder / "recoveries.json").read_bytes() == before


def test_nothing_is_known_of_a_folder_that_is_new(tmp_path):
    assert read_recoveries(tmp_path) == []


ROW = {"worker": "W0_0", "joins": False, "iteration": 3, "took_us": 5, "redone_ops": 0, "parts_us": {"detect": 5}}


@pytest.mark.parametrize(
    "text",
    ["", "[{", "7", '"W0_0"', "[1]", json.dumps([{key: value for key, value in ROW.items() if key != "joins"}]), "\x80"],
)
def test_a_file_that_is_broken_is_named_with_what_to_do(tmp_path, text):
    path = tmp_path / "recoveries.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FileProblem, match=f"^{path} is not a list of recoveries: [^\n]*; remove it to measure them again$"):
        read_recoveries(tmp_path)


def test_deaths_without_a_plan_say_which_one_is_missing(tmp_path):
    with pytest.raises(FileProblem, match="has no plan for none dead"):
        measure_recoveries(tmp_path, TINY, 1, GAP, silent)
