"""What is said comes back as it was said, and whatever else comes is a ProtocolError, never anything worse."""

import json
import math
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.control.decide.messages import (
    Ballot,
    ControlMessage,
    EpochStopped,
    ProgressReport,
    ProtocolError,
    StopEpoch,
    Welcome,
    dumps,
    loads,
)

texts = st.text(max_size=20)
numbers = st.integers(-(2**63), 2**63)
floats = st.floats(allow_nan=False)
ballots = st.builds(Ballot, numbers, st.lists(floats, max_size=4).map(tuple))
bodies = st.dictionaries(texts, st.none() | st.booleans() | numbers | texts | st.lists(numbers), max_size=3)
OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: texts,
    int: numbers,
    float: floats,
    Ballot | None: st.none() | ballots,
    ProgressReport | None: st.none() | st.builds(ProgressReport, numbers, st.none() | ballots, st.none() | ballots),
    dict[str, Any]: bodies,
    dict[str, int]: st.dictionaries(texts, numbers, max_size=3),
    dict[str, str]: st.dictionaries(texts, texts, max_size=3),
}


def any_of(kind: type[ControlMessage]) -> st.SearchStrategy[ControlMessage]:
    return st.builds(kind, **{each.name: OF_TYPE[each.type] for each in fields(kind)})


messages = st.sampled_from(get_args(ControlMessage)).flatmap(any_of)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)


@settings(deadline=None)
@given(messages)
def test_every_message_comes_back_as_it_was_said(message: ControlMessage) -> None:
    assert loads(dumps(message)) == message


def test_what_is_no_number_and_what_is_infinite_survives_the_way() -> None:
    own = Ballot(3, (math.nan, math.inf, -math.inf, -0.0))
    back = loads(dumps(EpochStopped(7, ProgressReport(4, own, None))))
    assert isinstance(back, EpochStopped)
    assert repr(back.standing) == repr(ProgressReport(4, own, None))


def test_a_whole_number_does_for_a_time() -> None:
    welcome = loads(dumps(Welcome("", 1, 2, "job")))
    assert isinstance(welcome, Welcome)
    assert isinstance(welcome.lease_s, float)


def test_what_a_later_release_says_besides_is_left_out() -> None:
    assert loads(b'{"type": "stop", "epoch": 3, "mood": "good"}') == StopEpoch(3)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        loads(body)


@settings(deadline=None)
@given(messages, st.data())
def test_a_field_is_of_the_type_that_its_name_promises_or_the_message_is_refused(
    message: ControlMessage, data: st.DataObject
) -> None:
    told = json.loads(dumps(message))
    changed = data.draw(st.sampled_from(fields(message)))
    told[changed.name] = data.draw(anything)
    with suppress(ProtocolError):
        back = getattr(loads(json.dumps(told).encode()), changed.name)
        promised = get_origin(changed.type) or changed.type
        assert isinstance(back, promised)
        assert not isinstance(back, bool)


HELLO: dict[str, Any] = {
    "type": "hello",
    "proof": "",
    "release": "",
    "job": "",
    "host": "",
    "pid": 1,
    "nonce": "",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"proof": 5},
        {"proof": None},
        {"pid": "1"},
        {"pid": True},
        {"pid": 1.5},
        {"seat": ["W0_0"]},
        {"epoch": None},
        {"type": "nonsense"},
        {"type": ["hello"]},
        {"type": "stopped", "epoch": 1, "standing": {"num_steps": 10**400, "own": {"iteration": 1}}},
        {"type": "stopped", "epoch": 1, "standing": {"num_steps": 1, "own": {"iteration": 1, "norms": [10**400]}}},
        {"type": "stopped", "epoch": 1, "standing": {"num_steps": math.inf, "own": None, "whole": None}},
        {"type": "stopped", "epoch": 1, "standing": [1, 2]},
        {"type": "go", "epoch": 1, "plan": "", "seats": {"W0_0": "7"}, "iteration": 0},
    ],
    ids=str,
)
def test_a_message_of_wrong_parts_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="this is no message"):
        loads(json.dumps(HELLO | changes).encode())


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"7", b"null", b"{}", b'{"type": "stop"}', b"[" * 100_000, b'{"type":"stop","epoch":' + b"9" * 5000 + b"}"],
    ids=lambda body: repr(body[:12]),
)
def test_json_that_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        loads(body)


def test_a_refusal_of_a_long_message_is_short() -> None:
    with pytest.raises(ProtocolError) as problem:
        loads(json.dumps(HELLO | {"pid": "x" * 100_000}).encode())
    assert len(str(problem.value)) < 200


def test_a_worker_holds_all_of_an_iteration_when_it_has_its_gradient() -> None:
    standing = ProgressReport(7)
    assert standing.num_reduced == 7
    assert replace(standing, own=Ballot(7, ())).num_reduced == 8
    assert replace(standing, num_steps=8, own=Ballot(7, ())).num_reduced == 8
