"""Frames and proofs: messages come out whole and in order however the bytes are cut, and a proof does not reveal the token."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle.control.decide.messages import ControlMessage, ProtocolError, RenewLease, Report, StopEpoch, StoreEntry
from recycle.control.net import wire
from recycle.control.net.wire import MOST_BYTES_UNPROVED, FrameReader, encode_frame, is_proof, new_nonce, new_token, proof

SENT: list[ControlMessage] = [RenewLease(1, 2), StoreEntry(3, "key", "ü" * 300), StopEpoch(4), Report(5, {"a": [1, None]})]


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


def test_a_proof_holds_for_one_token_one_role_and_one_nonce() -> None:
    token, nonce = new_token(), new_nonce()
    signed = proof(token, "worker", nonce)
    assert is_proof(signed, token, "worker", nonce)
    assert not is_proof(signed, new_token(), "worker", nonce)
    assert not is_proof(signed, token, "coordinator", nonce)
    assert not is_proof(signed, token, "worker", new_nonce())
    assert token not in signed


@settings(deadline=None)
@given(st.text(st.characters(), max_size=64))
def test_no_other_text_is_a_proof(text: str) -> None:
    assert not is_proof(text, "token", "worker", "nonce")


def test_a_lone_surrogate_is_no_proof_and_breaks_no_nonce() -> None:
    assert not is_proof("\ud800", "token", "worker", "nonce")
    assert is_proof(proof("token", "worker", "\ud800"), "token", "worker", "\ud800")


def test_tokens_and_nonces_are_never_the_same() -> None:
    assert len({new_token() for _ in range(100)} | {new_nonce() for _ in range(100)}) == 200
