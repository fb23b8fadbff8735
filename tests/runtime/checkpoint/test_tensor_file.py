"""Tensor files are plain safetensors files, bit for bit and both ways; a torn one is refused in a sentence."""

import errno
import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from recycle.core.errors import FileProblem
from recycle.runtime.checkpoint.tensor_file import load_tensors, read_tensors, save_tensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
IN_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def read_on_its_way(path):
    """As a worker reads a file that the coordinator sends."""
    with path.open("rb") as stream:
        loaded = read_tensors(stream, path.stat().st_size, str(path))
        assert stream.read() == b""
        return loaded


BOTH = pytest.mark.parametrize("load", [load_tensors, read_on_its_way])


def random_tensor(dtype, shape, seed):
    """Any bits at all, so that NaNs of every kind are among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def bits(tensor):
    flat = tensor.detach().resolve_neg().resolve_conj().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.view(torch.uint8).tolist())


def all_bits(tensors):
    return {name: bits(tensor) for name, tensor in tensors.items()}


@st.composite
def some_tensors(draw):
    shapes = st.lists(st.integers(0, 4), max_size=4)
    tensors = draw(st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), shapes, st.integers(0, 99)), max_size=6))
    return {name: random_tensor(*words) for name, words in tensors.items()}


@IN_ONE_FOLDER
@given(some_tensors(), st.dictionaries(NAMES, NAMES, max_size=3))
def test_the_library_reads_what_we_write(tmp_path, tensors, metadata):
    path = tmp_path / "ours.safetensors"
    size = save_tensors(path, tensors, metadata)
    assert size == path.stat().st_size
    assert all_bits(load_file(path)) == all_bits(tensors)
    with safe_open(path, "pt") as file:
        assert (file.metadata() or {}) == metadata


@IN_ONE_FOLDER
@given(some_tensors(), st.dictionaries(NAMES, NAMES, max_size=3))
def test_we_read_what_the_library_writes(tmp_path, tensors, metadata):
    path = tmp_path / "theirs.safetensors"
    save_file(tensors, path, metadata or None)
    loaded, found = load_tensors(path)
    assert all_bits(loaded) == all_bits(tensors)
    assert found == metadata


# A file that an earlier release wrote, before it used the library.
EARLIER = (
    b'\x10\x01\x00\x00\x00\x00\x00\x00{"__metadata__":{"format":"pt","stage":"2"},'
    b'"none":{"dtype":"F32","shape":[0,2],"data_offsets":[0,0]},"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},'
    b'"b":{"dtype":"BF16","shape":[2],"data_offsets":[12,16]},"on":{"dtype":"BOOL","shape":[],"data_offsets":[16,17]}}    '
    b"\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@\xc0?\x00\xc0\x01"
)


@BOTH
def test_a_file_of_an_earlier_release_is_read(tmp_path, load):
    (tmp_path / "one").write_bytes(EARLIER)
    loaded, metadata = load(tmp_path / "one")
    assert metadata == {"format": "pt", "stage": "2"}
    assert all_bits(loaded) == all_bits(
        {
            "w": torch.arange(3.0),
            "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "none": torch.empty(0, 2),
            "on": torch.tensor(True),
        }
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 5)], ids=str)
@BOTH
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype, shape, load):
    tensor = random_tensor(dtype, shape, 7)
    save_tensors(tmp_path / "one", {"x": tensor}, {})
    loaded, metadata = load(tmp_path / "one")
    assert all_bits(loaded) == {"x": bits(tensor)}
    assert metadata == {}


ODD = torch.arange(48, dtype=torch.float32).reshape(2, 3, 2, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        ODD.permute(3, 1, 0, 2),
        ODD[:, ::2, :, 1:3],
        ODD[:1].expand(5, 3, 2, 4),
        ODD.to(memory_format=torch.channels_last),
        torch.nn.Parameter(ODD.clone()),
        torch.complex(ODD, ODD).conj(),
        torch.complex(ODD, ODD).conj().imag,
    ],
    ids=["permuted", "sliced", "expanded", "channels last", "parameter", "conjugate", "negative"],
)
def test_the_values_are_written_however_they_lie_in_memory(tmp_path, tensor):
    save_tensors(tmp_path / "one", {"x": tensor}, {})
    expected = tensor.detach().clone().resolve_conj().resolve_neg()
    assert torch.equal(load_tensors(tmp_path / "one")[0]["x"], expected)
    assert torch.equal(load_file(tmp_path / "one")["x"], expected)


def test_tensors_that_share_memory_are_written_one_by_one_and_no_longer_share_it_when_read(tmp_path):
    whole = torch.arange(6.0)
    save_tensors(tmp_path / "one", {"whole": whole, "part": whole[2:4], "same": whole}, {})
    loaded, _ = load_tensors(tmp_path / "one")
    assert all_bits(loaded) == all_bits({"whole": whole, "part": whole[2:4], "same": whole})
    loaded["whole"].zero_()
    assert torch.equal(loaded["same"], whole)
    assert torch.equal(load_tensors(tmp_path / "one")[0]["whole"], whole)


def test_a_tensor_of_many_blocks_comes_back_and_its_bytes_are_watched(tmp_path):
    big = random_tensor(torch.int16, (20_000_000,), 3)
    seen = hashlib.sha256()
    num_blocks = 0

    def watch(block):
        nonlocal num_blocks
        num_blocks += 1
        seen.update(block)

    size = save_tensors(tmp_path / "one", {"big": big, "small": big[:3]}, {"why": "to see"}, watch)
    assert size > 40_000_000
    assert num_blocks == 3
    with (tmp_path / "one").open("rb") as stream:
        assert seen.hexdigest() == hashlib.file_digest(stream, "sha256").hexdigest()
    assert torch.equal(load_tensors(tmp_path / "one")[0]["big"], big)


def test_each_tensor_lies_at_a_multiple_of_its_width(tmp_path):
    save_tensors(tmp_path / "one", {f"{n}": random_tensor(dtype, (3,), n) for n, dtype in enumerate(DTYPES)}, {"a": "b"})
    data = (tmp_path / "one").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"a": "b"}
    for number, dtype in enumerate(DTYPES):
        assert (8 + length + header[f"{number}"]["data_offsets"][0]) % dtype.itemsize == 0


# What cannot be written.


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"__metadata__": torch.ones(1)}, "no tensor can be called __metadata__"),
        ({"x": torch.eye(2).to_sparse()}, "tensor x is torch.sparse_coo; only dense tensors can be saved"),
        ({"x": torch.ones(1, device="meta")}, "tensor x has no values"),
        ({"x": torch.ones(1, dtype=torch.complex128)}, "tensor x is torch.complex128, which the format has no name for"),
        ({"\ud800": torch.ones(1)}, "a name or a value in it is no Unicode text"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_and_the_old_file_stays(tmp_path, tensors, sentence):
    path = tmp_path / "one"
    path.write_text("old")
    with pytest.raises(FileProblem, match=sentence):
        save_tensors(path, tensors, {})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch, failing):
    path = tmp_path / "one"
    path.write_text("old")

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, no_space)
    with pytest.raises(FileProblem, match=r"cannot write .*one: No space left on device"):
        save_tensors(path, {"x": torch.ones(3)}, {})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["one"]


def test_an_interrupted_write_leaves_no_litter_and_stays_an_interrupt(tmp_path):
    def interrupt(block):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_tensors(tmp_path / "one", {"x": torch.ones(3)}, {}, interrupt)
    assert os.listdir(tmp_path) == []


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileProblem, match="cannot write"):
        save_tensors(tmp_path / "file" / "one", {}, {})


def test_folders_are_made_and_a_file_is_readable_as_far_as_the_umask_lets_it(tmp_path):
    old = os.umask(0o027)
    try:
        save_tensors(tmp_path / "new" / "one", {}, {})
    finally:
        os.umask(old)
    assert (tmp_path / "new" / "one").stat().st_mode & 0o777 == 0o640


# What cannot be read.


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="U8", shape=(2,), offsets=(0, 2), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x00",
        raw({"x": entry()}, b"ab", length=10**6),
        raw({"x": entry()}, b"ab", length=2**63),
        raw(b"{never"),
        raw(b"\xff\xfe{}"),
        raw(b"[" * 100_000),
        raw([]),
        raw({"__metadata__": {"a": 1}}),
        raw({"__metadata__": []}),
        raw({"x": 3}),
        raw({"x": {"dtype": "U8", "shape": [2]}}, b"ab"),
        raw({"x": entry(shape=(-2,))}, b"ab"),
        raw({"x": entry(shape=(2.0,))}, b"ab"),
        raw({"x": entry(shape=(True, 2))}, b"ab"),
        raw({"x": entry(offsets=(-2, 0))}, b"ab"),
        raw({"x": entry(offsets=(0, 1, 2))}, b"ab"),
        raw({"x": entry(dtype="F7")}, b"ab"),
        raw({"x": entry(offsets=(2, 0))}, b"ab"),
        raw({"x": entry(dtype="I16")}, b"ab"),
        raw({"x": entry(), "y": entry()}, b"ab"),
        raw({"x": entry(), "y": entry(offsets=(1, 3))}, b"abc"),
        raw({"x": entry(), "y": entry(offsets=(3, 5))}, b"abcde"),
        raw({"x": entry(offsets=(0, 2))}, b"a"),
        raw({"x": entry()}, b"abc"),
        raw({"x": entry(shape=(0, 2**70), offsets=(0, 0))}),
        raw({"x": entry(shape=(0, 2**63), offsets=(0, 0))}),
        raw({"x": entry("BOOL")}, b"\x01\x02"),
    ],
)
@BOTH
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path, data, load):
    path = tmp_path / "one"
    path.write_bytes(data)
    with pytest.raises(FileProblem, match="corrupt") as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileProblem, match="cannot read"):
            load_tensors(path)


def test_a_pickle_is_refused(tmp_path):
    torch.save({"x": torch.ones(3)}, tmp_path / "one")
    with pytest.raises(FileProblem, match="no tensor file"):
        load_tensors(tmp_path / "one")


@BOTH
def test_a_file_cut_anywhere_is_refused(tmp_path, load):
    path = tmp_path / "one"
    save_tensors(path, {"x": torch.arange(5), "y": torch.ones(2, 3, dtype=torch.bfloat16)}, {"a": "b"})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FileProblem):
            load(path)


@IN_ONE_FOLDER
@given(st.data())
def test_a_changed_byte_of_the_header_is_refused_or_changes_a_name_or_a_dtype_and_never_the_bytes(tmp_path, data):
    path = tmp_path / "one"
    save_tensors(path, {"x": torch.arange(5), "y": torch.ones(2, 3, dtype=torch.bfloat16)}, {"a": "b"})
    changed = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(changed) - 53))  # 40 + 12 bytes are the tensors'
    changed[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    try:
        loaded, _ = load_tensors(path)
    except FileProblem:
        return
    read = b"".join(bits(tensor)[2] for tensor in loaded.values())
    assert read == bytes(changed[-52:])


def test_a_file_that_is_cut_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "one"
    save_tensors(path, {"x": torch.zeros(100_000), "y": torch.zeros(100_000, dtype=torch.int8)}, {})
    real = torch.empty

    def cut(*args, **kwargs):
        os.truncate(path, 300_000)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", cut)
    with pytest.raises(FileProblem, match="ends inside tensor x: the file was cut while it was read"):
        load_tensors(path)


# What it takes.

SCRIPT = """
import resource, sys
sys.modules["numpy"] = None  # a worker's machine has torch and safetensors, and nothing else
import torch
from pathlib import Path
from recycle.runtime.checkpoint.tensor_file import load_tensors, save_tensors

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

save_tensors(Path(sys.argv[1]), {"x": torch.ones(10)}, {})
load_tensors(Path(sys.argv[1]))
big = {f"{n}": torch.full((4, 1 << 20), n, dtype=torch.float32) for n in range(8)}
before = peak()
save_tensors(Path(sys.argv[1]), big, {})
print(peak() - before)
before = peak()
loaded, _ = load_tensors(Path(sys.argv[1]))
print(peak() - before)
assert all(torch.equal(loaded[name], big[name]) for name in big)
"""


@pytest.mark.timeout(120)
def test_neither_numpy_nor_a_second_copy_is_needed(tmp_path):
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, tmp_path / "one"], capture_output=True, text=True, timeout=100
    )
    assert made.returncode == 0, made.stderr
    writing, reading = map(int, made.stdout.split())
    size = 8 * (4 << 20) * 4
    assert writing < size / 4
    assert reading < size * 5 / 4
