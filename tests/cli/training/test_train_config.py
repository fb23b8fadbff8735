"""The configuration of a training run: defaults, a file, flags; what is refused, and in which words."""

import argparse
import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle.cli.training.train_config import TrainConfig, add_config_arguments, changes, load_config, read_config
from recycle.cli.training.train_sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    LogSection,
    ModelSection,
    TrainingSection,
)
from recycle.core.errors import FileProblem, UserError

DEFAULTS = """
[cluster]
pipelines = 3
stages = 4
microbatches = 6
dead = ""
speed = ""
techniques = "adaptive,decoupled,staggered"
costs = ""
memory = ""
shared_layers = 0
plan = ""
library = ""
profile = ""
measure = false
port = 0
transport = "auto"
lease = 2.0
compare_every = 10
restarts = 3
follow_speeds = true
mean_time_between_failures = ""
[model]
layers = 8
width = 64
heads = 4
context = 64
dropout = 0.0
tied = false
[data]
text = ""
samples = 2
loader_processes = 0
evaluation_text = ""
[training]
steps = 20
seed = 1
exact = false
optimizer = "adamw"
rate = 0.003
weight_decay = 0.01
momentum = 0.0
schedule = "constant"
warmup = 0
max_norm = 0.0
precision = "float32"
activation_checkpointing = false
compile = ""
sums = "float32"
lean_steps = "auto"
device = "cpu"
evaluate_every = 0
patience = 0
time_limit = ""
[checkpoint]
every = 100
keep = 2
[log]
tensorboard = false
metrics_port = 0
metrics_host = "127.0.0.1"
otlp = ""
json_lines = false
loggers = ""
[job]
file = ""
"""
KEYS = [(section, key) for section, table in tomllib.loads(DEFAULTS).items() for key in table]
SWITCHES = [(section, key) for section, key in KEYS if type(tomllib.loads(DEFAULTS)[section][key]) is bool]
NUMBERS = [(section, key) for section, key in KEYS if type(tomllib.loads(DEFAULTS)[section][key]) is int]

