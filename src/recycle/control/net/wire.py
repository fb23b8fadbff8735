"""Frames on a control connection: four bytes of length, a message as JSON, and a tag that proves who sent it.

Every frame but the first one, a challenge, has a tag. It is made with a key that only processes with the job's token can derive,
and from the number of the frame, so that a frame that somebody else made, changed, repeated, left out or moved is found at once.
Each direction of each connection has a key of its own, derived from random nonces of both sides; only that of the hello, which
brings the nonce of the worker, is derived from the coordinator's alone.
"""

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recycle.control.decide.messages import ALIVE, ControlMessage, ProtocolError, dumps, loads

_LENGTH = struct.Struct(">I")
_TAG_BYTES = 16
# The parts of a longer frame are not copied together: many connections share the message.
_COPIED_BYTES = 1 << 14
# Before a connection has proved the token, and after.
MOST_BYTES_UNPROVED = 1 << 12
MOST_BYTES = 1 << 28
WORKER, COORDINATOR = "worker", "coordinator"


class WrongTag(ProtocolError):
    """A frame does not have the tag that it must have at its place in this direction of this connection."""


def new_nonce() -> str:
    return secrets.token_hex(16)


def new_name() -> str:
    """Return a random name for a job."""
    return secrets.token_hex(4)


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Seal:
    """Makes the tags of one direction of a connection, one after the other. `nonces` are those that both sides know by then."""

    def __init__(self, token: str, role: str, *nonces: str) -> None:
        # JSON may hold lone surrogates, which have no encoding.
        info = "\0".join((role, *nonces)).encode(errors="replace")
        self._key, self._count = hmac.digest(token.encode(), info, "sha256"), 0

    def next_tag(self, digest: bytes) -> bytes:
        """Return the tag of the next message, which has this digest."""
        tag = hmac.digest(self._key, self._count.to_bytes(8, "big") + digest, "sha256")
        self._count += 1
        return tag[:_TAG_BYTES]


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """The bytes of a message, and their digest: computed once, however many connections it is sent to."""

    body: bytes
    digest: bytes


def encode(message: ControlMessage) -> EncodedMessage:
    return _ALIVE if message is ALIVE else _encode(message)


def _encode(message: ControlMessage) -> EncodedMessage:
    body = dumps(message)
    assert len(body) <= MOST_BYTES, "a message that nobody would read"
    return EncodedMessage(body, hashlib.sha256(body).digest())


_ALIVE = _encode(ALIVE)  # the most frequent message, which never changes


def make_frame(message: EncodedMessage, seal: Seal | None) -> list[bytes]:
    """Return the parts of the next frame; without a seal it has no tag."""
    parts = [_LENGTH.pack(len(message.body)), message.body, seal.next_tag(message.digest) if seal is not None else b""]
    return parts if len(message.body) > _COPIED_BYTES else [b"".join(parts)]


class FrameReader:
    """Splits a stream of bytes into messages. A frame that is too long is refused by its length, before it is read.

    With a `seal`, which is that of the other side, every frame must have its tag. Both it and the limit may be set between two
    messages.
    """

    def __init__(self, most_bytes: int, seal: Seal | None = None) -> None:
        self.most_bytes, self.seal = most_bytes, seal
        self._bytes = bytearray()

    def take(self, some: bytes) -> Iterator[ControlMessage]:
        """Yield the messages that these bytes complete."""
        while (message := self.take_one(some)) is not None:
            yield message
            some = b""

    def take_one(self, some: bytes) -> ControlMessage | None:
        """Return the first message that these bytes complete, if any; the bytes behind it stay in the reader.

        Raises ProtocolError if they are no message, and WrongTag if they have not the tag of the seal.
        """
        self._bytes += some
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self.most_bytes:
            raise ProtocolError(f"a message of {length} bytes, where {self.most_bytes} are the most")
        end = _LENGTH.size + length
        end_of_tag = end + (_TAG_BYTES if self.seal is not None else 0)
        if len(self._bytes) < end_of_tag:
            return None
        body, tag = bytes(self._bytes[_LENGTH.size : end]), bytes(self._bytes[end:end_of_tag])
        del self._bytes[:end_of_tag]
        if self.seal is not None and not hmac.compare_digest(tag, self.seal.next_tag(hashlib.sha256(body).digest())):
            raise WrongTag("a message was changed, repeated, left out or made by somebody without the job's token")
        return loads(body)

    def receive(self, receive_some: Callable[[int], bytes], closed: str) -> ControlMessage:
        """Wait for the next message; the bytes behind it stay in the reader. Raises ConnectionError(`closed`) at the end."""
        some = b""
        while (message := self.take_one(some)) is None:
            if not (some := receive_some(1 << 16)):
                raise ConnectionError(closed)
        return message

    def take_bytes(self, most: int) -> bytes:
        """Remove and return bytes behind the last message, because a file follows it."""
        taken = bytes(self._bytes[:most])
        del self._bytes[:most]
        return taken


@dataclass(frozen=True, slots=True)
class Session:
    """A connection whose sides have proved the token to each other. The reader may hold messages that came early."""

    stream: socket.socket
    reader: FrameReader
    seal: Seal

    def frame(self, message: ControlMessage) -> bytes:
        """Return the next frame to send; frames must be sent in the order in which they are made."""
        return b"".join(make_frame(encode(message), self.seal))
