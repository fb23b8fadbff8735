"""`save_tensors` and `load_tensors`: tensors and metadata in a safetensors file, written atomically and checked when read.

The safetensors library lays out the file and checks the header. The code here adds what a checkpoint needs: a file that appears
whole or not at all, a callback that sees every byte, one sentence for each error, and no second copy of all tensors in memory.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from recycle.core.errors import FileProblem
from recycle.core.files import replacing
from recycle.runtime.compute.state_digests import tensor_bytes

METADATA = "__metadata__"
_BLOCK_BYTES = 1 << 24
_LENGTH_BYTES, _MOST_HEADER_BYTES = 8, 100_000_000  # the library's own limit

Watch = Callable[[memoryview], object]


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], watch: Watch = lambda block: None
) -> int:
    """Write `tensors` and `metadata` to `path` atomically, flush them to the disk, and return the size of the file in bytes.

    A reader sees the old file or the new one, never a part. `watch` gets every byte of the file in order, for example to compute
    a digest; if `watch` raises, the old file stays.
    """
    dense = {name: _dense(path, name, tensor) for name, tensor in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            with temporary.open("xb") as stream:
                mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            specs = {name: _spec(path, name, tensor) for name, tensor in dense.items()}
            serialize_file(specs, temporary, dict(metadata) or None)
            temporary.chmod(mode)  # the library makes a file that only its owner may read
            with temporary.open("rb") as stream:
                size_bytes = _read_blocks(stream, watch)
                os.fsync(stream.fileno())
    except (OSError, SafetensorError, UnicodeEncodeError) as problem:
        raise FileProblem(f"cannot write {path}: {_reason(problem)}") from None
    return size_bytes


def _read_blocks(stream: BinaryIO, watch: Watch) -> int:
    size_bytes = 0
    while block := stream.read(_BLOCK_BYTES):
        watch(memoryview(block))
        size_bytes += len(block)
    return size_bytes


def _dense(path: Path, name: str, tensor: Tensor) -> Tensor:
    """`tensor` contiguous on the CPU; raise if a safetensors file cannot hold it."""
    if name == METADATA:
        raise FileProblem(f"cannot write {path}: no tensor can be called {METADATA}, which the format reserves")
    if tensor.layout != torch.strided or tensor.is_meta:
        what = "has no values" if tensor.is_meta else f"is {tensor.layout}"
        raise FileProblem(f"cannot write {path}: tensor {name} {what}; only dense tensors can be saved")
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _spec(path: Path, name: str, tensor: Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        return TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)
    except SafetensorError:
        raise FileProblem(f"cannot write {path}: tensor {name} is {tensor.dtype}, which the format has no name for") from None


def _reason(problem: Exception) -> str:
    """Why the file could not be written, in the words of the operating system where it is the cause."""
    if isinstance(problem, UnicodeEncodeError):
        return f"a name or a value in it is no Unicode text ({problem.reason})"
    if isinstance(problem, OSError):
        return problem.strerror or str(problem)
    code = re.search(r"\(os error (\d+)\)", str(problem))
    return os.strerror(int(code[1])) if code else str(problem)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of the file at `path`, on the CPU and bit for bit as they were saved, and its metadata.

    The library checks the whole header before memory is allocated for tensors.
    """
    try:
        with path.open("rb") as stream, _open(path) as file:
            stream.seek(_LENGTH_BYTES + int.from_bytes(stream.read(_LENGTH_BYTES), "little"))
            # The library has checked that the tensors follow the header in this order without gaps.
            shapes = {name: file.get_slice(name).get_shape() for name in file.offset_keys()}
            return _read_all(str(path), stream, file, shapes)
    except OSError as problem:
        raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None
    except SafetensorError as problem:
        raise FileProblem(f"{path} is torn, corrupt or no tensor file: {problem}") from None


def read_tensors(stream: BinaryIO, size_bytes: int, source: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the same of a file that is on its way, of this size: it is read once, and is on no disk here.

    The library reads files only. So it gets a small one in memory, with the same header but tensors without elements.
    """
    try:
        opening = stream.read(_LENGTH_BYTES)
        header = json.loads(stream.read(min(int.from_bytes(opening, "little"), _MOST_HEADER_BYTES)))
        layout = _layout(header, size_bytes - _LENGTH_BYTES - int.from_bytes(opening, "little"))
        empty = {name: entry | {"shape": [0], "data_offsets": [0, 0]} for name, entry in header.items() if name != METADATA}
        text = json.dumps({name: header[name] for name in header if name == METADATA} | empty).encode()
        with os.fdopen(os.memfd_create("header"), "wb", buffering=0) as small:
            small.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
            with _open(Path(f"/proc/self/fd/{small.fileno()}")) as file:
                for name, (shape, num_bytes) in layout.items():
                    if math.prod(shape) * file.get_tensor(name).dtype.itemsize != num_bytes:
                        raise ValueError(f"tensor {name} of shape {shape} does not have {num_bytes} bytes")
                return _read_all(source, stream, file, {name: shape for name, (shape, _) in layout.items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as problem:
        if isinstance(problem, FileProblem):
            raise
        raise FileProblem(f"{source} is torn, corrupt or no tensor file: {problem}") from None


def _layout(header: Any, size_bytes: int) -> dict[str, tuple[list[int], int]]:
    """Shape and size of each tensor, in the order of their bytes; raise ValueError unless they follow each other without gaps."""
    entries = [(*entry["data_offsets"], name, entry["shape"]) for name, entry in header.items() if name != METADATA]
    end = 0
    for start, after, name, _ in sorted(entries):
        if start != end or after < start:
            raise ValueError(f"tensor {name} does not follow the one before it")
        end = after
    if end != size_bytes:
        raise ValueError(f"its tensors have {end} bytes, but {size_bytes} follow the header")
    return {name: (shape, after - start) for start, after, name, shape in sorted(entries)}


def _read_all(
    source: str, stream: BinaryIO, file: Any, shapes: Mapping[str, Sequence[int]]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    return {name: _read_tensor(source, stream, name, file, shape) for name, shape in shapes.items()}, file.metadata() or {}


def _open(path: Path) -> Any:
    opener: Any = safe_open  # the library has no types for it
    return opener(path, framework="pt")


def _read_tensor(source: str, stream: BinaryIO, name: str, file: Any, shape: Sequence[int]) -> Tensor:
    """Read one tensor into memory of its own.

    The library's tensor is a view of the mapped file; only its dtype is used. Its bytes would end the process with SIGBUS if the
    file were cut meanwhile, and the library's `pread` holds the GIL, which would stop the worker's heartbeats.
    """
    try:
        made = torch.empty(shape, dtype=file.get_tensor(name).dtype)
    except (RuntimeError, TypeError):  # no elements, but dimensions beyond what torch can count
        raise FileProblem(f"{source} has tensor {name} of a shape that torch cannot make: it is corrupt") from None
    block = tensor_bytes(made)
    if block.nbytes and stream.readinto(block) != block.nbytes:  # type: ignore[attr-defined]
        raise FileProblem(f"{source} ends inside tensor {name}: the file was cut while it was read")
    if made.dtype is torch.bool and made.numel() and int(made.view(torch.uint8).max()) > 1:
        raise FileProblem(f"{source} has tensor {name} of dtype BOOL with bytes other than 0 and 1: the file is corrupt")
    return made
