"""Messages on a connection: each is its length in four bytes and then JSON. What is too long to be a message is never read.

Both sides prove that they have the job's token without ever sending it: each puts it together with a number that the other has
made up.
"""

import hmac
import secrets
import struct
from collections.abc import Iterator

from recycle.control.decide.messages import ControlMessage, ProtocolError, dumps, loads

_LENGTH = struct.Struct(">I")
# Before a worker has proved its token, and after.
MOST_BYTES_OF_STRANGERS = 1 << 12
MOST_BYTES = 1 << 28


def new_nonce() -> str:
    return secrets.token_hex(16)


def new_name() -> str:
    """A name for a job, which tells it from others."""
    return secrets.token_hex(4)


def new_token() -> str:
    return secrets.token_urlsafe(24)


def proof(token: str, role: str, nonce: str) -> str:
    """What only who has the token can say about a nonce; the role keeps one side from repeating what the other has said."""
    return hmac.new(token.encode(), f"{role} {nonce}".encode(errors="replace"), "sha256").hexdigest()


def is_proof(claimed: str, token: str, role: str, nonce: str) -> bool:
    # JSON may hold halves of letters, which have no bytes of their own.
    return hmac.compare_digest(claimed.encode(errors="replace"), proof(token, role, nonce).encode())


def encode_frame(message: ControlMessage) -> bytes:
    body = dumps(message)
    assert len(body) <= MOST_BYTES, "a message that nobody would read"
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes as they come, and messages as they are whole."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._bytes = bytearray()

    def take(self, some: bytes) -> Iterator[ControlMessage]:
        """Yield the messages that these bytes complete."""
        while (message := self.take_one(some)) is not None:
            yield message
            some = b""

    def take_one(self, some: bytes) -> ControlMessage | None:
        """The first message that these bytes complete, if any; what is behind it stays here."""
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

    def rest(self) -> bytes:
        """The bytes that are no message any more, because something else follows."""
        rest = bytes(self._bytes)
        self._bytes.clear()
        return rest
