"""The store of a job, as the commands that start coordinators get it."""

import argparse
import shlex
from pathlib import Path

from recycle.control.store.etcd_access import StoreAccess
from recycle.control.store.etcd_gateway import StoreAddress
from recycle.core.errors import UserError


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    about = "keep the journal and the leader there, as etcd://HOST:PORT[,HOST:PORT...]/PREFIX, or etcds:// with TLS (a file)"
    parser.add_argument("--store", default="", metavar="URL", help=about)
    about = "the authority that has signed the certificates of etcd (those that this machine trusts)"
    parser.add_argument("--store-ca", type=Path, metavar="FILE", help=about)
    about = "the certificate to show to an etcd that demands one (PEM)"
    parser.add_argument("--store-cert", type=Path, metavar="FILE", help=about)
    parser.add_argument("--store-key", type=Path, metavar="FILE", help="the key of that certificate, without a password")
    parser.add_argument("--store-user", default="", metavar="NAME", help="a user of etcd")
    about = "a file with the password of that user, which only its owner may read"
    parser.add_argument("--store-password-file", type=Path, metavar="FILE", help=about)


def read_store(args: argparse.Namespace) -> StoreAddress | None:
    """The store, None if there is none; raises if a file cannot be used."""
    access = _read_access(args)
    if not args.store:
        if flags := access.flags():
            raise UserError(f"{' and '.join(flags[::2])} is for etcd: name it with --store etcds://HOST:PORT/PREFIX")
        return None
    address = StoreAddress.parse(args.store, access)
    if address.access is not None:
        address.access.check()  # so that files which cannot be used are refused now
    return address


def write_store_flags(args: argparse.Namespace) -> str:
    """The flags of the store as a user has given them, each after a space."""
    return f" {shlex.join(['--store', args.store, *_read_access(args).flags()])}" if args.store else ""


def _read_access(args: argparse.Namespace) -> StoreAccess:
    given: list[Path | None] = [args.store_ca, args.store_cert, args.store_key, args.store_password_file]
    ca, cert, key, password = (path.absolute() if path is not None else None for path in given)
    return StoreAccess(ca, cert, key, args.store_user, password)
