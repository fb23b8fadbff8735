"""`recycle simulate`: what it prints, what it writes, that a seed decides everything, and what a user can get wrong."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from recycle.cli.main import main
from recycle.core.events.record import Started
from recycle.core.events.record_file import read_record
from recycle.report.record.metrics import measure
from recycle.sim.campaign import campaign
from recycle.sim.systems.registry import SYSTEMS
from tests.cli.commands import output_of, refusal
from tests.sim.quick_plans import plan_quickly

# Steps take some milliseconds; nothing here takes long to plan.
JOB = "--model layers=6,hidden=512,heads=8,sequence=512,vocabulary=1000 --gpu a100-80 --pipelines 3 --stages 2 --microbatches 4"
DOCS = (
    "simulate --model gpt3-6.7b --gpu a100-80 --pipelines 4 --stages 8 --microbatches 32 "
    "--systems recycle,oobleck,bamboo,varuna,replica-drop,checkpoint-restart,ideal --interval 30m --hours 6 --seed 1"
)
PNG = b"\x89PNG\r\n\x1a\n"
MINUTE = 60_000_000


@pytest.fixture(autouse=True)
def _plan_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "documented" not in request.fixturenames:
        plan_quickly(monkeypatch)


def facts(arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output_of(f"simulate {JOB} {arguments} --json"))
    return found


@pytest.fixture(scope="module")
def docs_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def documented(docs_cache: Path) -> dict[str, Any]:
    """The command of the documents: run once, with its plans made in processes as a user's would be."""
    found: dict[str, Any] = json.loads(output_of(f"{DOCS} --cache {docs_cache} --json"))
    return found


def test_the_command_of_the_documents_works(documented: dict[str, Any]) -> None:
    assert list(documented) == [
        "model",
        "gpu",
        "nodes",
        "samples_per_step",
        "fault_free",
        "best_fault_free",
        "best_schedule",
        "hours",
        "failures",
        "slowdowns",
        "seed",
        "failure_model",
        "spares",
        "measured_constants",
        "systems",
    ]
    assert (documented["model"], documented["gpu"], documented["nodes"]) == ("gpt3-6.7b", "a100-80", 32)
    assert (documented["samples_per_step"], documented["hours"], documented["failures"], documented["seed"]) == (128, 6, 11, 1)
    assert list(documented["systems"]) == DOCS.split("--systems ")[1].split()[0].split(",")


def test_every_system_tells_the_same_kind_of_numbers(documented: dict[str, Any]) -> None:
    for name, run in documented["systems"].items():
        assert set(run) == {
            "throughput",
            "samples",
            "lost_samples",
            "redone_samples",
            "dropped_samples",
            "bubble_share",
            "time_us",
            "pauses_us",
            "downs_us",
            "failures",
            "joins",
            "paid",
            "one_f_one_b_share",
            "own_fault_free",
            "goodput",
            "best_share",
        }
        assert (run["failures"], run["joins"]) == (11, 0)
        times = dict(run["time_us"])
        assert times.pop("total") == sum(times.values()) == 360 * MINUTE, name
        assert run["throughput"] == pytest.approx(run["samples"] / (6 * 3600), rel=1e-5)
        assert run["one_f_one_b_share"] == pytest.approx(run["throughput"] / documented["fault_free"], abs=1e-5)
        assert run["lost_samples"] == run["redone_samples"] + run["dropped_samples"]
        assert run["best_share"] == pytest.approx(run["throughput"] / documented["best_fault_free"], abs=1e-5)
        if name == "bamboo":  # out of memory
            assert (run["own_fault_free"], run["goodput"]) == (0, None)
        else:
            assert run["goodput"] == pytest.approx(run["throughput"] / run["own_fault_free"], abs=1e-5)


def test_scheduling_and_fault_handling_are_told_apart(documented: dict[str, Any]) -> None:
    systems = documented["systems"]
    # 1F1B is what these two run while nobody is dead; ReCycle fills its bubbles, so that it is above 1F1B and not above itself.
    for name in ("replica-drop", "checkpoint-restart"):
        assert systems[name]["goodput"] == systems[name]["one_f_one_b_share"]
    assert systems["recycle"]["goodput"] < 1 < systems["recycle"]["own_fault_free"] / documented["fault_free"]
    assert documented["best_fault_free"] >= systems["recycle"]["own_fault_free"]


