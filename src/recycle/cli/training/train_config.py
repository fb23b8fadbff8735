"""`TrainConfig`: the configuration of a training run, from defaults, a TOML file and the flags of the command line.

Without a job file it describes the built-in GPT; with one, only the keys that are given count, and override those of the job.
"""

import argparse
import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from recycle.cli.training.train_sections import (
    CheckpointSection,
    ClusterSection,
    DataSection,
    JobSection,
    LogSection,
    ModelSection,
    Rule,
    TrainingSection,
    joined,
    shown,
)
from recycle.core.errors import FileProblem, UserError

_JOB_SUFFIX = ".py"
_ABOUT_FILE = "a job file (.py), or the TOML file of a run (default: none, which trains the built-in GPT)"


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The configuration of a training run, in the sections of its file. `given` are the dotted names of keys that were given."""

    cluster: ClusterSection = field(default_factory=ClusterSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    job: JobSection = field(default_factory=JobSection)
    given: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        if self.cluster.port and self.cluster.port == self.log.metrics_port:
            raise UserError(f"cluster.port and log.metrics_port are both {self.cluster.port}: give each a port of its own")

    def values(self) -> dict[str, Any]:
        """Every value by its dotted name."""
        return {f"{section}.{key}": getattr(getattr(self, section), key) for section, key in _all_keys()}

    @property
    def model_text(self) -> str:
        """The model in words: all its keys on which the costs of ops depend."""
        if self.job.file:
            return f"the job of {Path(self.job.file).name}, {self._how}"
        model, extras = self.model, ""
        extras += f", dropout {model.dropout:g}" if model.dropout else ""
        extras += ", tied embeddings" if model.tied else ""
        sizes = f"width {model.width}, {model.layers} layers, {model.heads} heads, context {model.context}"
        return f"GPT of {sizes}{extras}, {self._how}"

    @property
    def _how(self) -> str:
        again = ", activation checkpointing" if self.training.activation_checkpointing else ""
        return f"{self.training.precision}{again}{f', compiled by {self.training.compile}' if self.training.compile else ''}"

    def to_toml(self) -> str:
        """The text of the configuration: all keys, or with a job file those that were given."""
        lines: list[str] = []
        for section, keys in _KEYS.items():
            written = [key for key in keys if not self.job.file or f"{section}.{key}" in self.given]
            if written:
                lines += [f"[{section}]", *(f"{key} = {shown(getattr(getattr(self, section), key))}" for key in written), ""]
        return "\n".join(lines)


_SECTIONS: dict[str, Any] = {item.name: item for item in fields(TrainConfig) if item.name != "given"}
_KEYS: dict[str, dict[str, Any]] = {
    name: {item.name: item for item in fields(section.default_factory)} for name, section in _SECTIONS.items()
}


def add_config_arguments(parser: argparse.ArgumentParser, about_file: str = _ABOUT_FILE) -> None:
    """Add the file, and for every key `--key` and `--section.key`. Only what is given is in the parsed arguments."""
    parser.add_argument("config", nargs="?", type=Path, metavar="FILE", help=about_file)
    for name, section in _SECTIONS.items():
        group = parser.add_argument_group(f"[{name}]", section.default_factory.__doc__)
        for key in _KEYS[name].values():
            _add_key(group, name, key)


def _add_key(group: "argparse._ArgumentGroup", section: str, key: Any) -> None:
    dashed = key.name.replace("_", "-")
    rule: Rule = key.metadata["rule"]
    options: dict[str, Any] = {"type": _reader(key), "metavar": rule.metavar}
    if isinstance(key.default, bool):
        options = {"action": argparse.BooleanOptionalAction}
    text = f"{key.metadata['help']} (default: {_default_text(key.default)})".replace("%", "%%")
    names = (f"--{dashed}", f"--{section}.{dashed}")
    group.add_argument(*names, dest=f"{section}.{key.name}", default=argparse.SUPPRESS, help=text, **options)


def _reader(key: Any) -> Callable[[str], Any]:
    """What reads the value of a key from the command line."""
    kind, rule = type(key.default), key.metadata["rule"]

    def number_or_word(text: str) -> Any:
        try:
            return text if rule.is_word(text) else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {rule.text}") from None

    return number_or_word if rule.words else kind


def given_flags(args: argparse.Namespace) -> list[str]:
    """The flags that another command with `add_config_arguments` needs for the keys that were given here."""
    given = {name: value for name, value in vars(args).items() if "." in name}
    return [
        (f"--{dashed}" if value else f"--no-{dashed}") if isinstance(value, bool) else f"--{dashed}={value}"
        for name, value in given.items()
        for dashed in [name.replace("_", "-")]
    ]


def _default_text(default: bool | int | float | str) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return default or "none" if isinstance(default, str) else f"{default:g}"


def read_config(args: argparse.Namespace) -> TrainConfig:
    """The configuration of parsed arguments: the defaults, overridden by the file, overridden by the flags."""
    given, values = vars(args), dict[str, dict[str, Any]]()
    if args.config is not None:
        is_job = args.config.suffix == _JOB_SUFFIX
        values = {"job": {"file": str(args.config)}} if is_job else _read(args.config)
    for section, key in _all_keys():
        if f"{section}.{key}" in given:
            values.setdefault(section, {})[key] = given[f"{section}.{key}"]
    _resolve_file(values, Path())
    return _made(values)


def with_file(config: TrainConfig, path: Path) -> TrainConfig:
    """The configuration with another path of its job file."""
    return replace(config, job=JobSection(str(path)))


def load_config(path: Path) -> TrainConfig:
    return _made(_read(path))


def parse_config(text: str) -> TrainConfig:
    """The configuration of a text that `to_toml` made."""
    return _made(tomllib.loads(text))


def changes(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The values that differ, old and new, by their dotted name."""
    now = new.values()
    return {name: (before, now[name]) for name, before in old.values().items() if before != now[name]}


