"""Frames and tags: messages come out whole and in order however the bytes are cut; a wrong tag is found at once."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.control.decide.messages import ControlMessage, ProtocolError, RenewLease, Report, StopEpoch, StoreEntry
from recycle.control.net import wire
from recycle.control.net.wire import (
    COORDINATOR,
    MOST_BYTES_UNPROVED,
    WORKER,
    FrameReader,
    Seal,
    WrongTag,
    encode,
    make_frame,
    new_nonce,
    new_token,
)

SENT: list[ControlMessage] = [RenewLease(1, 2), StoreEntry(3, "key", "ü" * 300), StopEpoch(4), Report(5, {"a": [1, None]})]


def encode_frame(message: ControlMessage) -> bytes:
    """A frame without a tag."""
    return b"".join(make_frame(encode(message), None))


@settings(deadline=None)
@given(st.lists(st.integers(1, 200)))
def test_messages_come_out_whole_and_in_order_however_the_bytes_are_cut(sizes: list[int]) -> None:
    inbox, stream, got = FrameReader(1 << 16), b"".join(map(encode_frame, SENT)), []
    for size in [*sizes, len(stream)]:
        got += inbox.take(stream[:size])
        stream = stream[size:]
    assert got == SENT


def test_a_message_that_is_too_long_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ProtocolError, match="a message of 4097 bytes, where 4096 are the most"):
        list(FrameReader(MOST_BYTES_UNPROVED).take(struct.pack(">I", MOST_BYTES_UNPROVED + 1)))


def test_a_message_of_the_longest_kind_is_read() -> None:
    longest = encode_frame(StoreEntry(1, "", ""))
    assert list(FrameReader(len(longest) - 4).take(longest)) == [StoreEntry(1, "", "")]


def test_the_limit_of_a_reader_can_be_raised_between_two_messages() -> None:
    inbox = FrameReader(100)
    stream = inbox.take(encode_frame(StopEpoch(1)) + encode_frame(StoreEntry(1, "key", "x" * 1000)))
    assert next(stream) == StopEpoch(1)
    inbox.most_bytes = 10_000
    assert next(stream) == StoreEntry(1, "key", "x" * 1000)


def test_a_message_that_is_too_long_to_be_read_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_BYTES", 100)
    with pytest.raises(AssertionError, match="nobody would read"):
        encode_frame(StoreEntry(1, "key", "x" * 100))


def test_messages_before_garbage_are_read() -> None:
    stream = FrameReader(1000).take(encode_frame(StopEpoch(1)) + struct.pack(">I", 2) + b"{]")
    assert next(stream) == StopEpoch(1)
    with pytest.raises(ProtocolError):
        next(stream)


SEALED = ("token", WORKER, "nonce")


def sealed(messages: list[ControlMessage]) -> list[bytes]:
    """The frames of a direction."""
    seal = Seal(*SEALED)
    return [b"".join(make_frame(encode(message), seal)) for message in messages]


def test_frames_with_their_tags_are_read_in_their_order() -> None:
    assert list(FrameReader(1 << 20, Seal(*SEALED)).take(b"".join(sealed(SENT)))) == SENT


@settings(deadline=None)
@given(st.permutations(range(len(SENT))))
def test_frames_in_another_order_are_read_up_to_the_first_that_is_not_at_its_place(order: list[int]) -> None:
    frames, reader, got = sealed(SENT), FrameReader(1 << 20, Seal(*SEALED)), []
    in_place = [place for place, number in enumerate(order) if place != number]
    try:
        for number in order:
            got += reader.take(frames[number])
    except WrongTag:
        assert in_place
    assert got == SENT[: min(in_place, default=len(SENT))]


@settings(deadline=None)
@given(st.data())
def test_a_frame_with_one_other_bit_is_not_read(data: st.DataObject) -> None:
    frame = bytearray(sealed(SENT)[0])
    place = data.draw(st.integers(4, len(frame) - 1))  # one of another length is cut elsewhere
    frame[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WrongTag):
        FrameReader(1 << 20, Seal(*SEALED)).take_one(bytes(frame))


@pytest.mark.parametrize(
    "seal",
    [("other", WORKER, "nonce"), ("token", COORDINATOR, "nonce"), ("token", WORKER, "ecnon"), ("token", WORKER, "non", "ce")],
)
def test_a_tag_holds_for_one_token_one_role_and_its_nonces(seal: tuple[str, ...]) -> None:
    with pytest.raises(WrongTag):
        FrameReader(1 << 20, Seal(*seal)).take_one(sealed(SENT)[0])


def test_a_lone_surrogate_breaks_no_seal() -> None:
    assert len(Seal("token", WORKER, "\ud800").next_tag(b"")) == 16


def test_a_long_message_is_not_copied_for_each_connection() -> None:
    message = encode(StoreEntry(1, "", "x" * 100_000))
    assert make_frame(message, Seal(*SEALED))[1] is message.body


def test_tokens_and_nonces_are_never_the_same() -> None:
    assert len({new_token() for _ in range(100)} | {new_nonce() for _ in range(100)}) == 200
