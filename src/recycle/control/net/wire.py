"""Frames on a control connection (four bytes of length, then JSON), and the proofs of the job's token.

Each side proves that it has the token without sending it: it signs a nonce of the other side.
"""

import hmac
import secrets
import struct
from collections.abc import Callable, Iterator

from recycle.control.decide.messages import ControlMessage, ProtocolError, dumps, loads

_LENGTH = struct.Struct(">I")
# Before a connection has proved the token, and after.
MOST_BYTES_UNPROVED = 1 << 12
MOST_BYTES = 1 << 28


def new_nonce() -> str:
    return secrets.token_hex(16)


def new_name() -> str:
    """Return a random name for a job."""
    return secrets.token_hex(4)


def new_token() -> str:
    return secrets.token_urlsafe(24)


def proof(token: str, role: str, nonce: str) -> str:
    """Sign a nonce with the token; the role prevents that one side repeats the other's proof."""
    return hmac.new(token.encode(), f"{role} {nonce}".encode(errors="replace"), "sha256").hexdigest()


def is_proof(claimed: str, token: str, role: str, nonce: str) -> bool:
    # JSON may hold lone surrogates, which have no encoding.
    return hmac.compare_digest(claimed.encode(errors="replace"), proof(token, role, nonce).encode())


def encode_frame(message: ControlMessage) -> bytes:
    body = dumps(message)
    assert len(body) <= MOST_BYTES, "a message that nobody would read"
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Splits a stream of bytes into messages. A frame that is too long is refused by its length, before it is read."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._bytes = bytearray()

    def take(self, some: bytes) -> Iterator[ControlMessage]:
        """Yield the messages that these bytes complete."""
        while (message := self.take_one(some)) is not None:
            yield message
            some = b""

    def take_one(self, some: bytes) -> ControlMessage | None:
        """Return the first message that these bytes complete, if any; the bytes behind it stay in the reader."""
        self._bytes += some
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self.most_bytes:
            raise ProtocolError(f"a message of {length} bytes, where {self.most_bytes} are the most")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
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