def test_the_systems_stand_in_the_order_that_their_policies_suggest(documented: dict[str, Any]) -> None:
    share = {name: run["one_f_one_b_share"] for name, run in documented["systems"].items()}
    assert share["bamboo"] == 0  # it does not fit
    assert share["checkpoint-restart"] < share["replica-drop"] < share["recycle"] < share["ideal"]
    assert max(share["oobleck"], share["varuna"]) < share["recycle"]
    # Without a spare nothing happens after the first of eleven failures: a twelfth of the time is left, less its checkpoints.
    assert share["checkpoint-restart"] == pytest.approx(1 / 12, rel=0.15)
    assert documented["systems"]["recycle"]["dropped_samples"] == 0
    assert documented["systems"]["recycle"]["samples"] % 128 == 0


def test_the_text_says_what_the_json_says(documented: dict[str, Any], docs_cache: Path) -> None:
    text = output_of(f"{DOCS} --cache {docs_cache}")
    lines = text.splitlines()
    assert lines[0] == "gpt3-6.7b on 32 a100-80: 4 pipelines × 8 stages, 32 micro-batches each"
    assert lines[1].startswith("6 h, failures: 11, joins: 0; fault-free 1F1B ")
    rows = {line.split()[0]: line for line in lines[6:13]}
    assert list(rows) == list(documented["systems"])
    for name, run in documented["systems"].items():
        shares = [run["one_f_one_b_share"], run["goodput"], run["best_share"]]
        assert rows[name].split()[2:5] == ["–" if share is None else f"{share:.1%}" for share in shares]
    assert re.search(r"bamboo was down for 6 h: out of memory: two stages on a GPU take \S+ GiB, but it has \S+ GiB", text)


# Same seed, same bytes.


@pytest.fixture
def outputs(folder: Path) -> Callable[[str], dict[str, bytes]]:
    def make(arguments: str) -> dict[str, bytes]:
        """All that a run gives: the JSON, the text, the picture, and the record of every system."""
        seen = {"json": output_of(f"simulate {JOB} {arguments} --json").encode()}
        seen["text"] = output_of(f"simulate {JOB} {arguments} --plot out.png --records out").encode()
        files = [folder / "out.png", *sorted((folder / "out").iterdir())]
        return seen | {path.name: path.read_bytes() for path in files}

    return make


QUESTION = "--interval 30m --rejoin 50m --hours 3 --seed 7"


def test_the_same_seed_gives_the_same_bytes_whatever_is_kept(outputs: Callable[[str], dict[str, bytes]], tmp_path: Path) -> None:
    first = outputs(f"{QUESTION} --cache {tmp_path / 'one'}")
    assert set(first) == {"json", "text", "out.png", *(f"{name}.jsonl" for name in SYSTEMS)}
    assert outputs(f"{QUESTION} --cache {tmp_path / 'one'}") == first  # read
    assert outputs(f"{QUESTION} --no-cache") == first  # made again


@pytest.mark.slow
def test_what_another_question_left_there_is_no_answer(outputs: Callable[[str], dict[str, bytes]], tmp_path: Path) -> None:
    outputs(f"--interval 10m --hours 2 --seed 3 --cache {tmp_path / 'one'}")
    assert outputs(f"{QUESTION} --cache {tmp_path / 'one'}") == outputs(f"{QUESTION} --cache {tmp_path / 'two'}")


@pytest.mark.parametrize("kind", ["--interval 30m", "--mtbf 90m"])
def test_another_seed_gives_another_run(kind: str, outputs: Callable[[str], dict[str, bytes]]) -> None:
    one, two = (outputs(f"{kind} --hours 4 --rejoin 1h --systems replica-drop,ideal --seed {seed}") for seed in (1, 2))
    assert json.loads(one["json"])["systems"]["replica-drop"] != json.loads(two["json"])["systems"]["replica-drop"]
    for name in ("text", "out.png", "replica-drop.jsonl", "ideal.jsonl"):
        assert one[name] != two[name], name


# What is kept, and where.


def test_no_cache_keeps_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    facts("--interval 30m --systems recycle,ideal --no-cache")
    assert sorted(tmp_path.rglob("*")) == [folder]