counts = st.integers(1, 10**9)
texts = st.text().filter(lambda text: "\0" not in text) | st.sampled_from(['say "yes"', r"C:\new\table", "'''", "a#b = 1\n[x]"])
shares = st.floats(0, 1, exclude_max=True)
sizes = st.floats(0, allow_infinity=False)
PLANNED = st.one_of(
    st.builds(dict),
    st.builds(lambda path: {"plan": path}, texts),
    st.builds(lambda path: {"library": path, "dead": "W7_7"}, texts.filter(bool)),
    st.builds(lambda path: {"profile": path, "dead": "W0_0, W0_1"}, texts),
    st.just({"measure": True, "memory": "80GiB"}),
)


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    """Any configuration that may be made."""
    shape = {name: draw(st.integers(2, 400)) for name in ("pipelines", "stages", "microbatches")}
    limits = {"memory": draw(st.sampled_from(["", "6", "4,3,2,1", "unlimited"]))}
    words = {"techniques": draw(st.sampled_from(["none", "adaptive"])), "costs": draw(st.sampled_from(["1,1,1", "9, 8, 7"]))}
    optimizer = draw(st.sampled_from(["adamw", "sgd"]))
    steps, is_exact = draw(counts), draw(st.booleans())
    return TrainConfig(
        ClusterSection(
            **{**shape, **words, **limits, **draw(PLANNED)},
            port=draw(st.integers(0, 30000)),
            lease=draw(st.integers(1, 3600).map(float)),
        ),
        ModelSection(*(draw(counts) for _ in range(4)), draw(shares), draw(st.booleans())),
        DataSection(draw(texts), draw(counts)),
        TrainingSection(
            steps,
            draw(st.integers(0, 2**63 - 1)),
            is_exact,
            optimizer,
            rate=draw(sizes.filter(bool)),
            weight_decay=draw(sizes),
            momentum=draw(shares) if optimizer == "sgd" else 0,
            schedule=draw(st.sampled_from(["constant", "cosine", "linear"])),
            warmup=draw(st.integers(0, steps)),
            max_norm=draw(sizes),
            precision=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
            sums="float32" if is_exact else draw(st.sampled_from(["float32", "float64", "bfloat16"])),
            device=draw(st.sampled_from(["cpu", "cuda"])),
            lean_steps=draw(st.sampled_from(["auto", "yes", "no"])),
        ),
        CheckpointSection(draw(st.integers(0, 10**9)), draw(counts)),
        LogSection(draw(st.booleans()), draw(st.integers(30001, 65535))),
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(exit_on_error=False)
    add_config_arguments(made)
    return made


def config_of(*words: str) -> TrainConfig:
    return read_config(parser().parse_args(words))


def file_of(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        config_of(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def value_of(config: TrainConfig, section: str, key: str) -> Any:
    return getattr(getattr(config, section), key)


def test_without_file_and_flags_everything_is_as_the_defaults_say(tmp_path: Path) -> None:
    assert config_of() == TrainConfig() == load_config(Path(file_of(tmp_path, DEFAULTS)))
    assert tomllib.loads(TrainConfig().to_toml()) == tomllib.loads(DEFAULTS)


def test_a_flag_outranks_the_file_and_the_file_the_default(tmp_path: Path) -> None:
    path = file_of(tmp_path, "[training]\nsteps = 7\nrate = 1\n[cluster]\ndead = 'W1_2'\n[model]\ntied = true\n")
    config = config_of(path, "--steps", "9", "--dead", "", "--no-tied")
    assert (config.training.steps, config.training.rate, config.training.seed) == (9, 1.0, 1)
    assert (config.cluster.dead, config.model.tied) == ("", False)
    assert isinstance(config.training.rate, float)
    assert load_config(Path(path)).model.tied is True


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_every_key_has_a_short_and_a_dotted_flag(section: str, key: str) -> None:
    dashed = key.replace("_", "-")
    given = {"dead": "W0_0", "techniques": "none", "costs": "1,2,3", "optimizer": "sgd", "schedule": "linear"}
    given |= {
        "precision": "bfloat16",
        "sums": "float64",
        "lean_steps": "no",
        "device": "cuda",
        "transport": "gloo",
        "memory": "4",
        "dropout": "0.5",
    }
    given |= {"mean_time_between_failures": "30m", "time_limit": "30m"}
    extra = {"momentum": ["--optimizer", "sgd"]}.get(key, [])
    words = [] if (section, key) in SWITCHES else [given.get(key, "0.5" if key == "momentum" else "11")]
    no = "no-" if value_of(TrainConfig(), section, key) is True else ""
    short, dotted = (config_of(*extra, f"--{no}{name}", *words) for name in (dashed, f"{section}.{dashed}"))
    assert short == dotted
    assert f"{section}.{key}" in changes(TrainConfig(), short)


@pytest.mark.parametrize(("section", "key"), SWITCHES)
def test_a_switch_has_a_no_form(tmp_path: Path, section: str, key: str) -> None:
    path = file_of(tmp_path, f"[{section}]\n{key} = true\n")
    word = key.replace("_", "-")
    for flag in (f"--no-{word}", f"--no-{section}.{word}"):
        assert value_of(config_of(path, flag), section, key) is False
    assert value_of(config_of(path), section, key) is True


def test_the_last_of_two_flags_for_one_key_counts() -> None:
    assert config_of("--steps", "5", "--training.steps", "6", "--exact", "--no-exact").training == TrainingSection(steps=6)


def test_the_help_names_every_key_with_its_default_by_section() -> None:
    text = " ".join(parser().format_help().split())
    for section, key in KEYS:
        default = tomllib.loads(DEFAULTS)[section][key]
        written = {"": "none", "False": "no", "True": "yes"}.get(
            str(default), f"{default:g}" if isinstance(default, float) else str(default)
        )
        dotted = re.escape(f"--{section}.{key.replace('_', '-')}")
        assert re.search(rf"{dotted}(?: |, --no)[^[]*? \(default: {re.escape(written)}\)", text), key
    assert re.findall(r"\[(\w+)\]: [A-Z]", text) == list(tomllib.loads(DEFAULTS))


@given(config=configs())
def test_the_written_file_gives_the_very_configuration_back(
    config: TrainConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert load_config(path) == config == config_of(str(path))
    assert changes(config, load_config(path)) == {}


@given(config=configs())
def test_flags_alone_can_say_all_that_a_file_can(config: TrainConfig) -> None:
    words = []
    for section, key in KEYS:
        value, name = value_of(config, section, key), f"{section}.{key.replace('_', '-')}"
        no = "" if value else "no-"
        words.append(f"--{no}{name}" if isinstance(value, bool) else f"--{name}={value}")
    assert config_of(*words) == config


def test_changes_are_listed_by_dotted_name() -> None:
    old, new = config_of("--steps", "5"), config_of("--steps", "6", "--text", "a", "--exact")
    assert changes(old, new) == {"data.text": ("", "a"), "training.steps": (5, 6), "training.exact": (False, True)}
    assert changes(new, new) == {}


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().training.steps = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--steps 0", "training.steps is 0, but it must be a whole number from 1 to 1000000000"),
        ("--seed -1", "training.seed is -1, but it must be a whole number from 0"),
        ("--rate nan", "training.rate is nan, but it must be a finite number above 0"),
        ("--rate inf", "training.rate is inf, but"),
        ("--rate 0", "training.rate is 0.0, but"),
        ("--max-norm -1", "training.max_norm is -1.0, but it must be a finite number of at least 0"),
        ("--weight-decay inf", "training.weight_decay is inf"),
        ("--dropout 1", "model.dropout is 1.0, but it must be a number from 0 to below 1"),
        ("--schedule cosin", 'training.schedule is "cosin", but it must be constant, cosine or linear'),
        ("--optimizer adam", 'training.optimizer is "adam", but it must be adamw or sgd'),
        ("--precision float8", "it must be float32, bfloat16 or float16"),
        ("--sums int8", "it must be float32, float64 or bfloat16"),
        ("--device tpu", "it must be cpu or cuda"),
        ("--port 65536", "cluster.port is 65536, but it must be a whole number from 0 to 65535"),
        ("--lease 0", "cluster.lease is 0.0, but it must be a number from 0.1 to 3600"),
        ("--metrics-port -1", "log.metrics_port is -1"),
        ("--keep 0", "checkpoint.keep is 0"),
        ("--every -1", "checkpoint.every is -1"),
        ("--plan a --library b", "cluster.plan and cluster.library each say what the plan is made from: give one of them"),
        ("--plan a --library b --measure", "cluster.plan, cluster.library and cluster.measure each"),
        ("--profile c --measure", "cluster.profile and cluster.measure each"),
        ("--plan a --dead W0_1", 'cluster.dead is "W0_1", but cluster.plan says itself who is dead'),
        ("--exact --sums float64", "training.sums is float64, but exact sums are whole numbers"),
        ("--momentum 0.9", "training.momentum is 0.9, but only sgd has it"),
        ("--steps 5 --warmup 6", "training.warmup is 6, more than all 5 steps"),
        ("--port 9000 --metrics-port 9000", "cluster.port and log.metrics_port are both 9000"),
        ("--dead W9_9", "W9_9 is not a worker of this cluster"),
        ("--dead W0_1,W1_1,W2_1", "stage 1 has no live worker"),
        ("--dead fred", "'fred' is not a worker"),
        ("--library b --dead fred", "'fred' is not a worker"),
        ("--techniques magic", "'magic' is not a technique"),
        ("--costs 1,2", "they must be three whole numbers"),
        ("--memory much", "memory is 'much'"),
        ("--memory 0", "too little for any schedule"),
        ("--pipelines 100000 --stages 100000", "more than can be planned"),
    ],
)
def test_a_value_that_cannot_be_is_refused_in_one_sentence(words: str, sentence: str) -> None:
    assert sentence in refusal(*words.split())


@pytest.mark.parametrize(("section", "key"), NUMBERS)
def test_a_number_of_20_digits_is_shown_in_decimal(section: str, key: str) -> None:
    problem = refusal(f"--{section}.{key.replace('_', '-')}", "98765432109876543210")
    assert problem.startswith(f"{section}.{key} is 98765432109876543210, but it must be a whole number from ")


def test_a_name_that_no_file_can_carry_is_refused() -> None:
    assert 'data.text is "a\\udcff"' in refusal("--text", "a\udcff")
    assert 'data.text is "a\\u0000b"' in refusal("--text", "a\0b")


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ("steps = true", "training.steps is true, but it must be a whole number"),
        ("steps = 5.0", "training.steps is 5.0, but it must be a whole number"),
        ('steps = "5"', 'training.steps is "5", but'),
        ("rate = false", "training.rate is false, but it must be a finite number"),
        ('rate = "fast"', 'training.rate is "fast", but'),
        (f"rate = 0x1{'0' * 5000}", "training.rate is a number of about 6021 digits, but"),
        ("steps = 98765432109876543210", "training.steps is 98765432109876543210, but it must be a whole number from 1 to"),
        ("exact = 1", "training.exact is 1, but it must be true or false"),
        ("schedule = 3", "training.schedule is 3, but it must be constant, cosine or linear"),
        ("device = ['cpu']", "training.device is a list, but"),
        ("seed = 2024-01-01", "training.seed is 2024-01-01, but"),
        ("seed.of.it = 1", "training.seed is a section, but"),
    ],
)
def test_a_wrong_type_in_the_file_is_refused(tmp_path: Path, section: str, sentence: str) -> None:
    assert sentence in refusal(file_of(tmp_path, f"[training]\n{section}\n"))


