"""`Text`: a data set of bytes, from the sources of Python's standard library or from a folder or file of the user.

Workers with the same release of Python read the same text. The same files in a folder give the same text on every machine.
"""

import hashlib
import sys
import sysconfig
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from recycle.core.errors import DatasetTooSmall, FileProblem
from recycle.runtime.compute.state_digests import tensor_bytes
from recycle.runtime.options import refuse_count

MOST_BYTES = 2 * 1024 * 1024


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Samples of `context` bytes with the byte after each as targets; the inputs of two samples never overlap.

    Files are read once, in the order of their names up to `most_bytes`, when the data set is first used; so an unused data set
    is cheap to send to another process.

    Args:
        context: The number of bytes in a sample.
        folder: A folder or a file with text; by default the sources of Python's standard library.
        most_bytes: The number of bytes after which reading stops.

    Raises:
        UserError: A number is not a whole number of at least 1.
        FileProblem: There is no such folder or file; when first used: a file cannot be read.
        DatasetTooSmall: When first used: the text is shorter than one sample.

    Example:
        >>> inputs, targets = Text(context=64)[0]
        >>> inputs.shape
        torch.Size([64])
    """

    def __init__(self, context: int, folder: Path | str | None = None, most_bytes: int = MOST_BYTES) -> None:
        for name, value in (("context", context), ("most_bytes", most_bytes)):
            refuse_count(name, value, 1)
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
        """A digest that identifies this text."""
        return hashlib.sha256(tensor_bytes(self._bytes)).hexdigest()[:16]

    @cached_property
    def _bytes(self) -> Tensor:
        files = _standard_library() if self._folder is None else _files_of(self._folder)
        text = _read(files, self._most_bytes)
        if len(text) <= self._context:
            where = "Python's standard library" if self._folder is None else self._folder
            raise DatasetTooSmall(
                f"{len(text)} bytes of text from {where} are too few, because one sample of context {self._context} needs "
                f"{self._context + 1}: give more text, or a shorter context"
            )
        return torch.frombuffer(text, dtype=torch.uint8)


def _standard_library() -> list[Path]:
    """The top-level modules, sorted; modules of the site or of the build are left out."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names)


def _files_of(path: Path) -> list[Path]:
    """The file itself, or every file at any depth of a folder, sorted; hidden files, seldom text, are left out."""
    if not path.is_dir():
        return [path]
    names = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    return [path / name for name in sorted(names) if not any(part.startswith(".") for part in name.parts)]


def _read(files: list[Path], most_bytes: int) -> bytearray:
    text = bytearray()
    for path in files:
        if len(text) == most_bytes:
            break
        try:
            with path.open("rb") as stream:
                text += stream.read(most_bytes - len(text))
        except OSError as problem:
            raise FileProblem(f"cannot read {path}: {problem.strerror or problem}; leave it out or make it readable") from None
    return text
