"""Real text without a download: the sources of Python's standard library, or a folder or file of the user's, byte by byte.

Workers with the same Python read the same text. The same files in a folder give the same text on every machine.
"""

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recycle.core.errors import DatasetTooSmall, FileProblem, UserError
from recycle.runtime.compute.weight_digest import tensor_bytes

MOST_BYTES = 2 * 1024 * 1024


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Samples of `context` bytes and, as targets, the byte after each; the inputs of two samples never overlap.

    Files are read in the order of their names until `most_bytes` are there: once, when a sample or the number of samples is
    first asked for, so that a data set that was not used yet is cheap to send to another process.
    """

    def __init__(self, context: int, folder: Path | str | None = None, most_bytes: int = MOST_BYTES) -> None:
        for name, value in (("context", context), ("most_bytes", most_bytes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name} is {value!r}, but it must be a whole number of at least 1")
        self._context, self._most_bytes = context, most_bytes
        self._folder = Path(folder) if folder is not None else None
        if self._folder is not None and not self._folder.exists():
            raise FileProblem(f"there is no text at {self._folder}: name a folder or a file")

    def __len__(self) -> int:
        # The last byte is a target only.
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 [context]."""
        if not 0 <= number < len(self):
            raise IndexError(f"there is no sample {number}: they are 0 to {len(self) - 1}")
        start = number * self._context
        window = self._bytes[start : start + self._context + 1].long()
        return window[:-1], window[1:]

    @property
    def fingerprint(self) -> str:
        """What tells this text from any other."""
        return hashlib.sha256(tensor_bytes(self._bytes)).hexdigest()[:16]

    @cached_property
    def _bytes(self) -> Tensor:
        files = _standard_library() if self._folder is None else _files_of(self._folder)
        text = _read(files, self._most_bytes)
        if len(text) <= self._context:
            where = "Python's standard library" if self._folder is None else self._folder
            raise DatasetTooSmall(
                f"{len(text)} bytes of text from {where} are too few, because one sample of context {self._context} needs "
                f"{self._context + 1}: give more text, a larger most_bytes or a shorter context"
            )
        return torch.frombuffer(text, dtype=torch.uint8)


def _standard_library() -> list[Path]:
    """The top-level modules, sorted; what is not Python's own (a site's modules, settings of the build) is left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names)


def _files_of(place: Path) -> list[Path]:
    """The file itself, or every file at any depth in a folder, sorted; hidden ones are left out, as they are seldom text."""
    if not place.is_dir():
        return [place]
    names = (path.relative_to(place) for path in place.rglob("*") if path.is_file())
    return [place / name for name in sorted(names) if not any(part.startswith(".") for part in name.parts)]


def _read(files: list[Path], most_bytes: int) -> bytearray:
    text = bytearray()
    for chunk in _chunks(files, most_bytes):
        text += chunk
    return text


def _chunks(files: list[Path], most_bytes: int) -> Iterator[bytes]:
    for path in files:
        if most_bytes == 0:
            return
        try:
            with path.open("rb") as stream:
                chunk = stream.read(most_bytes)
        except OSError as problem:
            raise FileProblem(f"cannot read {path}: {problem.strerror or problem}; leave it out or make it readable") from None
        most_bytes -= len(chunk)
        yield chunk
