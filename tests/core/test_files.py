"""Files are written whole or not at all, and an unreadable one is explained in a sentence."""

import json
import os
import resource

import pytest

from recycle.core.errors import FileProblem
from recycle.core.files import read_json, write_text


def test_a_written_text_is_read_back_and_its_folders_are_made(tmp_path):
    path = tmp_path / "plans" / "deep" / "one.json"
    write_text(path, "µs\n")
    assert path.read_text(encoding="utf-8") == "µs\n"
    assert os.listdir(path.parent) == ["one.json"]


def test_writing_replaces_the_old_file(tmp_path):
    path = tmp_path / "one.json"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"


def test_a_file_is_readable_as_far_as_the_umask_lets_it(tmp_path):
    old = os.umask(0o027)
    try:
        write_text(tmp_path / "one.json", "text")
    finally:
        os.umask(old)
    assert (tmp_path / "one.json").stat().st_mode & 0o777 == 0o640


def test_a_write_whose_file_cannot_be_renamed_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "one.json"
    write_text(path, "old")

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(FileProblem, match=r"cannot write .*one\.json: No space left on device; make room there$"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["one.json"]


def test_a_write_that_fails_in_the_middle_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "one.json"
    write_text(path, "old")
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, most))
    try:
        with pytest.raises(FileProblem, match=r"cannot write .*one\.json: File too large$"):
            write_text(path, "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["one.json"]


def test_an_interrupted_write_leaves_the_old_file_and_stays_an_interrupt(tmp_path, monkeypatch):
    path = tmp_path / "one.json"
    write_text(path, "old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["one.json"]


def test_a_folder_that_is_a_file_cannot_be_written_to(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FileProblem, match=r"cannot write .*one\.json.*not a folder that you may write to"):
        write_text(tmp_path / "taken" / "one.json", "text")


def test_a_folder_cannot_be_overwritten_by_a_file(tmp_path):
    (tmp_path / "one.json").mkdir()
    with pytest.raises(FileProblem, match=r"cannot write .*one\.json"):
        write_text(tmp_path / "one.json", "text")
    assert os.listdir(tmp_path) == ["one.json"]


def read(path):
    return read_json(path, "recycle-plan", 1)


def test_a_file_with_our_format_and_version_is_read(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"format": "recycle-plan", "version": 1, "more": [1]}))
    assert read(path) == {"format": "recycle-plan", "version": 1, "more": [1]}


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileProblem, match=r"cannot read .*none\.json: No such file"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["", "{", '{"format": "recycle-plan", "version": 1', "not json", "[" * 100_000])
def test_a_file_that_is_not_json_is_called_corrupt(tmp_path, text):
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(FileProblem, match=r"one\.json is not JSON .*: it is corrupt or another kind of file"):
        read(tmp_path / "one.json")


def test_a_binary_file_is_called_corrupt(tmp_path):
    (tmp_path / "one.json").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(FileProblem, match="is not JSON"):
        read(tmp_path / "one.json")


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"format": "recycle-profile", "version": 1}'])
def test_a_foreign_format_is_refused(tmp_path, text):
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(FileProblem, match="is not a recycle-plan file: its format is"):
        read(tmp_path / "one.json")


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_with_both_numbers(tmp_path, version):
    (tmp_path / "one.json").write_text(json.dumps({"format": "recycle-plan", "version": version}))
    with pytest.raises(FileProblem, match=rf"version {version!r}, but this release reads version 1"):
        read(tmp_path / "one.json")


def test_a_file_problem_ends_the_command_line_with_its_own_code():
    assert FileProblem("x").exit_code == 2


def test_a_pipe_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileProblem, match="it is a device or a pipe; name a file"):
        write_text(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_is_followed_not_replaced(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    write_text(tmp_path / "link.json", "new")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"
