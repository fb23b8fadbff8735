"""Wrong input of a user: one sentence on stderr and exit code 2, with nothing written."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from recycle.cli.main import main
from recycle.core.profile import Profile
from tests.cli.commands import refusal
from tests.plans import make_1f1b_plan

SHAPE = "--pipelines 2 --stages 2 --microbatches 2"
GOOD = f"{SHAPE} --costs 1,1,1"


# (arguments of plan, what the sentence says)
WRONG = {
    "a stage with no live worker": (f"{GOOD} --fail W0_1,W1_1", r"stage 1 has no live worker: all 2 of its peers failed"),
    "unknown worker": (f"{GOOD} --fail W2_0", r"W2_0 is not a worker of this cluster: pipelines are 0 to 1, stages 0 to 1"),
    "unknown stage": (f"{GOOD} --fail W0_7", r"W0_7 is not a worker of this cluster"),
    "failed twice": (f"{GOOD} --fail W0_1,W0_1", r"W0_1 is named as failed twice"),
    "malformed worker": (f"{GOOD} --fail w0-1", r"'w0-1' is not a worker: write W<pipeline>_<stage>, such as W1_2"),
    "worker with a full-width digit": (f"{GOOD} --fail W０_1", r"'W０_1' is not a worker"),
    "output without a name": (f"{GOOD} --out ''", r"argument --out: the name is empty: name a file or folder"),
    "no pipeline": ("--pipelines 0 --stages 2 --microbatches 2 --costs 1,1,1", r"the number of pipelines is 0, .* at least 1"),
    "negative stages": ("--pipelines 2 --stages -1 --microbatches 2 --costs 1,1,1", r"the number of stages is -1"),
    "no micro-batch": ("--pipelines 2 --stages 2 --microbatches 0 --costs 1,1,1", r"the number of microbatches is 0"),
    "half a stage": ("--pipelines 2 --stages 1.5 --microbatches 2 --costs 1,1,1", r"argument --stages: invalid int value: '1.5'"),
    "no stages given": ("--pipelines 2 --microbatches 2 --costs 1,1,1", r"the following arguments are required: --stages"),
    "zero cost": (f"{SHAPE} --costs 0,1,1", r"costs are '0,1,1', but each of F, I and W takes at least 1 µs"),
    "negative cost": (f"{SHAPE} --costs=-1,1,1", r"costs are '-1,1,1', but each of F, I and W takes at least 1 µs"),
    "two costs": (f"{SHAPE} --costs 1,1", r"costs are '1,1', but they must be three whole numbers"),
    "four costs": (f"{SHAPE} --costs 1,1,1,1", r"costs are '1,1,1,1', but they must be three whole numbers"),
    "costs that are words": (f"{SHAPE} --costs a,b,c", r"costs are 'a,b,c', but they must be three whole numbers"),
    "cost that is not a number": (f"{SHAPE} --costs nan,1,1", r"costs are 'nan,1,1', but they must be three whole numbers"),
    "no costs": (SHAPE, r"give the costs of the ops once: either --costs F,I,W or --profile FILE"),
    "negative communication": (f"{GOOD} --comm -1", r"latency_us is -1, but it must be a whole number of at least 0"),
    "no memory": (f"{GOOD} --memory 0", r"the memory of stage 0 is 0 microbatches, too little .* the least that works is 1"),
    "no memory at one stage": (f"{GOOD} --memory 1,0", r"the memory of stage 1 is 0 microbatches, .* the least that works is 1"),
    "memory for three stages": (f"{GOOD} --memory 1,2,3", r"memory is given for 3 stages, but there are 2"),
    "memory that is a word": (f"{GOOD} --memory plenty", r"memory is 'plenty', but it must be micro-batches in flight"),
    "bytes without sizes": (f"{GOOD} --memory 80GiB", r"memory is '80GiB', but nothing says how large an activation is"),
    "missing profile": (f"{SHAPE} --profile nowhere.json", r"profile nowhere.json: cannot read nowhere.json: No such file"),
    "failures by name and number": (f"{GOOD} --fail W0_1 --failures 1", r"--failures: not allowed with argument --fail"),
    "library without a folder": (f"{GOOD} --library", r"a library needs a folder: give --out"),
    "library with failures": (f"{GOOD} --library --out plans --failures 1", r"leave --fail and --failures out"),
    "unknown technique": (
        f"{GOOD} --techniques magic",
        r"'magic' is not a technique: choose from adaptive, decoupled, staggered",
    ),
    "unknown method": (f"{GOOD} --method magic", r"argument --method: invalid choice: 'magic' \(choose from .*greedy"),
    "failures without adaptive": (f"{GOOD} --fail W0_1 --techniques none", r"W0_1 failed, but only the technique 'adaptive'"),
    "a number of them too": (f"{GOOD} --failures 1 --techniques none", r"failed, but only the technique 'adaptive'"),
    "negative failures": (f"{GOOD} --failures -1", r"-1 failures cannot be planned for: between 0 and 2 workers"),
    "absurd failures": (f"{GOOD} --failures 1000000", r"1000000 failures cannot be planned for: between 0 and 2 workers"),
    "half a failure": (f"{GOOD} --failures 0.5", r"argument --failures: invalid int value: '0.5'"),
    "absurd costs": (
        "--pipelines 2 --stages 2 --microbatches 2 --costs 999999999999999999,1,1",
        r"forward_us is larger than 1000000000000000: that cannot be meant",
    ),
    "costs that add up to too much": (
        "--pipelines 9 --stages 9 --microbatches 99 --costs 999999999999999,1,1",
        r"more than the planner can count: give costs in a coarser unit",
    ),
    "absurd sizes": ("--pipelines 1000 --stages 1000 --microbatches 1000 --costs 1,1,1", r"are more than can be planned"),
    "absurd memory": (f"{GOOD} --memory 99999999999999999999999999", r"larger than a petabyte: that cannot be meant"),
    "no time": (f"{GOOD} --time-limit 0", r"the time limit is 0.0 seconds, but it must be a number above 0"),
    "negative time": (f"{GOOD} --time-limit -3", r"the time limit is -3.0 seconds, but it must be a number above 0"),
    "time that is not a number": (f"{GOOD} --time-limit nan", r"the time limit is nan seconds, but it must be a number above 0"),
    "no time for any failure": (
        f"{GOOD} --failures 1 --time-limit 0",
        r"the time limit is 0.0 seconds, but it must be a number above 0",
    ),
    "nan time for any failure": (f"{GOOD} --failures 1 --time-limit nan", r"the time limit is nan seconds"),
    "no time for a library": (f"{GOOD} --library --out plans --time-limit 0", r"the time limit is 0.0 seconds"),
    "library without adaptive": (f"{GOOD} --library --out plans --techniques none --max-failures 1", r"technique 'adaptive'"),
    "no process": (f"{GOOD} --library --out plans --jobs 0", r"--jobs is 0, but at least 1 process must plan"),
    "negative share": (f"{GOOD} --library --out plans --max-failures=-5%", r"'-5%' is neither a count nor a share"),
    "share that is a word": (f"{GOOD} --library --out plans --max-failures many", r"'many' is neither a count nor a share"),
    "unknown option": (f"{GOOD} --colour red", r"unrecognized arguments: --colour red"),
}


@pytest.mark.parametrize(("arguments", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_argument_is_explained(arguments: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = "" if "--library" in arguments else "--out plan.json"
    assert re.search(sentence, refusal(f"plan {arguments} {out}"))


def profile_text(**changes: Any) -> str:
    """A profile of two stages, each with 100 bytes of activations and 1000 of parameters, with changes to its second stage."""
    data = Profile.uniform(2, 1, 1, 1).to_json()
    sizes = {"activation_bytes": 100, "weight_held_bytes": 40, "static_bytes": 1000}
    data["stages"] = [stage | sizes for stage in data["stages"]]
    data["stages"][1] |= changes
    return json.dumps(data)


def without(key: str) -> str:
    data = json.loads(profile_text())
    del data["stages"][1][key]
    return json.dumps(data)


def top_level(**changes: Any) -> str:
    return json.dumps(json.loads(profile_text()) | changes)


WRONG_PROFILES = {
    "a stage too few": (top_level(stages=json.loads(profile_text())["stages"][:1]), r"describes 1 stages, but the cluster has 2"),
    "a stage that is null": (
        top_level(stages=[json.loads(profile_text())["stages"][0], None]),
        r"stage 1 is missing: it is None",
    ),
    "no stages": (top_level(stages=[]), r"the profile has no stage"),
    "stages that are a number": (top_level(stages=7), r"the profile has no list of stages"),
    "not a number": (profile_text(forward_us=math.nan), r"stage 1: forward_us is nan, but it must be a whole number"),
    "infinite": (profile_text(weight_us=math.inf), r"stage 1: weight_us is inf, but it must be a whole number"),
    "zero": (profile_text(input_us=0), r"stage 1: input_us is 0, but it must be a whole number of at least 1"),
    "negative": (profile_text(optimizer_us=-5), r"stage 1: optimizer_us is -5, but it must be a whole number of at least 0"),
    "a text": (profile_text(forward_us="3"), r"stage 1: forward_us is '3', but it must be a whole number"),
    "a missing key": (without("weight_us"), r"stage 1 lacks weight_us: every stage needs its four costs"),
    "an unknown key": (profile_text(color=3), r"stage 1 has unknown keys color: known are "),
    "fused shorter than its part": (profile_text(input_us=9), r"stage 1: fused_us is 2, less than input_us 9"),
    "a link that is not a number": (top_level(stage_link={"latency_us": 0, "bytes_per_us": math.nan}), r"bytes_per_us is nan"),
    "a link with an unknown key": (top_level(peer_link={"speed": 3}), r"the profile's links are malformed"),
    "not JSON": ("forward_us = 3", r"is not JSON"),
    "cut short": (profile_text()[:100], r"is not JSON"),
    "a list": ("[]", r"is not a recycle-profile file"),
    "another format": (
        '{"format": "recycle-plan", "version": 1}',
        r"is not a recycle-profile file: its format is 'recycle-plan'",
    ),
    "another version": (top_level(version=99), r"has recycle-profile version 99, but this release reads version 1"),
}


@pytest.mark.parametrize(("text", "sentence"), WRONG_PROFILES.values(), ids=WRONG_PROFILES.keys())
def test_a_wrong_profile_is_explained(text: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "profile.json").write_text(text)
    assert re.search(sentence, refusal(f"plan {SHAPE} --profile profile.json --out plan.json"))


def test_too_few_bytes_are_refused_with_the_least_that_works(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "profile.json").write_text(profile_text())
    command = f"plan {SHAPE} --profile profile.json --method greedy"
    message = refusal(f"{command} --memory 1099B")
    assert re.search(r"stage 0 has 1.1 KiB of memory, too little .* the least that works is 1.1 KiB \(1100 bytes:", message)
    assert main(shlex.split(f"{command} --memory 1100B")) == 0


def test_communication_time_beside_a_profile_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "profile.json").write_text(profile_text())
    assert "a profile has its own links" in refusal(f"plan {SHAPE} --profile profile.json --comm 3")
    assert "either --costs F,I,W or --profile FILE" in refusal(f"plan {GOOD} --profile profile.json")


@pytest.mark.parametrize("command", ["show", "check"])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("{", r"plan.json is not JSON", id="cut short"),
        pytest.param("\0\1\2", r"plan.json is not JSON", id="binary"),
        pytest.param("[1, 2]", r"is not a recycle-plan file: its format is None", id="a list"),
        pytest.param('{"name": "left-pad"}', r"is not a recycle-plan file: its format is None", id="foreign"),
        pytest.param('{"format": "recycle-profile"}', r"its format is 'recycle-profile'", id="a profile"),
        pytest.param('{"format": "recycle-plan", "version": 2}', r"version 2, but this release reads version 1", id="version"),
        pytest.param('{"format": "recycle-plan", "version": 1}', r"plan.json is not a whole plan", id="a head only"),
    ],
)
def test_a_file_that_is_no_plan_is_explained(
    command: str, text: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "plan.json").write_text(text)
    assert re.search(sentence, refusal(f"{command} plan.json"))


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_damaged_plan_is_explained(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = make_1f1b_plan().dumps()
    for old, new in (('"0:0F0', '"0:0X0'), ('"0:0F0', '"x:0F0'), ('"W0_0"', '"V0_0"'), ('"pipelines": 3', '"pipelines": 0')):
        assert old in good
        (folder / "plan.json").write_text(good.replace(old, new, 1))
        assert "plan.json is not a usable plan: " in refusal(f"{command} plan.json")


@pytest.mark.parametrize("command", ["show plan.json", "check plan.json"])
def test_a_missing_plan_is_explained(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot read plan.json: No such file or directory" in refusal(command)


@pytest.mark.parametrize("command", [f"plan {GOOD}", f"plan {GOOD} --library", "estimate --model 6.7b --gpu h100 --stages 2"])
def test_a_place_that_cannot_be_written_is_found_before_the_work(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").write_text("kept")
    assert "is not a folder that you may write to; choose another one" in refusal(f"{command} --out file/inside/plan.json")
    assert (folder / "file").read_text() == "kept"


def test_a_folder_is_no_place_for_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"cannot write {folder}: it is a folder; name a file" in refusal(f"plan {GOOD} --out {folder}")


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("", r"the following arguments are required: COMMAND"),
        ("fly", r"argument COMMAND: invalid choice: 'fly'"),
        ("estimate --model gpt9 --gpu h100 --stages 2", r"no model is called 'gpt9': choose from gpt3-medium"),
        ("estimate --model 6.7b --gpu abacus --stages 2", r"no GPU is called 'abacus': choose from a100-40, a100-80"),
        ("estimate --model 6.7b --gpu h100 --stages 0", r"stages"),
        ("show", r"the following arguments are required: PLAN"),
        ("show .", r"cannot read \.: it is a folder; name a recycle-plan file"),
        (
            "worker 127.0.0.1:1 --token-file nothere",
            r"cannot read the token in nothere: .*; copy the file from the coordinator's",
        ),
        ("show plan.json --colour red", r"^recycle show: unrecognized arguments: --colour red; see 'recycle show --help'$"),
    ],
)
def test_a_wrong_command_is_explained(command: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(sentence, refusal(command))


@pytest.mark.parametrize("command", ["show /dev/zero", "check /dev/random"])
def test_a_device_that_never_ends_is_not_read(command: str) -> None:
    assert "it is a device, not a file" in refusal(command)
