"""`StoreAccess`: how a coordinator and etcd know each other, by TLS, a certificate of the coordinator, a user and a password."""

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from recycle.core.errors import FileProblem, UserError


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The files of TLS towards etcd, and a user of etcd; each part may be left out.

    Without `ca`, the authorities of this machine are trusted. `cert` and `key` are shown to an etcd that demands a certificate.
    The password is read from its file whenever it is needed, so that it can be changed, and is on no command line.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise UserError("a certificate for etcd has a key: give --store-cert and --store-key, or neither")
        if bool(self.user) != (self.password_file is not None):
            raise UserError("a user of etcd has a password: give --store-user and --store-password-file, or neither")

    def flags(self) -> list[str]:
        """The flags by which a coordinator is given this access."""
        given = {"ca": self.ca, "cert": self.cert, "key": self.key, "user": self.user, "password-file": self.password_file}
        return [word for name, value in given.items() if value for word in (f"--store-{name}", str(value))]

    def context(self) -> ssl.SSLContext:
        """The context of connections to etcd. Raises FileProblem if a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except OSError as problem:  # also that of ssl, if it is no certificate
            raise FileProblem(f"cannot use the authority in {self.ca}: {_reason(problem)}") from None
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key, password=_refuse_password)
            except (OSError, ValueError) as problem:
                reason = f"cannot use the certificate in {self.cert} with the key in {self.key}: {_reason(problem)}"
                raise FileProblem(reason) from None
        return context

    def change_times(self) -> tuple[int, ...]:
        """When the files of TLS were last changed; empty if one is missing just now."""
        try:
            return tuple(os.stat(path).st_mtime_ns for path in (self.ca, self.cert, self.key) if path is not None)
        except OSError:
            return ()

    def read_password(self) -> str:
        """The password in its file, which only its owner may read. Raises FileProblem."""
        path = self.password_file
        assert path is not None
        try:
            text, mode = path.read_text(encoding="utf-8").rstrip("\r\n"), path.stat().st_mode
        except (OSError, UnicodeDecodeError) as problem:
            reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
            raise FileProblem(f"cannot read the password in {path}: {reason}") from None
        _refuse_readable(path, mode, "password")
        if not text:
            raise FileProblem(f"{path} holds no password")
        return text

    def check(self) -> None:
        """Raise FileProblem if one of the files cannot be used, or if others on this machine can read a secret."""
        self.context()
        if self.key is not None:
            _refuse_readable(self.key, self.key.stat().st_mode, "key")
        if self.user:
            self.read_password()


def _refuse_password() -> str:
    raise ValueError("the key has a password; store it without one, readable by its owner only")


def _refuse_readable(path: Path, mode: int, what: str) -> None:
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FileProblem(f"the {what} in {path} can be read by others on this machine: chmod 600 {path}")


def _reason(problem: Exception) -> str:
    if isinstance(problem, ssl.SSLError):
        return (problem.reason or str(problem)).replace("_", " ").lower()
    return (problem.strerror if isinstance(problem, OSError) else "") or str(problem)
