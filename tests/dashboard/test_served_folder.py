"""A link in the served folder shows nothing of another folder, whenever it was put there."""

import json
import os

import pytest

from recycle.core.events.record import Started, Stepped
from recycle.core.events.record_file import write_record
from recycle.dashboard.reading.served_folder import ServedFolder
from tests.dashboard.run_folders import make_client, write_run

SECRET = "the key is 12345"
PATHS = [
    *(f"/api/run/download?id={{}}&form={form}" for form in ("json", "csv", "perfetto")),
    *(f"/api/run{name}?id={{}}" for name in ("", "/events", "/series", "/iteration", "/recovery", "/what-if")),
]


@pytest.fixture
def secret(tmp_path):
    (path := tmp_path / "secret.txt").write_text(f"{SECRET}\n")
    return path


def assert_hidden(client, run_id, secret_text=SECRET):
    for path in (*PATHS, "/api/runs"):
        answer = client.get(path.format(run_id))
        assert secret_text not in answer.text, path


def test_a_linked_record_is_not_read_when_a_run_is_about_to_begin(tmp_path, secret):
    (folder := tmp_path / "runs" / "x").mkdir(parents=True)
    (folder / "record.jsonl").symlink_to(secret)
    client = make_client(folder)
    assert "follows no links" in client.get("/api/run?id=.").json()["problem"]
    assert client.get("/api/run/download?id=.&form=json").status_code == 422
    assert_hidden(client, ".")


def test_a_linked_record_of_another_user_s_run_is_not_read_either(tmp_path):
    elsewhere = write_run(tmp_path / "elsewhere", [Started("train", SECRET), Stepped(0, 1, 2.5, 1.0, 1.0)])
    (folder := tmp_path / "runs" / "x").mkdir(parents=True)
    (folder / "record.jsonl").symlink_to(elsewhere / "record.jsonl")
    assert_hidden(make_client(folder), ".")


def test_a_record_that_is_exchanged_for_a_link_is_not_read_any_more(tmp_path, secret):
    record = write_run(tmp_path / "runs" / "a") / "record.jsonl"
    client = make_client(tmp_path / "runs")
    assert client.get("/api/run/download?id=a&form=json").status_code == 200
    record.unlink()
    record.symlink_to(secret)
    assert client.get("/api/run/download?id=a&form=json").status_code == 422
    assert_hidden(client, "a")


def test_a_folder_that_is_exchanged_for_a_link_is_not_read_any_more(tmp_path):
    folder = write_run(tmp_path / "runs" / "a")
    client = make_client(tmp_path / "runs")
    assert client.get("/api/run?id=a").status_code == 200
    elsewhere = write_run(tmp_path / "elsewhere", [Started("train", SECRET), Stepped(0, 1, 2.5, 1.0, 1.0)])
    folder.rename(tmp_path / "away")
    folder.symlink_to(elsewhere)
    assert_hidden(client, "a")


@pytest.mark.parametrize("name", ["plan.json", "plans"])
def test_a_linked_plan_is_not_read(tmp_path, name):
    folder, elsewhere = write_run(tmp_path / "runs" / "a"), write_run(tmp_path / "elsewhere")
    (folder / name).rename(tmp_path / "away")
    (folder / name).symlink_to(elsewhere / name)
    number = 0 if name == "plan.json" else 8
    answer = make_client(tmp_path / "runs").get(f"/api/run/iteration?id=a&number={number}").json()
    assert "follows no links" in answer["plan_problem"]
    assert all(lane["planned"] is None for lane in answer["lanes"])


@pytest.mark.parametrize("name", ["summary.json", "config.toml"])
def test_a_linked_summary_or_configuration_is_not_read(tmp_path, name):
    folder = write_run(tmp_path / "runs" / "a", is_ended=False)
    (outside := tmp_path / name).write_text(json.dumps({"steps": 987}) if name == "summary.json" else "[training]\nsteps = 987\n")
    (folder / name).symlink_to(outside)
    assert_hidden(make_client(tmp_path / "runs"), "a", "987")


def test_results_of_a_campaign_that_become_a_link_are_not_read(tmp_path):
    (tmp_path / "runs").mkdir()
    text = '{"experiment": "%s", "assumptions": [], "results": {"a": {"b": [1, 2]}}}'
    (path := tmp_path / "runs" / "result.json").write_text(text % "ours")
    (tmp_path / "other.json").write_text(text % SECRET)
    client = make_client(tmp_path / "runs")
    assert client.get("/api/campaign?id=result.json").json()["title"] == "ours"
    path.unlink()
    path.symlink_to(tmp_path / "other.json")
    answer = client.get("/api/campaign?id=result.json")
    assert (answer.status_code, SECRET in answer.text) == (422, False)


def test_a_download_has_only_lines_of_a_record(tmp_path):
    record = write_run(tmp_path / "a") / "record.jsonl"
    whole = record.read_bytes()
    record.write_bytes(whole + SECRET.encode() + b'\n{"event":"else"}\n{"event":"warning"')
    assert make_client(tmp_path).get("/api/run/download?id=a&form=json").content == whole
    record.write_text(f"{SECRET}\n")
    answer = make_client(tmp_path).get("/api/run/download?id=a&form=json")
    assert (answer.status_code, SECRET in answer.text) == (422, False)


def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "record.jsonl")
    assert "no plain file" in make_client(tmp_path).get("/api/run?id=.").json()["problem"]


def test_the_served_folder_itself_may_be_a_link(tmp_path):
    write_run(tmp_path / "here" / "a")
    (tmp_path / "runs").symlink_to(tmp_path / "here")
    assert make_client(tmp_path / "runs").get("/api/run?id=a").json()["problem"] == ""


def test_a_record_by_itself_is_served(tmp_path):
    write_record(tmp_path / "one.jsonl", [Started("simulate", "x"), Stepped(0, 1, 2.5, 1.0, 1.0)])
    assert make_client(tmp_path / "one.jsonl").get("/api/run?id=.").json()["name"] == "x"
    with pytest.raises(ValueError, match="is not in the subpath"):
        ServedFolder(tmp_path).open(tmp_path.parent / "else")
