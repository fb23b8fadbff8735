"""The failure flags of `recycle train`: what they say, and what is refused."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.cli.training.failure_flags import add_failure_arguments, read_failures
from recycle.core.cluster import Shape, Worker
from recycle.core.errors import FileProblem, UserError
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.core.events.trace import Trace

SHAPE = Shape(2, 2, 4)
EVERYBODY = "0,add,W0_0\n0,add,W0_1\n0,add,W1_0\n0,add,W1_1\n"
LATER = "500,remove,W1_1\n900,add,W1_1\n# end 2000\n"


def parser():
    made = argparse.ArgumentParser(prog="recycle train")
    add_failure_arguments(made)
    return made


def read(*words, dead=()):
    return read_failures(parser().parse_args(words), SHAPE, 20, map(Worker.parse, dead))


def trace_file(folder, text):
    path = folder / "trace.csv"
    path.write_text(text)
    return str(path)


def test_without_a_flag_nothing_fails():
    assert read() == (Script(), None)


def test_every_action_has_its_flag():
    words = [
        "--kill",
        "W0_0@5:0F1",
        "--hang",
        "W0_1@8+3s",
        "--slow",
        "W1_0@2:reduce+500ms",
        "--slow-link",
        "W1_0-W1_1@2-9+20ms",
        "--fail",
        "W1_1@3",
        "--corrupt",
        "W1_0@6",
        "--rejoin",
        "W0_0@12",
    ]
    script, trace = read(*words)
    assert trace is None
    assert script.to_json() == [
        "slow W1_0@2:reduce+0.5s",
        "slow-link W1_0-W1_1@2-9+0.02s",
        "fail W1_1@3",
        "kill W0_0@5:0F1@0",
        "corrupt W1_0@6",
        "hang W0_1@8+3s",
        "rejoin W0_0@12",
    ]


def test_places_are_separated_by_commas_and_flags_are_repeated():
    together = read("--kill", "W0_0@5, W0_1@6 ,,coordinator@7,")
    assert together == read("--kill", "W0_0@5", "--kill", "W0_1@6,coordinator@7")
    assert together[0].to_json() == ["kill W0_0@5", "kill W0_1@6", "kill coordinator@7"]


def test_the_flags_of_one_run_say_nothing_in_the_next():
    flags = parser()
    assert flags.parse_args(["--kill", "W0_0@5"]).kill == ["W0_0@5"]
    assert flags.parse_args([]).kill == []


killed = st.lists(
    st.builds(Injection, st.just(Action.KILL), st.sampled_from(list(SHAPE.workers())), st.integers(0, 19)),
    unique_by=lambda one: one.target,
    min_size=1,
)


@given(killed, st.randoms(use_true_random=False))
def test_however_places_are_spread_over_flags_the_script_is_the_same(kills, random):
    words = ["--kill"]
    for one in kills:
        if words[-1] == "--kill":
            words.append(str(one))
        elif random.random() < 0.5:
            words[-1] += f",{one}"
        else:
            words += ["--kill", str(one)]
    assert read(*words)[0] == Script.of(kills, SHAPE, 20)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--kill", "W0_0"], r"^kill 'W0_0' names no place in a run: write WORKER@STEP"),
        (["--hang", "W0_0@5,W9_9@5"], r"^hang W9_9@5 is aimed at W9_9, which is not a worker of this cluster"),
        (["--slow-link", "W0_0-W9_1@5+20ms"], r"is aimed at W9_1, which is not a worker of this cluster"),
        (["--fail", "W0_0@21"], r"^fail W0_0@21 is in step 21, but the run ends with step 20"),
        (["--kill", "W0_0@5:0F4@1"], r"names an op of no micro-batch of this run: they are 0 to 3"),
        (["--kill", "W0_0@5", "--fail", "W0_0@9"], r"^fail W0_0@9 is not possible, because W0_0 is gone since kill W0_0@5"),
        (["--rejoin", "W0_0@5"], r"^rejoin W0_0@5 is not possible, because W0_0 is there already"),
    ],
)
def test_what_cannot_happen_is_refused_in_one_sentence(words, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        read(*words)
    assert "\n" not in str(caught.value)


def test_a_worker_that_is_dead_from_the_start_can_only_rejoin():
    assert read("--rejoin", "W0_0@5", dead=["W0_0"])[0].to_json() == ["rejoin W0_0@5"]
    with pytest.raises(UserError, match=r"^kill W0_0@5 is not possible, because W0_0 is gone from the start"):
        read("--kill", "W0_0@5", dead=["W0_0"])


def test_a_trace_is_read_from_its_file(tmp_path):
    script, trace = read("--trace", trace_file(tmp_path, EVERYBODY + LATER))
    assert script == Script()
    assert trace == Trace.parse(EVERYBODY + LATER)


@pytest.mark.parametrize(
    "flag",
    [
        "--kill W0_0@5",
        "--hang W0_0@5",
        "--slow W0_0@5+1s",
        "--slow-link W0_0-W0_1@5+1s",
        "--fail W0_0@5",
        "--corrupt W0_0@5",
        "--rejoin W0_0@5",
    ],
)
def test_a_trace_and_a_script_do_not_mix(flag, tmp_path):
    with pytest.raises(UserError, match=rf"^--trace and {flag.split()[0]} both say who fails when: give one of them$"):
        read("--trace", trace_file(tmp_path, EVERYBODY + LATER), *flag.split())


@pytest.mark.parametrize("node", ["node-7", "W2_0", "W0_2", "W00_0", "w0_0"])
def test_a_trace_of_other_nodes_is_refused(node, tmp_path):
    path = trace_file(tmp_path, f"{EVERYBODY}500,add,{node}\n")
    with pytest.raises(
        UserError, match=rf"has a node '{node}', which is not a worker of this cluster: name its nodes W0_0 to W1_1$"
    ):
        read("--trace", path)


def test_a_trace_begins_with_the_workers_of_the_run(tmp_path):
    without = trace_file(tmp_path, EVERYBODY.replace("0,add,W1_1\n", "") + "900,add,W1_1\n")
    with pytest.raises(UserError, match=r"begins without W1_1, but the run with it: let both begin alike, by --dead or by lines"):
        read("--trace", without)
    trace = read("--trace", without, dead=["W1_1"])[1]
    assert trace is not None
    assert trace.initial == ("W0_0", "W0_1", "W1_0")


def test_a_trace_does_not_begin_with_a_worker_that_is_dead_from_the_start(tmp_path):
    with pytest.raises(UserError, match=r"begins with W1_1, but the run without it: let both begin alike"):
        read("--trace", trace_file(tmp_path, EVERYBODY + LATER), dead=["W1_1"])


def test_a_file_that_is_no_trace_is_explained(tmp_path):
    with pytest.raises(FileProblem, match=r"trace.csv is not a usable trace: line 1 is 'W1_2@5'"):
        read("--trace", trace_file(tmp_path, "W1_2@5\n"))
    with pytest.raises(FileProblem, match=r"^cannot read .*nowhere: No such file"):
        read("--trace", str(tmp_path / "nowhere"))


def test_the_help_names_every_flag_in_a_group_of_its_own():
    text = parser().format_help().partition("failures while it runs:")[2]
    assert all(f"--{action} " in text for action in Action)
    assert "--trace FILE" in text


def test_slow_nodes_of_a_trace_are_refused_with_the_flag_that_slows_a_worker(tmp_path):
    path = trace_file(tmp_path, EVERYBODY + "400,slow,W1_1,0.6,900\n# end 2000\n")
    with pytest.raises(UserError, match=r"has slow nodes, .* with --slow, such as W1_2@5-20:x0\.6$"):
        read("--trace", path)


def test_nodes_of_a_trace_that_hang_are_refused_with_the_flag_that_stops_a_worker(tmp_path):
    path = trace_file(tmp_path, EVERYBODY + "400,hang,W1_1\n# end 2000\n")
    with pytest.raises(UserError, match=r"has nodes that hang, .* with --hang, such as W0_1@8$"):
        read("--trace", path)
