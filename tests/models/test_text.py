"""Text by bytes: windows that follow one another, from files whose order is fixed."""

import hashlib
import pickle

import pytest
import torch

from recycle.core.errors import FileProblem, UserError
from recycle.models.text import Text

torch.set_num_threads(1)


def as_bytes(tensor):
    return bytes(tensor.tolist())


def test_the_target_of_a_byte_is_the_byte_after_it(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcdefghij")
    samples = [(as_bytes(inputs), as_bytes(targets)) for inputs, targets in Text(3, tmp_path)]
    assert samples == [(b"abc", b"bcd"), (b"def", b"efg"), (b"ghi", b"hij")]


@pytest.mark.parametrize(("num_bytes", "num_samples"), [(4, 1), (6, 1), (7, 2), (9, 2), (10, 3)])
def test_a_window_needs_a_byte_after_it(tmp_path, num_bytes, num_samples):
    (tmp_path / "a.txt").write_bytes(b"x" * num_bytes)
    assert len(Text(3, tmp_path)) == num_samples


def test_samples_are_int64_and_go_through_every_byte_value(tmp_path):
    (tmp_path / "all").write_bytes(bytes(range(256)) + b"\0")
    inputs, targets = Text(256, tmp_path)[0]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == list(range(256))
    assert targets.tolist() == [*range(1, 256), 0]


def test_files_are_read_in_the_order_of_their_names_and_hidden_ones_are_not(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"c": b"5", "b/y": b"34", "b/x": b"2", "a": b"01", ".hidden": b"no", ".git/x": b"no"}.items():
        (tmp_path / name).write_bytes(text)
    ((inputs, targets),) = Text(5, tmp_path)
    assert (as_bytes(inputs), as_bytes(targets)) == (b"01234", b"12345")


def test_a_single_file_is_a_text_too(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"xyz")
    ((inputs, targets),) = Text(2, str(tmp_path / "b.txt"))
    assert (as_bytes(inputs), as_bytes(targets)) == (b"xy", b"yz")


def test_no_more_than_the_budget_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"def")
    ((inputs, targets),) = Text(4, tmp_path, most_bytes=5)
    assert (as_bytes(inputs), as_bytes(targets)) == (b"abcd", b"bcde")


def test_the_standard_library_fills_the_budget_and_is_the_same_each_time():
    one, other = Text(64), Text(64)
    assert len(one) == (2 * 1024 * 1024 - 1) // 64
    for number in (0, 1, 12345, len(one) - 1):
        assert all(map(torch.equal, one[number], other[number]))


def test_the_standard_library_is_python():
    text = b"".join(as_bytes(inputs) for inputs, _ in Text(1000))
    assert text.count(b"\ndef ") > 500
    # The settings of the build lie in the same folder, but differ from machine to machine.
    assert b"build_time_vars = {" not in text


def test_consecutive_samples_continue_each_other():
    text = Text(64)
    assert text[0][1][-1] == text[1][0][0]


def test_a_text_is_read_once_and_only_when_it_is_used(tmp_path):
    (tmp_path / "a").write_bytes(b"abcd")
    text = Text(3, tmp_path)
    (tmp_path / "a").write_bytes(b"wxyz")
    assert as_bytes(text[0][0]) == b"wxy"
    (tmp_path / "a").unlink()
    assert as_bytes(text[0][0]) == b"wxy"
    assert len(pickle.dumps(Text(64))) < 1000


def test_there_is_no_sample_beside_the_text(tmp_path):
    (tmp_path / "a").write_bytes(b"abcdefg")
    for number in (-1, 2):
        with pytest.raises(IndexError, match=f"there is no sample {number}: they are 0 to 1"):
            Text(3, tmp_path)[number]


@pytest.mark.parametrize("text", [b"", b"abc"])
def test_too_little_text_is_refused(tmp_path, text):
    (tmp_path / "a").write_bytes(text)
    with pytest.raises(UserError, match=f"^{len(text)} bytes of text from .* are too few, .* context 3 needs 4"):
        len(Text(3, tmp_path))


def test_a_budget_below_one_sample_is_refused():
    with pytest.raises(UserError, match="64 bytes of text from Python's standard library are too few"):
        len(Text(64, most_bytes=64))


def test_places_without_text_are_refused_at_once(tmp_path):
    with pytest.raises(FileProblem, match=r"there is no text at .*missing: name a folder or a file"):
        Text(3, tmp_path / "missing")


@pytest.mark.parametrize(("context", "most_bytes"), [(0, 10), (2.5, 10), (3, 0), (3, True)])
def test_sizes_that_are_no_counts_are_refused(context, most_bytes):
    with pytest.raises(UserError, match="must be a whole number of at least 1"):
        Text(context, most_bytes=most_bytes)


def test_a_fingerprint_distinguishes_texts_of_the_same_length(tmp_path):
    for name, words in (("one", "abcdefgh"), ("same", "abcdefgh"), ("other", "abcdefgi")):
        (tmp_path / name).write_text(words)
    one, same, other = (Text(4, tmp_path / name).fingerprint for name in ("one", "same", "other"))
    assert one == same != other
    assert one == hashlib.sha256(b"abcdefgh").hexdigest()[:16]
