"""Certificates for tests, made by authorities that live as long as the process."""

import datetime
from pathlib import Path

import trustme

from recycle.control.net.tls import TlsFiles

OURS, FOREIGN = trustme.CA(), trustme.CA()


def write_tls(folder: Path, *names: str, by: trustme.CA = OURS, **times: datetime.datetime) -> TlsFiles:
    """The files of one side, whose certificate is of these names or addresses; both sides trust `OURS`."""
    folder.mkdir(exist_ok=True)
    issued = by.issue_cert(*names, **times)
    files = TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    files.cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    files.key.touch(0o600)
    files.key.write_bytes(issued.private_key_pem.bytes())
    files.ca.write_bytes(OURS.cert_pem.bytes())
    return files


def tls_flags(files: TlsFiles) -> tuple[str, ...]:
    return tuple(files.flags())
