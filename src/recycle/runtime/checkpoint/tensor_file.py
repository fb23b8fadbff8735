"""Tensors in files of the public safetensors format, written and read with torch and the standard library alone.

A file is the length of its header (8 bytes, little-endian), the header (JSON: of each tensor its dtype, its shape and where its
bytes are, and under `__metadata__` a map of strings), then the bytes of all tensors without gaps. Nothing in a file is ever
executed. Bytes go between tensors and the disk block by block, so that nobody holds a second copy of all of them.
"""

import contextlib
import ctypes
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from recycle.core.errors import FileProblem

METADATA = "__metadata__"
# The reference implementation refuses headers that are longer.
_MOST_HEADER_BYTES = 100_000_000
_BLOCK_BYTES = 1 << 24
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
assert sys.byteorder == "little", "tensor files hold the bytes of tensors as they lie in memory, which must be little-endian"

Watch = Callable[[memoryview], object]


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], watch: Watch = lambda block: None
) -> int:
    """Put `tensors` at `path` in one step, on the disk and not only on its way there; return how many bytes the file has.

    A reader sees the old file or the new one, never a part. `watch` gets every byte of the file in order, to make a digest of it.
    """
    blocks = _blocks(path, tensors, metadata)
    # Named by chance, not by process: writers on other machines may share the folder.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as stream:
            size_bytes = _write(stream, blocks, watch)
        os.replace(temporary, path)
    except BaseException as problem:
        _remove(temporary)
        if isinstance(problem, OSError):
            raise FileProblem(f"cannot write {path}: {problem.strerror or problem}") from None
        raise
    return size_bytes


def _write(stream: BinaryIO, blocks: Iterator[memoryview], watch: Watch) -> int:
    size_bytes = 0
    for block in blocks:
        stream.write(block)
        watch(block)
        size_bytes += block.nbytes
    stream.flush()
    os.fsync(stream.fileno())
    return size_bytes


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # what went wrong before says more
        path.unlink(missing_ok=True)