def test_a_flag_can_mend_what_the_file_has_wrong(tmp_path: Path) -> None:
    assert config_of(file_of(tmp_path, "[training]\nsteps = 0\n"), "--steps", "3").training.steps == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[trainig]\n", 'run.toml: there is no section "trainig": did you mean [training]?'),
        ("[zzz]\n", "the sections are cluster, model, data, training, checkpoint, log and job"),
        ("[training]\nstep = 1\n", 'run.toml: [training] has no key "step": did you mean steps?'),
        ("[training]\nmax-norm = 1\n", 'no key "max-norm": did you mean max_norm?'),
        ("[model]\noptimiser = 1\n", "did you mean optimizer of [training]?"),
        ("[checkpoint]\nzzz = 1\n", "its keys are every and keep"),
        ("stepz = 1\n", '"stepz" is in no section: did you mean steps of [training]?'),
        ("zzz = 1\n", '"zzz" is in no section: '),
        ("training = 1\n", "training is 1, but it must be a section: begin it with [training]"),
        ("[[training]]\nsteps = 1\n", "training is a list, but it must be a section"),
        ('[training]\n"a\\nb" = 1\n', 'has no key "a\\u000ab"'),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in refusal(file_of(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"[training]\nsteps = = 3\n", "at line 2"),
        (b"[training]\nsteps = 3\nsteps = 4\n", "at line 3"),
        (b"[training]\n\ntext = [\n\n\n", "at line 3, where it ends"),
        (b"[training]\n# \xff\n", "line 2 is not text in UTF-8"),
        (b"[training]\nsteps = " + b"9" * 5000, "a number in it is too long"),
        (b"a = " + b"[" * 100_000, "cannot be read"),
    ],
)
def test_broken_toml_is_one_sentence_with_its_line(tmp_path: Path, text: bytes, where: str) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text)
    with pytest.raises(FileProblem) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert where in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(str(tmp_path / "none.toml")) == f"cannot read {tmp_path / 'none.toml'}: No such file or directory"
    assert refusal(str(tmp_path)) == f"cannot read {tmp_path}: Is a directory"


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert config_of(file_of(tmp_path, "\ufeff[training]\nsteps = 4\n")).training.steps == 4
