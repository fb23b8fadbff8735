"""The failure script: injections, their text form, and the refusal of those that cannot happen in a run."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import UserError
from recycle.core.events.failure_script import (
    CHECKPOINT,
    FIRST,
    LAST,
    MIDDLE,
    NOTHING,
    RECOVERY,
    REDUCE,
    STEP,
    Action,
    Injection,
    Script,
)
from recycle.core.op import Kind, MicroBatch, Op

SHAPE, STEPS = Shape(3, 4, 6), 20
W1_2 = Worker(1, 2)
WORDS = [MIDDLE, FIRST, LAST, REDUCE, STEP, CHECKPOINT, RECOVERY]

numbers = st.integers(0, 9999)
lengths = st.floats(0.001, 86400)


@st.composite
def injections(draw: st.DrawFn) -> Injection:
    """Any injection that may be made."""
    action, iteration = draw(st.sampled_from(Action)), draw(numbers)
    if action is Action.KILL and draw(st.booleans()):
        return Injection(action, None, iteration, draw(st.sampled_from([MIDDLE, RECOVERY])))
    worker = Worker(draw(numbers), draw(numbers))
    op = Op(worker.stage, draw(st.sampled_from(Kind)), MicroBatch(draw(numbers), draw(numbers)))
    at = MIDDLE if action in (Action.REJOIN, Action.CORRUPT) else draw(st.sampled_from([*WORDS, str(op)]))
    if action is Action.SLOW and draw(st.booleans()):
        until = draw(st.just(-1) | st.integers(iteration, 9999))
        return Injection(action, worker, iteration, speed=draw(st.integers(10, 999)) / 1000, until=until)
    if action is Action.SLOW_LINK:
        until, other = draw(st.just(-1) | st.integers(iteration, 9999)), Worker(draw(numbers), worker.stage + 1)
        return Injection(action, worker, iteration, seconds=draw(st.floats(0.001, 1)), until=until, other=other)
    least = {Action.HANG: st.just(0.0) | lengths, Action.SLOW: lengths}
    return Injection(action, worker, iteration, at, draw(least.get(action, st.just(0.0))))


def kill(text):
    return Injection.parse(Action.KILL, text)


def script(*lines, dead=()):
    """A script from lines such as `kill W1_2@5`, possible in a run of 3 x 4 workers and 20 steps."""
    return Script.of(Script.from_json(list(lines)).injections, SHAPE, STEPS, map(Worker.parse, dead))


@given(injections())
def test_an_injection_is_read_back_as_it_was_written(injection):
    assert Injection.parse(injection.action, str(injection)) == injection


@given(st.lists(injections()))
def test_a_script_is_read_back_as_it_was_written(given_injections):
    made = Script(tuple(given_injections))
    assert Script.from_json(json.loads(json.dumps(made.to_json()))) == made


@given(injections(), st.text(max_size=20), st.integers(0, 30), st.integers(0, 30))
def test_a_text_with_a_slip_is_read_or_refused_but_never_more(injection, slip, start, end):
    text = str(injection)[:start] + slip + str(injection)[end:]
    again, sentence = None, ""
    try:
        again = Injection.parse(injection.action, text)
    except UserError as problem:
        sentence = str(problem)
    if again is None:
        assert sentence
        assert len(sentence.splitlines()) == 1
        assert len(sentence) < 450
    else:
        assert Injection.parse(again.action, str(again)) == again


@pytest.mark.parametrize(
    ("action", "text", "injection"),
    [
        ("kill", "W1_2@5", Injection(Action.KILL, W1_2, 4)),
        ("kill", "W1_2@1:first", Injection(Action.KILL, W1_2, 0, FIRST)),
        ("fail", "W1_2@5:last", Injection(Action.FAIL, W1_2, 4, LAST)),
        ("kill", "W1_2@5:2F0@1", Injection(Action.KILL, W1_2, 4, "2F0@1")),
        ("hang", "W0_1@8:reduce+3s", Injection(Action.HANG, Worker(0, 1), 7, REDUCE, 3.0)),
        ("slow", "W0_1@8:step+0.25s", Injection(Action.SLOW, Worker(0, 1), 7, STEP, 0.25)),
        ("hang", "W0_1@8:checkpoint", Injection(Action.HANG, Worker(0, 1), 7, CHECKPOINT)),
        ("kill", "coordinator@6", Injection(Action.KILL, None, 5)),
        ("kill", "coordinator@6:recovery", Injection(Action.KILL, None, 5, RECOVERY)),
        ("rejoin", "W1_2@12", Injection(Action.REJOIN, W1_2, 11)),
        ("slow", "W1_2@5:x0.6", Injection(Action.SLOW, W1_2, 4, speed=0.6)),
        ("slow", "W1_2@5-20:x0.25", Injection(Action.SLOW, W1_2, 4, speed=0.25, until=19)),
        ("slow-link", "W1_1-W1_2@5+0.02s", Injection(Action.SLOW_LINK, Worker(1, 1), 4, seconds=0.02, other=W1_2)),
        ("slow-link", "W1_2-W0_1@5-20+1s", Injection(Action.SLOW_LINK, W1_2, 4, seconds=1.0, until=19, other=Worker(0, 1))),
    ],
)
def test_steps_count_from_one_in_the_text_and_from_zero_in_the_data(action, text, injection):
    assert Injection.parse(Action(action), text) == injection
    assert str(injection) == text
    assert injection.iteration == injection.step - 1


def test_an_op_is_kept_as_it_prints_itself_however_it_was_written():
    assert kill("W1_2@5:2F0") == kill("W1_2@5:02F00@1") == Injection(Action.KILL, W1_2, 4, "2F0") == kill("W1_2@5:2F0@1")
    assert kill("W1_2@5:2W3@0").op == Op(2, Kind.W, MicroBatch(0, 3))
    assert kill("W1_2@5:reduce").op is None


def test_a_time_may_have_another_unit_and_spaces_around_a_place_do_not_matter():
    assert Injection.parse(Action.SLOW, " W0_1@8:first+500ms ") == Injection(Action.SLOW, Worker(0, 1), 7, FIRST, 0.5)
    assert str(Injection.parse(Action.HANG, "W0_1@8+2m")) == "W0_1@8+120s"


def test_a_slow_worker_is_so_from_its_first_step_to_its_last_one():
    slow = Injection.parse(Action.SLOW, "W1_2@5-7:x0.6")
    assert [iteration for iteration in range(12) if slow.is_slow_in(iteration)] == [4, 5, 6]
    for_ever = Injection.parse(Action.SLOW, "W1_2@5:x0.6")
    assert [iteration for iteration in range(12) if for_ever.is_slow_in(iteration)] == list(range(4, 12))


def test_both_ends_of_a_slow_link_know_of_it_and_nobody_dies_of_it():
    made = script("slow-link W1_1-W1_2@5-7+20ms", "kill W0_0@3")
    (link,) = made.for_worker(W1_2)
    assert made.for_worker(Worker(1, 1)) == (link,)
    assert made.for_worker(Worker(0, 1)) == ()
    assert [iteration for iteration in range(12) if link.is_slow_in(iteration)] == [4, 5, 6]
    assert made.targets() == {Worker(0, 0)}
    assert Script.from_json(made.to_json()) == made


def test_a_worker_that_comes_back_to_a_slow_place_is_slow_again():
    made = script("slow W1_2@3:x0.6", "slow W1_2@2-4:x0.3", "kill W1_2@5", "rejoin W1_2@9")
    assert [str(one) for one in made.for_worker(W1_2, since=8)] == ["W1_2@3:x0.6"]


def test_who_is_killed_fails_or_hangs_for_ever_is_gone_and_who_wakes_up_or_is_slow_may_not_be():
    ends = {line: script(line).injections[0].is_end for line in ("kill W1_2@5", "fail W1_2@5", "hang W1_2@5", "hang W1_2@5+3s")}
    assert ends == {"kill W1_2@5": True, "fail W1_2@5": True, "hang W1_2@5": True, "hang W1_2@5+3s": False}
    assert not script("slow W1_2@5+3s").injections[0].is_end


NO_INJECTION = {
    "nothing": ("kill", "", r"^kill '' names no place in a run: write WORKER@STEP, .* such as W1_2@5,"),
    "no step": ("kill", "W1_2", r"^kill 'W1_2' names no place in a run"),
    "a step that is no number": ("kill", "W1_2@five", r"names no place in a run"),
    "a negative step": ("kill", "W1_2@-5", r"names no place in a run"),
    "no place after the colon": ("kill", "W1_2@5:", r"names no place in a run"),
    "no time after the plus": ("hang", "W1_2@5+", r"names no place in a run"),
    "two lines": ("kill", "W1_2@0:fi\rrst", r"^kill 'W1_2@0:fi\\rrst' names no place in a run"),
    "a very long text": ("kill", "W1_2@" + "9" * 5000, r"^kill 'W1_2@9+\.\.\.9+' names no place in a run"),
    "step 0": ("kill", "W1_2@0", r"^kill W1_2@0 is in step 0, but steps count from 1"),
    "no worker": (
        "kill",
        "W12@5",
        r"^kill 'W12' is aimed at no worker: write W<pipeline>_<stage>, such as W1_2, or coordinator$",
    ),
    "a misspelt word": (
        "kill",
        "W1_2@5:redcue",
        r"^kill W1_2@5 names the place 'redcue': write one of first, last, .*, recovery, transfer, or an op such as 2F0@1$",
    ),
    "an op of another stage": (
        "kill",
        "W1_2@5:3F0@1",
        r"^kill W1_2@5:3F0@1 names an op of stage 3, but W1_2 runs .* stage 2 only",
    ),
    "a time that is none": ("hang", "W1_2@5+soon", r"'soon' is not a duration"),
    "no time at all": ("hang", "W1_2@5+0s", r"^hang W1_2@5\+0s lasts no time at all: give at least 0.001 s, or leave \+0s out"),
    "a time too short": ("hang", "W1_2@5+0.1ms", r"lasts 0.0001 s: give a time from 0.001 s to 86400 s"),
    "a time too long": ("hang", "W1_2@5+2d", r"lasts 172800 s: give a time from"),
    "a kill with a time": ("kill", "W1_2@5+3s", r"^kill W1_2@5\+3s gives a time, but only hang and slow have one: leave it out"),
    "an exit with a time": ("fail", "W1_2@5+3s", r"^fail W1_2@5\+3s gives a time"),
    "a re-join with a time": ("rejoin", "W1_2@5+3s", r"^rejoin W1_2@5\+3s gives a time"),
    "slow by nothing": ("slow", "W1_2@5:first", r"^slow W1_2@5:first does not say by how much: add a time or a speed, such as"),
    "a speed for a kill": ("kill", "W1_2@5:x0.6", r"^kill W1_2@5:x0.6 mixes two forms: only slow has a speed"),
    "a speed and a time": ("slow", "W1_2@5:x0.6+3s", r"mixes two forms: .*: write slow W1_2@5:x0.6$"),
    "a last step without a speed": ("slow", "W1_2@5-8+3s", r"mixes two forms"),
    "no speed at all": ("slow", "W1_2@5:x0", r"stops the worker: write hang, or a speed from 0.01 on"),
    "a speed too low": ("slow", "W1_2@5:x0.001", r"has the speed 0.001: give one from 0.01 to below 1"),
    "a speed above 1": ("slow", "W1_2@5:x1.5", r"has the speed 1.5: give one from 0.01 to below 1"),
    "a last step before the first": ("slow", "W1_2@5-4:x0.6", r"ends before it begins"),
    "a slow coordinator": ("slow", "coordinator@5:x0.6", r"the coordinator can only be killed"),
    "a link of one worker": ("slow-link", "W1_2@5+20ms", r"names no link: .*: write slow-link W1_1-W1_2@5\+20ms$"),
    "a link of peers": ("slow-link", "W1_2-W0_2@5+20ms", r"between two workers of neighbouring stages"),
    "a link to the coordinator": ("slow-link", "W1_2-coordinator@5+20ms", r"names no link"),
    "a link of nobody": ("slow-link", "W1_1-here@5+20ms", r"'here' is aimed at no worker"),
    "a link slow by nothing": ("slow-link", "W1_1-W1_2@5", r"does not say by how much longer messages take"),
    "a link with a speed": ("slow-link", "W1_1-W1_2@5:x0.6", r"give a time and nothing else"),
    "a link at an op": ("slow-link", "W1_1-W1_2@5:reduce+20ms", r"give a time and nothing else"),
    "a link too slow": ("slow-link", "W1_1-W1_2@5+3s", r"lets messages take 3 s longer: give a time from 0.001 s to 1 s"),
    "a link that ends before it begins": ("slow-link", "W1_1-W1_2@5-4+20ms", r"ends before it begins"),
    "two workers without a link": ("slow", "W1_1-W1_2@5+20ms", r"is aimed at no worker"),
    "a re-join inside a step": ("rejoin", "W1_2@5:reduce", r"a worker comes back before one begins: leave reduce out"),
    "a coordinator that hangs": (
        "hang",
        "coordinator@5",
        r"^hang coordinator@5 is not possible: the coordinator can only be killed",
    ),
    "a coordinator that re-joins": ("rejoin", "coordinator@5", r"^rejoin coordinator@5 is not possible"),
    "an op of the coordinator": (
        "kill",
        "coordinator@5:2F0@1",
        r"a worker's row, which the coordinator has not: write coordinator@5",
    ),
}


@pytest.mark.parametrize(("action", "text", "sentence"), NO_INJECTION.values(), ids=NO_INJECTION.keys())
def test_a_text_that_is_no_injection_is_explained(action, text, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        Injection.parse(Action(action), text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seconds", [-1.0, 1e-5, 1e9, float("inf"), float("nan")])
def test_a_length_that_no_text_could_say_is_refused(seconds):
    with pytest.raises(UserError, match=r"give a time from 0.001 s to 86400 s"):
        Injection(Action.HANG, W1_2, 4, seconds=seconds)


def test_a_place_with_more_digits_than_python_reads_is_refused():
    with pytest.raises(UserError, match=r"names the place '9+\.\.\..*': write one of first"):
        Injection(Action.KILL, W1_2, 4, "9" * 5000 + "F0@1")


@pytest.mark.parametrize("data", [None, {}, "kill W1_2@5", 3])
def test_a_script_is_a_list(data):
    with pytest.raises(UserError, match="a failure script is a list of lines such as 'kill W1_2@5', not "):
        Script.from_json(data)


@pytest.mark.parametrize("line", ["", "W1_2@5", "murder W1_2@5", None, 5, ["kill", "W1_2@5"]])
def test_a_line_begins_with_an_action(line):
    with pytest.raises(
        UserError,
        match=r"is no line of a failure script: write one of kill, hang, slow, slow-link, fail, corrupt, rejoin, and where",
    ):
        Script.from_json([line])


def test_everybody_is_told_only_what_concerns_them():
    made = script("rejoin W1_2@12", "hang W0_1@8+3s", "kill W1_2@5", "kill coordinator@6", "slow W1_2@13:first+1s")
    assert list(map(str, made.for_worker(W1_2))) == ["W1_2@5", "W1_2@13:first+1s"]
    assert list(map(str, made.for_worker(Worker(0, 1)))) == ["W0_1@8+3s"]
    assert made.for_worker(Worker(0, 0)) == ()
    assert list(map(str, made.for_worker(W1_2, since=11))) == ["W1_2@13:first+1s"]
    assert list(map(str, made.for_coordinator())) == ["coordinator@6"]
    assert list(map(str, made.rejoins())) == ["W1_2@12"]


def test_a_script_tells_its_injections_by_step():
    made = script("rejoin W1_2@12", "kill W1_2@5", "kill coordinator@6", "kill W0_0@5")
    assert made.to_json() == ["kill W1_2@5", "kill W0_0@5", "kill coordinator@6", "rejoin W1_2@12"]


def test_no_injection_is_a_script():
    assert script() == NOTHING
    assert (NOTHING.for_worker(W1_2), NOTHING.rejoins(), NOTHING.to_json()) == ((), (), [])


POSSIBLE = {
    "kill, re-join, kill again": ("kill W1_2@5", "rejoin W1_2@6", "kill W1_2@7:reduce", "rejoin W1_2@20"),
    "all workers of a stage": ("kill W0_2@5", "kill W1_2@5", "kill W2_2@5"),
    "a worker that comes back and dies in one step": ("kill W1_2@5", "rejoin W1_2@6", "kill W1_2@6:first"),
    "a worker that stumbles and then dies": ("kill W1_2@5:last", "slow W1_2@5:first+1s", "hang W1_2@4+1s"),
    "a fenced worker that comes back": ("hang W1_2@5", "rejoin W1_2@9"),
    "a worker that may have been fenced": ("hang W1_2@5+3s", "rejoin W1_2@9", "slow W1_2@10+3s", "rejoin W1_2@12"),
    "one that may have been fenced, killed": ("hang W1_2@5+3s", "kill W1_2@9", "rejoin W1_2@12"),
    "a second kill in the recovery": ("kill W1_2@5", "kill W0_1@5:recovery", "kill W2_2@5:recovery"),
    "the coordinator twice, once in a recovery": ("kill coordinator@4", "hang W1_2@5", "kill coordinator@5:recovery"),
    "a kill while a peer copies the state": ("kill W1_2@5", "rejoin W1_2@7", "kill W0_2@7:transfer", "hang W1_2@8:transfer"),
    "the last op of the last step": ("kill W2_3@20:3W5@2",),
}


@pytest.mark.parametrize("lines", POSSIBLE.values(), ids=POSSIBLE.keys())
def test_a_script_may_hold_whatever_can_happen(lines):
    assert sorted(script(*lines).to_json()) == sorted(lines)


def test_a_worker_that_is_dead_from_the_start_may_come_back_and_die():
    made = script("rejoin W1_2@3", "kill W1_2@3", dead=["W1_2"])
    assert made.rejoins() == (Injection(Action.REJOIN, W1_2, 2),)


IMPOSSIBLE = {
    "an unknown pipeline": (["kill W3_2@5"], r"W3_2, which is not a worker of this cluster: pipelines are 0 to 2, stages 0 to 3"),
    "an unknown stage": (["rejoin W0_4@5"], r"^rejoin W0_4@5 is aimed at W0_4, which is not a worker of this cluster"),
    "a step after the end": (["kill W1_2@21"], r"^kill W1_2@21 is in step 21, but the run ends with step 20"),
    "a coordinator after the end": (["kill coordinator@21"], r"the run ends with step 20"),
    "an unknown micro-batch": (
        ["kill W1_2@5:2F6@1"],
        r"an op of no micro-batch of this run: they are 0 to 5 of the pipelines 0 to 2",
    ),
    "an unknown home": (["kill W1_2@5:2F0@3"], r"^kill W1_2@5:2F0@3 names an op of no micro-batch of this run"),
    "a worker that dies twice": (
        ["kill W1_2@8", "kill W1_2@5"],
        r"^kill W1_2@8 is not possible, because W1_2 is gone since kill W1_2@5: let it rejoin by step 8$",
    ),
    "a worker that dies twice in a step": (["kill W1_2@5:first", "fail W1_2@5:last"], r"W1_2 is gone since kill W1_2@5:first"),
    "a worker that dies fenced": (["hang W1_2@5", "kill W1_2@6"], r"^kill W1_2@6 .* because W1_2 is gone since hang W1_2@5"),
    "a dead worker that is slow": (["kill W1_2@5", "slow W1_2@6+1s"], r"^slow W1_2@6\+1s .* W1_2 is gone since"),
    "a worker that comes back too late": (["kill W1_2@5", "kill W1_2@6", "rejoin W1_2@7"], r"let it rejoin by step 6$"),
    "a worker that comes back and never left": (["rejoin W1_2@7"], r"^rejoin W1_2@7 .* W1_2 is there already: let it fail in an"),
    "a worker that comes back in the step it dies in": (["kill W1_2@7", "rejoin W1_2@7"], r"^rejoin W1_2@7 .* is there already"),
    "a worker that comes back twice": (["kill W1_2@5", "rejoin W1_2@7", "rejoin W1_2@8"], r"^rejoin W1_2@8 .* is there already"),
    "an injection given twice": (["slow W1_2@5+1s", "slow W1_2@5+1s"], r"^slow W1_2@5\+1s is given twice: give it once"),
    "a coordinator killed twice at once": (["kill coordinator@5", "kill coordinator@5"], r"is given twice"),
    "a recovery from nothing": (["kill W1_2@5:recovery"], r"waits for a recovery, but nobody else fails in step 5: add a kill,"),
    "a recovery from itself": (["slow W1_2@5+1s", "kill W1_2@5:recovery"], r"nobody else fails in step 5"),
    "a recovery from another step": (["kill W0_2@4", "kill W1_2@5:recovery"], r"nobody else fails in step 5"),
    "a recovery from the coordinator": (["kill coordinator@5", "kill W1_2@5:recovery"], r"nobody else fails in step 5"),
    "a copy for nobody": (
        ["kill W1_2@5:transfer"],
        r"waits for a copy of a stage's state, but nobody rejoins by step 5: add a rejoin$",
    ),
    "a copy too early": (["kill W1_2@5", "rejoin W1_2@7", "kill W0_2@6:transfer"], r"nobody rejoins by step 6"),
    "a copy of another stage": (["kill W1_2@5", "rejoin W1_2@7", "kill W0_1@8:transfer"], r"nobody rejoins by step 8"),
    "a recovery from a recovery": (["kill W0_2@5:recovery", "kill W1_2@5:recovery"], r"nobody else fails in step 5"),
}


@pytest.mark.parametrize(("lines", "sentence"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_script_that_cannot_happen_is_refused(lines, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        script(*lines)
    assert "\n" not in str(caught.value)


def test_a_worker_that_is_dead_from_the_start_cannot_die():
    with pytest.raises(
        UserError, match=r"^kill W1_2@5 is not possible, because W1_2 is gone from the start: let it rejoin by step 5"
    ):
        script("kill W1_2@5", "rejoin W1_2@6", dead=["W1_2"])


def test_a_worker_of_no_cluster_is_refused_even_if_no_text_can_name_it():
    with pytest.raises(UserError, match="W-1_0, which is not a worker of this cluster"):
        Script.of([Injection(Action.KILL, Worker(-1, 0), 0)], SHAPE, STEPS)
