"""`kept_token`: the token of a page, the same after a restart, so that pages that are open go on."""

import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from recycle.core.files import write_secret

_TOKEN = re.compile(r"[\w-]{32,128}")


def kept_token(root: Path) -> str:
    """Return the token for the page about `root`: the one in a file beside it, which only its owner may read.

    It lies beside the folder, not in it, so that it does not go along when a run is copied or published. A file that others could
    have written or can read, or a link, is not used: then the token is new, and kept nowhere.
    """
    path, token = root.parent / f".{root.name}.page-token", secrets.token_urlsafe(24)
    with suppress(OSError):  # where nothing can be written, the token is not kept
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{path.name}.{os.getpid()}")
        own.unlink(missing_ok=True)
        write_secret(own, token)
        try:
            os.link(own, path)  # whole, or not at all: another page of these runs may start now
        except FileExistsError:
            token = _read(path) or token
        finally:
            own.unlink()
    return token


def _read(path: Path) -> str:
    """The token in a file, if nobody else can know it; else empty."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as stream:
            status = os.fstat(file)
            text = stream.read(200).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return text if is_ours and _TOKEN.fullmatch(text) else ""