def test_results_are_kept_where_the_system_keeps_caches(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts("--systems ideal")
    assert {path.name.split("-")[0] for path in (tmp_path / "cache" / "recycle").iterdir()} == {"simulation", "timings"}
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    facts("--systems ideal")
    assert list((tmp_path / "home" / ".cache" / "recycle").glob("simulation-*.jsonl"))
    facts("--systems ideal --cache mine")
    assert list((folder / "mine").glob("simulation-*.jsonl"))


# Who leaves and joins when.


def test_without_failures_1f1b_is_as_fast_as_fault_free(folder: Path) -> None:
    found = facts("--systems replica-drop,fault-scaled,checkpoint-restart-spare")
    assert (found["hours"], found["failures"]) == (6, 0)
    assert found["systems"]["replica-drop"]["one_f_one_b_share"] == pytest.approx(1, abs=1e-6)
    assert found["systems"]["fault-scaled"]["one_f_one_b_share"] == pytest.approx(1, abs=1e-6)


def test_workers_that_come_back_are_counted_and_help(folder: Path) -> None:
    away, back = (facts(f"--systems replica-drop --interval 30m {more}") for more in ("", "--rejoin 20m"))
    assert (away["failures"], away["systems"]["replica-drop"]["joins"]) == (5, 0)  # of six workers one stays
    assert (back["failures"], back["systems"]["replica-drop"]["joins"]) == (11, 11)
    # Eleven times all pipelines stop for 10 s as one of three drops out and for 10 s as it returns, 20 min and 45 s later.
    lost_s = 11 * (10 + (20 * 60 + 45 - 10) / 3 + 10)
    assert back["systems"]["replica-drop"]["one_f_one_b_share"] == pytest.approx(1 - lost_s / 21600, abs=1e-4)
    assert away["systems"]["replica-drop"]["one_f_one_b_share"] < back["systems"]["replica-drop"]["one_f_one_b_share"]


def test_every_worker_may_fail_by_itself(folder: Path) -> None:
    found = facts("--systems ideal --mtbf 2h --rejoin 10m --hours 200")
    # Six workers that fail once in 2 h 10 min each, for 200 h: 554 on average.
    assert found["failures"] == pytest.approx(554, rel=0.15)


PUBLIC = """\
0,add,node1
0,add,node2
0,add,node3
0,add,node4
0,add,node5
0,add,node6
1800000,remove,node3
3600000,add,node9
5400000,remove,node1
5400000,remove,node2
# end 7200000
"""


def test_a_public_trace_names_nodes_as_it_likes(folder: Path) -> None:
    (folder / "trace.csv").write_text(PUBLIC)
    found = facts("--trace trace.csv --systems fault-scaled,checkpoint-restart --set ready=0s")
    assert (found["hours"], found["failures"]) == (2, 3)
    # Six nodes for 60 min, five for 30 min, four for 30 min, of 120 min.
    assert found["systems"]["fault-scaled"]["one_f_one_b_share"] == pytest.approx(
        (60 * 6 + 30 * 5 + 30 * 4) / (120 * 6), abs=1e-4
    )
    # It runs for the first half hour, and from when node9 fills the place until the next failure.
    assert found["systems"]["checkpoint-restart"]["time_us"]["down"] == 60 * MINUTE
    shorter = facts("--trace trace.csv --systems fault-scaled --hours 1")
    assert (shorter["hours"], shorter["failures"]) == (1, 1)
    longer = facts("--trace trace.csv --systems fault-scaled --hours 4")
    assert (longer["hours"], longer["failures"]) == (4, 3)


def test_nodes_beyond_the_cluster_are_spare(folder: Path) -> None:
    names = [f"node{number}" for number in range(1, 9)]
    adds = "".join(f"0,add,{name}\n" for name in names)
    # The second is a spare that leaves; the first is replaced by a spare at once.
    (folder / "trace.csv").write_text(f"{adds}1800000,remove,node1\n2400000,remove,node8\n# end 3600000\n")
    found = facts("--trace trace.csv")
    for name, run in found["systems"].items():
        assert run["failures"] == 2
        assert run["time_us"]["down"] == 0, name
    assert found["systems"]["fault-scaled"]["one_f_one_b_share"] == pytest.approx(1, abs=1e-6)
    assert found["systems"]["replica-drop"]["pauses_us"] == {"reconfigure": 10_000_000}
    assert found["systems"]["recycle"]["pauses_us"]["detect"] == 1_000_000


def test_a_made_trace_is_the_same_as_the_built_in_one(folder: Path) -> None:
    output_of("trace make --kind every --pipelines 3 --stages 2 --interval 30m --rejoin 1h --hours 5 --seed 9 --out trace.csv")
    question = "--systems oobleck,varuna --set varuna.restart=20s"
    made = facts(f"{question} --trace trace.csv --seed 9")
    assert made.pop("seed") is None  # a trace needs none
    assert made.items() < facts(f"{question} --interval 30m --rejoin 1h --hours 5 --seed 9").items()


def test_more_failures_than_a_policy_survives_are_down_time(folder: Path) -> None:
    lines = [f"0,add,W{pipeline}_{stage}\n" for pipeline in range(3) for stage in range(2)]
    gone = [line.replace("0,add", "1800000,remove") for line in lines]
    (folder / "trace.csv").write_text("".join([*lines, *gone, "# end 3600000\n"]))
    found = facts("--trace trace.csv")
    assert list(found["systems"]) == list(SYSTEMS)
    for name, run in found["systems"].items():
        assert run["time_us"]["down"] == pytest.approx(30 * MINUTE, abs=MINUTE / 10), name
    text = output_of(f"simulate {JOB} --trace trace.csv")
    assert "recycle was down for 30 min: no worker is left at stage 0: the job waits for a node" in text
    assert "replica-drop was down for 30 min: every pipeline misses a worker: the job waits" in text


# Assumptions.


def test_the_fault_free_figure_becomes_the_given_one_and_steps_scale_with_it(folder: Path) -> None:
    estimated, given = facts("--systems replica-drop"), facts("--systems replica-drop,ideal --fault-free 4.5")
    assert estimated["fault_free"] > 1000
    assert given["fault_free"] == pytest.approx(4.5, rel=1e-6)
    assert given["systems"]["replica-drop"]["throughput"] == pytest.approx(4.5, rel=1e-3)
    other = facts("--systems ideal --fault-free 9")
    # The same shares of twice the speed, but for rounding.
    assert other["systems"]["ideal"]["throughput"] == pytest.approx(2 * given["systems"]["ideal"]["throughput"], rel=1e-3)


def test_a_constant_is_set_by_a_file_and_by_name_and_the_name_counts_more(folder: Path) -> None:
    (folder / "constants.toml").write_text('[oobleck]\nreconfigure = "57s"\n[bamboo]\nrebalance = "7s"\n')
    question = "--systems oobleck,bamboo --interval 2h"  # two failures
    pauses = {
        more: {name: run["pauses_us"] for name, run in facts(f"{question} {more}")["systems"].items()}
        for more in ("--set oobleck.reconfigure=57s", "--constants constants.toml")
    }
    for found in pauses.values():
        assert found["oobleck"] == {"reconfigure": 114_000_000}
    assert pauses["--constants constants.toml"]["bamboo"] == {"rebalance": 14_000_000}
    both = facts(f"{question} --constants constants.toml --set oobleck.reconfigure=30s --set bamboo.rebalance=1s")["systems"]
    assert both["oobleck"]["pauses_us"] == {"reconfigure": 60_000_000}
    assert both["bamboo"]["pauses_us"] == {"rebalance": 2_000_000}


# Files.


def test_a_picture_is_written(folder: Path) -> None:
    text = output_of(f"simulate {JOB} --interval 1h --systems replica-drop,ideal --plot pictures/out.png")
    assert text.endswith("\nwrote pictures/out.png\n")
    assert (folder / "pictures" / "out.png").read_bytes().startswith(PNG)
    assert json.loads(output_of(f"simulate {JOB} --systems ideal --plot quiet.png --json"))["failures"] == 0
    assert (folder / "quiet.png").read_bytes().startswith(PNG)


def test_the_record_of_every_system_can_be_read_and_says_the_same(folder: Path) -> None:
    found = facts("--interval 1h --rejoin 1h --records records")
    assert sorted(path.name for path in (folder / "records").iterdir()) == sorted(f"{name}.jsonl" for name in SYSTEMS)
    for name, run in found["systems"].items():
        first, *rest = read_record(folder / "records" / f"{name}.jsonl")
        assert isinstance(first, Started)
        assert (first.source, first.name.split(":")[0]) == ("simulate", name)
        metrics = measure(rest)
        assert (metrics.samples, metrics.num_failures, metrics.num_joins) == (run["samples"], run["failures"], run["joins"])
        assert metrics.total_us == run["time_us"]["total"]


# What a user can get wrong.


SHAPE = "--pipelines 3 --stages 2 --microbatches 4"
MODEL = "--model layers=6,hidden=512,heads=8,sequence=512,vocabulary=1000"
# (arguments, what the sentence says)
WRONG = {
    "no model": (f"--gpu a100-80 {SHAPE}", r"--model is missing: give --model and --gpu"),
    "an unknown model": (f"--model gpt9 --gpu a100-80 {SHAPE}", r"no model is called 'gpt9': choose from gpt3-medium"),
    "an unknown GPU": (f"{MODEL} --gpu abacus {SHAPE}", r"no GPU is called 'abacus': choose from a100-40, a100-80"),
    "a model that does not fit": (
        f"--model 145.6b --gpu a100-80 {SHAPE}",
        r"145.6b does not fit on a100-80: .* take more stages or GPUs",
    ),
    "more stages than layers": (
        f"{MODEL} --gpu a100-80 --pipelines 3 --stages 7 --microbatches 4",
        r"7 stages .* 6 .*layers|6 layers .* 7 stages",
    ),
    "no pipeline": (f"{MODEL} --gpu a100-80 --pipelines 0 --stages 2 --microbatches 4", r"the number of pipelines is 0"),
    "negative stages": (f"{MODEL} --gpu a100-80 --pipelines 3 --stages=-2 --microbatches 4", r"the number of stages is -2"),
    "no micro-batch": (f"{MODEL} --gpu a100-80 --pipelines 3 --stages 2 --microbatches 0", r"the number of microbatches is 0"),
    "absurd micro-batches": (
        f"{MODEL} --gpu a100-80 --pipelines 3 --stages 2 --microbatches 1000000000",
        r"are more than can be planned",
    ),
    "no GPU in a worker": (f"{JOB} --tensor-parallel 0", r"tensor_parallel is 0, but it must be a whole number of at least 1"),
    "no part of a sequence": (
        f"{JOB} --context-parallel 0",
        r"context_parallel is 0, but it must be a whole number of at least 1",
    ),
    "an unknown system": (
        f"{JOB} --systems recycle,magic",
        r"'magic' is not a system: choose from recycle, .*, oobleck, .* or all",
    ),
    "a system twice": (f"{JOB} --systems ideal,recycle,ideal", r"ideal is named twice: name each system once"),
    "no system": (f"{JOB} --systems ,", r"no system is named: choose from recycle"),
    "interval and trace": (f"{JOB} --interval 1h --trace trace.csv", r"--interval and --trace say the same thing"),
    "interval and mtbf": (
        f"{JOB} --interval 1h --mtbf 1d",
        r"--interval and --mtbf say the same thing, who fails when: give one",
    ),
    "rejoin and trace": (f"{JOB} --rejoin 1h --trace trace.csv", r"a trace says itself who returns when: leave --rejoin out"),
    "no hours": (f"{JOB} --hours 0", r"--hours is 0.0, but it must be above 0 and at most ten years"),
    "negative hours": (f"{JOB} --hours=-6", r"--hours is -6.0, but it must be above 0"),
    "hours that are not a number": (f"{JOB} --hours nan", r"--hours is nan, but it must be above 0"),
    "infinite hours": (f"{JOB} --hours inf", r"--hours is inf, but it must be above 0"),
    "absurd hours": (f"{JOB} --hours 1e9", r"--hours is 1000000000.0, but it must be above 0 and at most ten years"),
    "hours of no length": (f"{JOB} --hours 1e-9", r"is 4 µs, but it must be from 1 ms to 30 years"),
    "hours that are a word": (f"{JOB} --hours many", r"argument --hours: invalid float value: 'many'"),
    "interval 0": (f"{JOB} --interval 0m", r"the interval is 0 s, but it must be from 1 ms to 30 years"),
    "a negative interval": (f"{JOB} --interval=-5m", r"'-5m' is not a duration: write a number and one of ms, s"),
    "an empty interval": (f"{JOB} --interval ''", r"'' is not a duration"),
    "an interval without a unit": (f"{JOB} --interval 30", r"'30' is not a duration"),
    "an absurd interval": (f"{JOB} --interval 99999999d", r"'99999999d' is longer than 100 years"),
    "too many failures": (f"{JOB} --interval 1ms --rejoin 1s --hours 9", r"the trace would have about .* changes, more than"),
    "mtbf 0": (f"{JOB} --mtbf 0s", r"the mean time between failures is 0 s, but it must be from 1 ms"),
    "a negative mtbf": (f"{JOB} --mtbf=-1d", r"'-1d' is not a duration"),
    "an empty mtbf": (f"{JOB} --mtbf ''", r"'' is not a duration"),
    "rejoin 0": (f"{JOB} --interval 1h --rejoin 0s", r"the time to rejoin is 0 s, but it must be from 1 ms"),
    "an empty rejoin": (f"{JOB} --interval 1h --rejoin ''", r"'' is not a duration"),
    "no speed": (f"{JOB} --fault-free 0", r"--fault-free is 0.0, but it must be a number of samples a second above 0"),
    "a negative speed": (f"{JOB} --fault-free=-5", r"--fault-free is -5.0, but it must be a number of samples a second above 0"),
    "a speed that is not a number": (f"{JOB} --fault-free nan", r"--fault-free is nan, but it must be a number"),
    "an infinite speed": (f"{JOB} --fault-free inf", r"--fault-free is inf, but it must be a number"),
    "an absurd speed": (f"{JOB} --fault-free 1e9", r"--fault-free is 1e\+09, but the estimate is \d+ samples a second"),
    "absurdly slow": (f"{JOB} --fault-free 1e-6", r"--fault-free is 1e-06, but the estimate is \d+ samples a second"),
    "a negative seed": (f"{JOB} --seed=-1", r"the seed is -1, but it must be a whole number of at least 0"),
    "a negative seed for failures": (f"{JOB} --interval 1h --seed=-1", r"the seed is -1, but it must be a whole number"),
    "half a seed": (f"{JOB} --seed 0.5", r"argument --seed: invalid int value: '0.5'"),
    "an unknown constant": (
        f"{JOB} --set oobleck.colour=57s",
        r"'oobleck.colour' is not a constant: this system has reconfigure",
    ),
    "a constant of nobody": (
        f"{JOB} --set magic.pause=1s",
        r"'magic.pause' is not a constant: it begins with ready, hang or one of",
    ),
    "a constant without a value": (f"{JOB} --set ready", r"'ready' does not set a constant: write system.name=value"),
    "a constant without a unit": (f"{JOB} --set ready=7", r"'7' is not a duration"),
    "missing constants": (f"{JOB} --constants nowhere.toml", r"cannot read nowhere.toml: No such file or directory"),
    "constants that are not TOML": (f"{JOB} --constants trace.csv", r"trace.csv is not TOML: "),
    "constants that nobody knows": (f"{JOB} --constants odd.toml", r"'recycle.speed' is not a constant: this system has detect"),
    "a missing trace": (f"{JOB} --trace nowhere.csv", r"cannot read nowhere.csv: No such file or directory"),
    "a trace that is a folder": (f"{JOB} --trace .", r"cannot read \.: Is a directory"),
    "a picture that is a folder": (f"{JOB} --plot .", r"cannot write \.: it is a folder; name a file"),
    "a picture of another kind": (f"{JOB} --plot out.jpg", r"cannot write out.jpg: it would be a .png file .* call it out.png"),
    "a picture inside a file": (f"{JOB} --plot trace.csv/out.png", r"is not a folder that you may write to; choose another one"),
    "records inside a file": (f"{JOB} --records trace.csv", r"trace.csv is not a folder that you may write to"),
    "a cache inside a file": (f"{JOB} --cache trace.csv/cache", r"trace.csv is not a folder that you may write to"),
    "a cache that is a file": (f"{JOB} --cache trace.csv", r"trace.csv is not a folder that you may write to"),
    "an unknown option": (f"{JOB} --colour red", r"unrecognized arguments: --colour red"),
}


@pytest.fixture
def files(folder: Path) -> Path:
    (folder / "trace.csv").write_text("0,add,W0_0\n0,add,W0_1\n# end 3600000\n")
    (folder / "odd.toml").write_text('[recycle]\nspeed = "9s"\n')
    return folder


@pytest.mark.parametrize(("arguments", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_explained(arguments: str, sentence: str, files: Path) -> None:
    assert re.search(sentence, refusal(f"simulate {arguments}"))


@pytest.mark.parametrize(
    "experiment", ["--plot .", "--records trace.csv", "--cache trace.csv", "--interval 0s", "--systems magic"]
)
def test_what_cannot_be_used_is_found_before_anything_is_planned(
    experiment: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recycle.sim.iteration_times._plan", lambda given: pytest.fail("planned in vain"))
    assert refusal(f"simulate {JOB} {experiment}").startswith("recycle simulate: ")


WRONG_TRACES = {
    "empty": (b"", r"trace.csv is not a usable trace: the trace has no node: give"),
    "comments only": (b"# end 1000\n", r"the trace has no node: give"),
    "binary": (b"\xff\xfe\0\1", r"trace.csv is not text"),
    "out of order": (b"0,add,W0_0\n9,remove,W0_0\n5,add,W0_0\n", r"W0_0 changes at 5 ms, after a change at 9 ms: sort the trace"),
    "an absent node leaves": (b"0,add,W0_0\n5,remove,W0_1\n", r"W0_1 is removed, but it is not there at 5 ms"),
    "a present node joins": (b"0,add,W0_0\n5,add,W0_0\n", r"W0_0 is added, but it is there already at 5 ms"),
    "another word": (b"0,add,W0_0\n5,explode,W0_0\n", r"line 2 is '5,explode,W0_0', but a change is written"),
    "no time": (b"0,add,W0_0\n", r"the trace ends at 0 ms, so there is no time to look at"),
    "a worker of another cluster": (
        b"0,add,W0_0\n0,add,W9_9\n# end 3600000\n",
        r"the trace names W9_9, but the cluster has 3 pipelines of 2 stages: use a trace of this cluster",
    ),
    "such a worker later": (b"0,add,W0_0\n9000,add,W0_2\n# end 3600000\n", r"the trace names W0_2, but the cluster has"),
}


@pytest.mark.parametrize(("data", "sentence"), WRONG_TRACES.values(), ids=WRONG_TRACES.keys())
def test_a_trace_that_cannot_be_used_is_explained(data: bytes, sentence: str, folder: Path) -> None:
    (folder / "trace.csv").write_bytes(data)
    assert re.search(sentence, refusal(f"simulate {JOB} --trace trace.csv --plot out.png --records records"))


def test_help_shows_the_systems_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["simulate", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in SYSTEMS)
    assert "recycle simulate --model" in text.split("examples:")[1]


def test_slow_workers_slow_down_the_systems_that_wait_for_them() -> None:
    names = "recycle-rerouting,elaswave,fault-scaled"
    quiet, slow = (facts(f"--systems {names} --hours 1 {more} --no-cache") for more in ("", "--slow 10m,5m,0.5"))
    assert (quiet["slowdowns"], slow["slowdowns"] > 0) == (0, True)
    kept = {
        name: slow["systems"][name]["one_f_one_b_share"] / quiet["systems"][name]["one_f_one_b_share"]
        for name in names.split(",")
    }
    # A worker is slow for a third of the time, and most of the time one of six is.
    assert kept["elaswave"] < kept["fault-scaled"] < 1
    assert kept["recycle-rerouting"] < kept["fault-scaled"]


def test_a_worker_may_be_tensor_and_context_parallel_gpus() -> None:
    model = "--model family=llama,layers=4,hidden=512,heads=8,kv_heads=2,ffn=1024,sequence=512,vocabulary=1000"
    shape = "--gpu l40s --pipelines 2 --stages 2 --microbatches 4 --systems ideal --no-cache"
    text = output_of(f"simulate {model} {shape} --tensor-parallel 2 --context-parallel 4")
    assert "on 4 x 8 GPUs l40s: 2 pipelines" in text


def test_shared_layers_are_a_number_that_the_stages_have() -> None:
    none, one = (facts(f"--systems recycle --hours 1 --shared-layers {num} --no-cache") for num in (0, 1))
    # In a job as small as this one, nothing is gained by them, and reductions and steps take longer.
    assert 0 < one["systems"]["recycle"]["one_f_one_b_share"] < none["systems"]["recycle"]["one_f_one_b_share"]
    assert "but stage 0 has only 3" in refusal(f"simulate {JOB} --systems recycle --shared-layers 4 --no-cache")
    assert "a whole number of layers from 0 on, or auto" in refusal(f"simulate {JOB} --systems recycle --shared-layers two")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--slow often", "MTBF,TIME,SPEED such as 50h,10m,0.6, or published"),
        ("--slow 50h,10m,7", "its speed is a number from 0.001 to 1"),
        ("--drift 1h", "its speed is a number from 0.001 to 1"),
    ],
)
def test_a_slowness_that_cannot_be_is_refused(options: str, problem: str) -> None:
    assert problem in refusal(f"simulate {JOB} --systems ideal {options} --no-cache")


def test_a_trace_says_itself_who_is_slow(folder: Path) -> None:
    (folder / "trace.csv").write_text("0,add,W0_0\n# end 60000\n")
    assert "a trace says itself who is slow when" in refusal(f"simulate {JOB} --trace trace.csv --drift 1h,0.9")


# Several seeds.

MONTH = "--mtbf 5h --rejoin 1h --hours 6 --systems recycle,replica-drop,bamboo --shared-layers 0 --no-cache"


def test_means_over_seeds_are_those_of_the_seeds_one_by_one() -> None:
    found = facts(f"{MONTH} --seed 3 --seeds 3")
    ones = [facts(f"{MONTH} --seed {seed}") for seed in (3, 4, 5)]
    assert (found["seed"], found["seeds"], found["failures"]) == (3, 3, [one["failures"] for one in ones])
    assert len(set(found["failures"])) > 1
    for name, system in found["systems"].items():
        runs = [one["systems"][name] for one in ones]
        for key in ("throughput", "one_f_one_b_share", "goodput", "best_share"):
            values = [run[key] for run in runs]
            interval = system[key]
            assert interval["mean"] == pytest.approx(sum(values) / 3, rel=1e-5)
            spread = stats.t.interval(0.9, 2, loc=sum(values) / 3, scale=stats.sem(values))
            assert [interval["low"], interval["high"]] == pytest.approx(list(spread), rel=1e-4, abs=1e-5)
        assert [run["samples"] for run in system["runs"]] == [run["samples"] for run in runs]


def test_the_text_of_several_seeds_says_what_its_intervals_are() -> None:
    lines = output_of(f"simulate {JOB} {MONTH} --seeds 2").splitlines()
    assert re.fullmatch(r"means of 2 seeds, 6 h each, with \d+ to \d+ failures", lines[4])
    assert "90 % interval" in lines[5]
    assert re.match(r"recycle +\S+ ± \S+ +\S+% ± \S+%", lines[8])


def test_seeds_that_were_simulated_before_are_not_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = f"simulate {JOB} --mtbf 5h --hours 6 --systems ideal,fault-scaled --json --cache {tmp_path}"
    simulated: list[str] = []
    real = campaign.simulate_trace

    def counted(system: Any, *rest: Any) -> Any:
        if len(simulated) == 3:
            raise KeyboardInterrupt
        simulated.append(system.name)
        return real(system, *rest)

    monkeypatch.setattr(campaign, "simulate_trace", counted)
    with pytest.raises(BaseException):  # noqa: B017, PT011 -- the command is stopped by hand
        output_of(f"{arguments} --seeds 3")
    simulated.clear()
    found = json.loads(output_of(f"{arguments} --seeds 3"))
    assert len(simulated) == 3  # of six
    assert len(found["systems"]["ideal"]["runs"]) == 3
    monkeypatch.setattr(campaign, "simulate_trace", real)
    assert json.loads(output_of(f"{arguments} --seeds 3")) == found


def test_every_seed_has_its_record(folder: Path) -> None:
    output_of(f"simulate {JOB} {MONTH} --seed 7 --seeds 2 --records out --plot out.png")
    assert sorted(path.name for path in (folder / "out").iterdir()) == sorted(
        f"{name}-seed{seed}.jsonl" for name in ("recycle", "replica-drop", "bamboo") for seed in (7, 8)
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [("--seeds 0", "--seeds is 0"), ("--seeds 2 --trace trace.csv", "a trace is not random")],
)
def test_seeds_that_make_no_sense_are_refused(folder: Path, arguments: str, says: str) -> None:
    (folder / "trace.csv").write_text("0,add,W0_0\n# end 1000\n")
    assert says in refusal(f"simulate {JOB} {arguments}")