def _all_keys() -> Iterator[tuple[str, str]]:
    return ((section, key) for section, keys in _KEYS.items() for key in keys)


def _made(values: Mapping[str, Mapping[str, Any]]) -> TrainConfig:
    sections = {name: _SECTIONS[name].default_factory(**given) for name, given in values.items()}
    return TrainConfig(**sections, given=frozenset(f"{section}.{key}" for section, keys in values.items() for key in keys))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The sections of a file, whose keys are known; the values are checked when the sections are made."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as problem:
        raise FileProblem(f"cannot read {path}: {getattr(problem, 'strerror', None) or problem}") from None
    tables = _parsed(path, data)
    for section, table in tables.items():
        if section not in _KEYS:
            raise UserError(f"{path}: {_unknown_section(section, table)}")
        if not isinstance(table, dict):
            raise UserError(f"{path}: {section} is {shown(table)}, but it must be a section: begin it with [{section}]")
        for key in table:
            if key not in _KEYS[section]:
                raise UserError(f"{path}: [{section}] has no key {shown(key)}: {_key_hint(section, key)}")
    _resolve_file(tables, path.parent)
    return tables


def _resolve_file(values: dict[str, dict[str, Any]], folder: Path) -> None:
    """Make the path of the job file absolute: the run folder keeps it, and is resumed from anywhere."""
    file = values.get("job", {}).get("file", "")
    if file and isinstance(file, str):
        values["job"]["file"] = str((folder / file).resolve())


def _parsed(path: Path, data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise FileProblem(f"{path} is not TOML: line {line} is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as problem:
        last = data.rstrip().count(b"\n") + 1
        end = f"at line {last}, where it ends"
        raise FileProblem(f"{path} is not TOML: {str(problem).replace('at end of document', end)}") from None
    except (ValueError, RecursionError):
        raise FileProblem(f"{path} cannot be read: a number in it is too long, or its brackets go too deep") from None


def _unknown_section(name: str, table: Any) -> str:
    if isinstance(table, dict):
        near = difflib.get_close_matches(name, _KEYS, 1)
        hint = f"did you mean [{near[0]}]?" if near else f"the sections are {joined(list(_KEYS))}"
        return f"there is no section {shown(name)}: {hint}"
    return f"{shown(name)} is in no section: {_key_hint('', name)}"


def _key_hint(section: str, key: str) -> str:
    """The nearest known key: of this section if there is one, else of any."""
    if near := difflib.get_close_matches(key, _KEYS.get(section, ()), 1):
        return f"did you mean {near[0]}?"
    homes = {name: home for home, name in _all_keys()}
    if near := difflib.get_close_matches(key, homes, 1):
        return f"did you mean {near[0]} of [{homes[near[0]]}]?"
    return f"its keys are {joined(list(_KEYS[section]))}" if section else "'recycle train --help' lists all keys"
