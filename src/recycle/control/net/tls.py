"""TLS on control connections: both sides show a certificate, and check that of the other side by an authority.

Files are read again when they have changed, so that certificates can be renewed while a job runs.
"""

import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recycle.core.errors import FileProblem

NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a connection that does not block raises if it cannot go on now."""
# The server spoke first, and it was no TLS.
_NO_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE", "PACKET_LENGTH_TOO_LONG", "BAD_RECORD_TYPE"}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate and its key, and the authority that has signed the certificates of the job, as PEM files."""

    cert: Path
    key: Path
    ca: Path

    def flags(self) -> list[str]:
        """The flags by which a command of a job is given these files."""
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca)]

    def client_context(self) -> ssl.SSLContext:
        """The context of a worker, which also checks that the certificate is one of the coordinator's address.

        Raises FileProblem.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server_context(self) -> ssl.SSLContext:
        """The context of a coordinator, which demands a certificate of every worker. Raises FileProblem."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self.ca)
        except OSError as problem:  # also that of ssl, if it is no certificate
            raise FileProblem(f"cannot use the authority in {self.ca}: {_why(problem)}") from None
        try:
            context.load_cert_chain(self.cert, self.key, password=_refuse_password)
        except (OSError, ValueError) as problem:
            raise FileProblem(f"cannot use the certificate in {self.cert} with the key in {self.key}: {_why(problem)}") from None
        return context


def _refuse_password() -> str:
    raise ValueError("the key has a password; store it without one, readable by its owner only")


def _why(problem: Exception) -> str:
    if isinstance(problem, ssl.SSLError):
        return (problem.reason or str(problem)).replace("_", " ").lower()
    return (problem.strerror if isinstance(problem, OSError) else "") or str(problem)


class ServerTls:
    """Wraps accepted connections. If the files have changed and cannot be used, those from before are."""

    def __init__(self, files: TlsFiles) -> None:
        self._files, self._changed = files, self._change_times(files)
        self._context = files.server_context()

    @staticmethod
    def _change_times(files: TlsFiles) -> tuple[int, ...]:
        try:
            return tuple(os.stat(path).st_mtime_ns for path in (files.cert, files.key, files.ca))
        except OSError:
            return ()

    def wrap(self, stream: socket.socket) -> ssl.SSLSocket:
        """Return the connection with TLS; its handshake has not begun."""
        if (changed := self._change_times(self._files)) != self._changed:
            with suppress(FileProblem):  # they are being written
                self._context, self._changed = self._files.server_context(), changed
        return self._context.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)


def refusal_by_tls(problem: ssl.SSLError, where: str) -> str:
    """Say why TLS does not connect a worker with the coordinator at `where`; empty if the connection broke."""
    if isinstance(problem, ssl.SSLCertVerificationError):
        return f"the certificate of the coordinator at {where} is refused: {problem.verify_message}"
    reason = problem.reason or ""
    if "ALERT" in reason:
        alert = reason.partition("ALERT_")[2].replace("_", " ").lower()
        if "certificate" in alert or alert.endswith(" ca"):
            return f"the coordinator at {where} refuses the certificate of this worker: {alert}"
        return f"what listens at {where} ends the handshake of TLS: {alert}"
    return f"what listens at {where} does not use TLS" if reason in _NO_TLS else ""