def _blocks(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """Every byte of the file in order; what cannot be in such a file is refused before the first."""
    for name, tensor in tensors.items():
        _refuse_unwritable(path, name, tensor)
    # The widest first, so that each tensor lies at a multiple of its width; that is where readers that map the file want it.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header = _header(path, [(name, tensors[name]) for name in order], metadata)
    return _in_order(header, [tensors[name] for name in order])


def _in_order(header: bytes, tensors: list[Tensor]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little"))
    yield memoryview(header)
    for tensor in tensors:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        view = memory_of(plain)
        for begin in range(0, view.nbytes, _BLOCK_BYTES):
            yield view[begin : begin + _BLOCK_BYTES]


def _header(path: Path, tensors: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in tensors:
        end = begin + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    try:
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as problem:
        raise FileProblem(f"cannot write {path}: a name or a value in it is no Unicode text ({problem.reason})") from None
    header += b" " * (-len(header) % 8)
    if len(header) > _MOST_HEADER_BYTES:
        raise FileProblem(f"cannot write {path}: its header would have {len(header)} bytes, the most is {_MOST_HEADER_BYTES}")
    return header


def _refuse_unwritable(path: Path, name: str, tensor: Tensor) -> None:
    if name == METADATA:
        raise FileProblem(f"cannot write {path}: no tensor can be called {METADATA}, which the format keeps for itself")
    if tensor.layout != torch.strided or tensor.is_meta:
        what = "has no values" if tensor.is_meta else f"is {tensor.layout}"
        raise FileProblem(f"cannot write {path}: tensor {name} {what}; only dense tensors can be saved")
    if tensor.dtype not in _NAMES:
        raise FileProblem(f"cannot write {path}: tensor {name} is {tensor.dtype}, which the format has no name for")


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor themselves, good for as long as the tensor lives; torch's own way there needs numpy."""
    size_bytes = tensor.numel() * tensor.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor as the header has it; its bytes are counted from the end of the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of the file at `path`, on the CPU and bit for bit as they were, and its metadata.

    Everything that the file says about itself is checked before memory is taken for it.
    """
    try:
        with path.open("rb") as stream:
            entries, metadata = _read_header(path, stream)
            return {entry.name: _read_tensor(path, stream, entry) for entry in entries}, metadata
    except OSError as problem:
        raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None


def _read_header(path: Path, stream: BinaryIO) -> tuple[list[_Entry], dict[str, str]]:
    """The tensors in the order of their bytes, and the metadata; the stream is then where the bytes begin."""
    size_bytes = os.fstat(stream.fileno()).st_size
    start = stream.read(8)
    header_bytes = int.from_bytes(start, "little")
    if len(start) < 8 or header_bytes > min(size_bytes - 8, _MOST_HEADER_BYTES):
        raise FileProblem(
            f"{path} has {size_bytes} bytes, too few for the header it should begin with: it is torn or no tensor file"
        )
    try:
        header = json.loads(stream.read(header_bytes).decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as problem:
        raise FileProblem(f"{path} has a header that is not JSON ({problem}): it is corrupt or no tensor file") from None
    if not isinstance(header, dict):
        raise FileProblem(f"{path} has a header that is no JSON object: it is corrupt or no tensor file")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FileProblem(f"{path} has metadata that are no map of strings: it is corrupt or no tensor file")
    entries = sorted((_entry(path, name, told) for name, told in header.items()), key=lambda entry: (entry.begin, entry.end))
    _refuse_gaps(path, entries, size_bytes - 8 - header_bytes)
    return entries, metadata


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return made


def _entry(path: Path, name: str, told: object) -> _Entry:
    """What the header says of one tensor, if that makes sense by itself."""
    match told:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if all(
            type(number) is int and number >= 0 for number in (*shape, begin, end)
        ):
            pass
        case _:
            raise FileProblem(f"{path} does not say dtype, shape and offsets of tensor {name}: it is corrupt or no tensor file")
    if dtype not in _DTYPES:
        raise FileProblem(f"{path} has tensor {name} of dtype {dtype}, which this release does not know")
    needed = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != needed:
        raise FileProblem(f"{path} gives tensor {name} bytes {begin} to {end}, but {dtype} of shape {shape} takes {needed} bytes")
    return _Entry(name, _DTYPES[dtype], tuple(shape), begin, end)


def _refuse_gaps(path: Path, entries: list[_Entry], size_bytes: int) -> None:
    """Raise unless the tensors' bytes fill the file to its end, one after another."""
    reached = 0
    for entry in entries:
        if entry.begin != reached:
            what = "overlaps another one" if entry.begin < reached else "comes after a gap"
            raise FileProblem(f"{path} has tensor {entry.name} at byte {entry.begin}, where it {what}: the file is corrupt")
        reached = entry.end
    if reached != size_bytes:
        raise FileProblem(f"{path} has {size_bytes} bytes of tensors, but its header tells of {reached}: the file is torn")


def _read_tensor(path: Path, stream: BinaryIO, entry: _Entry) -> Tensor:
    try:
        made = torch.empty(entry.shape, dtype=entry.dtype)
    except (RuntimeError, TypeError):  # no elements, but dimensions beyond what torch can count
        raise FileProblem(f"{path} has tensor {entry.name} of shape {list(entry.shape)}, which torch cannot make") from None
    view = memory_of(made)
    if view.nbytes and stream.readinto(view) != view.nbytes:  # type: ignore[attr-defined]
        raise FileProblem(f"{path} ends inside tensor {entry.name}: somebody cut it while it was read")
    if entry.dtype is torch.bool and made.numel() and int(made.view(torch.uint8).max()) > 1:
        raise FileProblem(f"{path} has tensor {entry.name} of dtype BOOL with bytes other than 0 and 1: the file is corrupt")
    return made
