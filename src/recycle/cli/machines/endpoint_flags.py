"""The address and the token of a job, as the commands of several machines get them."""

import argparse
import stat
from pathlib import Path

from recycle.control.net.handshake import Endpoint
from recycle.control.net.tls import TlsFiles
from recycle.control.net.wire import new_token
from recycle.core.errors import FileProblem, UserError
from recycle.core.files import write_secret

DEFAULT_ADDRESS = "127.0.0.1:29400"


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments by which a command takes part in a job of a coordinator elsewhere."""
    about = "where the coordinator listens; if there are several coordinators, their addresses with commas"
    parser.add_argument("address", metavar="HOST:PORT", help=about)
    about = "the job file, if the coordinator was given one; the same on every machine"
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=about)
    about = "the job's secret, as the coordinator wrote it"
    parser.add_argument("--token-file", type=Path, required=True, metavar="FILE", help=about)
    about = "the network interface by which tensors go (the one by which the coordinator is reached)"
    parser.add_argument("--interface", default="", metavar="NAME", help=about)
    add_tls_arguments(parser)


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """The certificates of the control connection: all three files, or none."""
    about = "use TLS on the control connection, with this certificate (PEM)"
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help=about)
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="the key of the certificate, without a password")
    about = "the authority that has signed the certificates of coordinator and workers"
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help=about)


def read_tls_paths(args: argparse.Namespace) -> TlsFiles | None:
    """The files of TLS, if it is to be used, which may be on other machines; raises if one of the flags is missing."""
    files = _tls_files(args)
    missing = [flag for flag, path in files.items() if path is None]
    if len(missing) == len(files):
        return None
    if missing:
        raise UserError(f"TLS needs a certificate, its key and an authority: give {' and '.join(missing)}, too")
    # Links are not followed: who renews a certificate often moves one.
    return TlsFiles(*(path.absolute() for path in files.values() if path is not None))


def read_tls(args: argparse.Namespace) -> TlsFiles | None:
    """The files of TLS, if it is to be used; raises if one is missing or cannot be used."""
    if (tls := read_tls_paths(args)) is None:
        return None
    tls.client_context()  # so that files which cannot be used are refused now
    if tls.key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FileProblem(f"the key in {args.tls_key} can be read by others on this machine: chmod 600 {args.tls_key}")
    return tls


def write_tls_flags(args: argparse.Namespace) -> str:
    """The flags of TLS as a user has given them, each after a space."""
    return "".join(f" {flag} {path}" for flag, path in _tls_files(args).items() if path is not None)


def _tls_files(args: argparse.Namespace) -> dict[str, Path | None]:
    return {"--tls-cert": args.tls_cert, "--tls-key": args.tls_key, "--tls-ca": args.tls_ca}


def read_endpoint(args: argparse.Namespace) -> Endpoint:
    """The endpoint of the coordinator, or of several coordinators of one job, that a worker or an agent is given."""
    (host, port), *others = (read_address(each) for each in args.address.split(","))
    return Endpoint(host, port, read_token(args.token_file, makes_one=False), tls=read_tls(args), others=tuple(others))


def read_address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or not 0 <= int(port) <= 65535:
        raise UserError(f"{text!r} is no address: write HOST:PORT, such as {DEFAULT_ADDRESS}")
    return host.strip("[]") or "127.0.0.1", int(port)


def write_address(host: str, port: int) -> str:
    """The text of an address, as `read_address` reads it: an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def read_token(path: Path, makes_one: bool) -> str:
    """The secret in a file that only its owner may read."""
    if not path.exists() and makes_one:
        token = new_token()
        try:
            write_secret(path, token)
        except OSError as problem:
            raise FileProblem(f"cannot write {path}: {problem.strerror or problem}") from None
        return token
    try:
        text, mode = path.read_text(encoding="utf-8").strip(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
        raise FileProblem(f"cannot read the token in {path}: {reason}; copy the file from the coordinator's machine") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FileProblem(f"the token in {path} can be read by others on this machine: chmod 600 {path}")
    if not text:
        raise FileProblem(f"{path} holds no token: take a copy of the coordinator's")
    return text
