"""Every message survives its JSON form, and all other bytes are a ProtocolError."""

import json
import math
from contextlib import suppress
from dataclasses import fields, replace
from types import UnionType
from typing import Any, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.control.decide.messages import (
    Ballot,
    ControlMessage,
    EpochStopped,
    LayerTransfer,
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
    bool: st.booleans(),
    Ballot | None: st.none() | ballots,
    ProgressReport | None: st.none() | st.builds(ProgressReport, numbers, st.none() | ballots, st.none() | ballots),
    dict[str, Any]: bodies,
    dict[str, int]: st.dictionaries(texts, numbers, max_size=3),
    tuple[str, ...]: st.lists(texts, max_size=4).map(tuple),
    tuple[int, ...]: st.lists(numbers, max_size=4).map(tuple),
    tuple[LayerTransfer, ...]: st.lists(st.builds(LayerTransfer, texts, texts, numbers, numbers), max_size=2).map(tuple),
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
def test_every_message_survives_the_wire(message: ControlMessage) -> None:
    assert loads(dumps(message)) == message


def test_nan_and_infinity_survive_the_wire() -> None:
    own = Ballot(3, (math.nan, math.inf, -math.inf, -0.0))
    back = loads(dumps(EpochStopped(7, ProgressReport(4, own, None))))
    assert isinstance(back, EpochStopped)
    assert repr(back.progress) == repr(ProgressReport(4, own, None))


def test_a_whole_number_does_for_a_time() -> None:
    welcome = loads(dumps(Welcome(1, 2, "job")))
    assert isinstance(welcome, Welcome)
    assert isinstance(welcome.lease_s, float)


def test_unknown_fields_are_ignored() -> None:
    assert loads(b'{"type": "stop_epoch", "epoch": 3, "mood": "good"}') == StopEpoch(3)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        loads(body)


@settings(deadline=None)
@given(messages.filter(fields), st.data())
def test_a_field_has_its_declared_type_or_the_message_is_refused(message: ControlMessage, data: st.DataObject) -> None:
    values = json.loads(dumps(message))
    changed = data.draw(st.sampled_from(fields(message)))
    values[changed.name] = data.draw(anything)
    with suppress(ProtocolError):
        back = getattr(loads(json.dumps(values).encode()), changed.name)
        declared = changed.type if isinstance(changed.type, UnionType) else get_origin(changed.type) or changed.type
        assert isinstance(back, declared)
        assert not isinstance(back, bool)


HELLO: dict[str, Any] = {
    "type": "hello",
    "release": "",
    "job": "",
    "host": "",
    "pid": 1,
    "nonce": "",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"nonce": 5},
        {"nonce": None},
        {"pid": "1"},
        {"pid": True},
        {"pid": 1.5},
        {"preferred_place": ["W0_0"]},
        {"epoch": None},
        {"type": "nonsense"},
        {"type": ["hello"]},
        {"type": "epoch_stopped", "epoch": 1, "progress": {"num_steps": 10**400, "own": {"iteration": 1}}},
        {"type": "epoch_stopped", "epoch": 1, "progress": {"num_steps": 1, "own": {"iteration": 1, "norms": [10**400]}}},
        {"type": "epoch_stopped", "epoch": 1, "progress": {"num_steps": math.inf, "own": None, "whole": None}},
        {"type": "epoch_stopped", "epoch": 1, "progress": [1, 2]},
        {"type": "start_epoch", "epoch": 1, "plan": "", "places": {"W0_0": "7"}, "iteration": 0},
    ],
    ids=str,
)
def test_a_message_with_a_wrong_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="this is no message"):
        loads(json.dumps(HELLO | changes).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"7",
        b"null",
        b"{}",
        b'{"type": "stop_epoch"}',
        b"[" * 100_000,
        b'{"type":"stop_epoch","epoch":' + b"9" * 5000 + b"}",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_json_that_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        loads(body)


def test_a_refusal_of_a_long_message_is_short() -> None:
    with pytest.raises(ProtocolError) as problem:
        loads(json.dumps(HELLO | {"pid": "x" * 100_000}).encode())
    assert len(str(problem.value)) < 200


def test_an_iteration_is_reduced_when_its_gradient_is_held() -> None:
    progress = ProgressReport(7)
    assert progress.num_reduced == 7
    assert replace(progress, own=Ballot(7, ())).num_reduced == 8
    assert replace(progress, num_steps=8, own=Ballot(7, ())).num_reduced == 8


def test_messages_are_named_by_their_class_on_the_wire() -> None:
    assert json.loads(dumps(StopEpoch(3))) == {"type": "stop_epoch", "epoch": 3}
