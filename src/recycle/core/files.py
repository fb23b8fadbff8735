"""Atomic writing of files, and reading of JSON files with a format name and version."""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from recycle.core.errors import FileProblem


def write_text(path: Path, text: str) -> None:
    """Put `text` at `path` in one step, as UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step; see `write_parts`."""
    write_parts(path, [data])


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Put all parts at `path` in one step: a reader sees the old file or the new one, never a part.

    A link is followed, and anything but a plain file (a device, a pipe) is left alone.
    """
    refuse_unwritable(path)
    path = path.resolve()
    advice = "; choose a folder that you may write to"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, temporary.open("xb") as stream:
            advice = ""
            stream.writelines(parts)
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
            advice = "; make room there" if problem.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise FileProblem(f"cannot write {path}: {problem.strerror or problem}{advice}") from None


def write_secret(path: Path, secret: str) -> Path:
    """Write a new file that only its owner may read. Raises OSError, also if there is such a file already."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as stream:
        stream.write(secret + "\n")
    return path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a new file beside `path`, which replaces `path` after the block; after an error it is removed."""
    # The name is random: writers on other machines may share the folder.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):  # the first error says more
            temporary.unlink(missing_ok=True)


def refuse_unwritable(*paths: Path | None) -> None:
    """Raise if nothing can be written at one of the paths that are given; call it before minutes of work on the content."""
    for path in filter(None, paths):
        try:
            if path.exists() and not path.is_file():
                what = "a folder" if path.is_dir() else "a device or a pipe"
                raise FileProblem(f"cannot write {path}: it is {what}; name a file")
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
                raise FileProblem(f"cannot write {path}: {folder} is not a folder that you may write to; choose another one")
        except OSError as problem:
            raise FileProblem(f"cannot write {path}: {problem.strerror or problem}; choose another name") from None


def refuse_other_suffix(path: Path, suffix: str) -> None:
    if path.suffix.lower() != suffix:
        raise FileProblem(f"cannot write {path}: it would be a {suffix} file whatever its name says; call it {path.stem}{suffix}")


def refuse_device(path: Path) -> None:
    """Raise if `path` is a device, such as /dev/zero, which may never end; a pipe does."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # whoever reads it says why that is not possible
    if stat.S_ISBLK(mode) or (stat.S_ISCHR(mode) and path.resolve() != Path(os.devnull)):
        raise FileProblem(f"cannot read {path}: it is a device, not a file")


def read_json(path: Path, format_name: str, version: int) -> dict[str, Any]:
    """Return the JSON object at `path`, which must carry our `format` and a `version` that we read."""
    refuse_device(path)
    if path.is_dir():
        raise FileProblem(f"cannot read {path}: it is a folder; name a {format_name} file, such as one in it")
    try:
        return parse_json(path.read_text(encoding="utf-8"), path, format_name, version)
    except OSError as problem:
        raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError as problem:
        raise FileProblem(f"{path} is not JSON ({problem}): it is corrupt or another kind of file") from None


def parse_json(text: str, path: Path, format_name: str, version: int) -> dict[str, Any]:
    """Return the JSON object in the text of the file at `path`; see `read_json`."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise FileProblem(f"{path} is not JSON ({problem}): it is corrupt or another kind of file") from None
    found = data.get("format") if isinstance(data, dict) else None
    if found != format_name:
        raise FileProblem(f"{path} is not a {format_name} file: its format is {found!r}")
    if data.get("version") != version:
        raise FileProblem(f"{path} has {format_name} version {data.get('version')!r}, but this release reads version {version}")
    return dict(data)
