"""The sections of a training run's configuration: every key with its default, its help and its rule.

The flags, their help, the checks and the file in the run folder are all made from these fields.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from recycle.control.decide.failure_detection import DEFAULT_LEASE_S, LONGEST_S, SHORTEST_S
from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.problem import Techniques
from recycle.core.profile import Profile
from recycle.core.units import is_bytes, parse_bytes, parse_duration_us
from recycle.planner.problem_from_text import parse_costs, parse_memory
from recycle.planner.shared_layers_choice import AUTO

_MOST = 10**9
_USUAL_COSTS = "10,13,9"
_MOST_BITS = 128  # of a number that a message shows digit by digit
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that a key may have: in words, as a metavar in the help, and as a test of values of the right type.

    A key that is a number may have one of `words` instead.
    """

    text: str
    metavar: str
    holds: Callable[[Any], bool]
    words: tuple[str, ...] = ()

    def is_word(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.words


def _whole(least: int, most: int = _MOST) -> Rule:
    return Rule(f"a whole number from {least} to {most}", "N", lambda value: least <= value <= most)


def _one_of(*names: str) -> Rule:
    return Rule(f"{', '.join(names[:-1])} or {names[-1]}", "|".join(names), lambda value: value in names)


def _text(metavar: str) -> Rule:
    return Rule("a text in quotes (UTF-8, no null character)", metavar, _is_writable)


def _is_writable(text: str) -> bool:
    """Whether UTF-8 can encode `text`: the names of files may have bytes that it cannot."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


_COUNT, _COUNT_OR_NONE, _PORT, _SEED = _whole(1), _whole(0), _whole(0, 65535), _whole(0, 2**63 - 1)
_SWITCH = Rule("true or false", "", lambda value: True)
_ABOVE_ZERO = Rule("a finite number above 0", "X", lambda value: 0 < value < math.inf)
_NOT_BELOW_ZERO = Rule("a finite number of at least 0", "X", lambda value: 0 <= value < math.inf)
_COUNT_OR_AUTO = Rule(f"{_COUNT_OR_NONE.text}, or {AUTO}", f"N|{AUTO}", _COUNT_OR_NONE.holds, (AUTO,))
_LEASE = Rule(f"a number from {SHORTEST_S:g} to {LONGEST_S:g}", "S", lambda value: SHORTEST_S <= value <= LONGEST_S)
_BELOW_ONE = Rule("a number from 0 to below 1", "P", lambda value: 0 <= value < 1)


def _key(default: _T, rule: Rule, about: str) -> _T:
    """A field of a section; its type is that of its default."""
    made: _T = field(default=default, metadata={"rule": rule, "help": about})
    return made


class _Section:
    """A section of the configuration, whose values are checked when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Refuse a value of a wrong type or against its rule; a whole number is fine for a key that is a number."""
        for key in fields(self):  # type: ignore[arg-type]
            value, rule = getattr(self, key.name), key.metadata["rule"]
            kept = value if rule.is_word(value) else _of_type(value, type(key.default))
            if kept is None or not (rule.is_word(kept) or rule.holds(kept)):
                section = type(self).__name__.removesuffix("Section").lower()
                raise UserError(f"{section}.{key.name} is {shown(value)}, but it must be {rule.text}")
            object.__setattr__(self, key.name, kept)
        self._check()

    def _check(self) -> None:
        """Refuse values that do not go together."""


@dataclass(frozen=True, slots=True)
class JobSection(_Section):
    """The job file, if what is trained is not the built-in GPT."""

    file: str = _key("", _text("FILE"), "Python file whose function job returns the recycle.Job to train")


@dataclass(frozen=True, slots=True)
class ClusterSection(_Section):
    """The cluster and its plan."""

    pipelines: int = _key(3, _COUNT, "data-parallel pipelines")
    stages: int = _key(4, _COUNT, "stages of each pipeline")
    microbatches: int = _key(6, _COUNT, "micro-batches of each pipeline in a step")
    dead: str = _key("", _text("W1_2,..."), "workers that are dead from the start")
    speed: str = _key("", _text("W0_3=0.6,..."), "workers that are known to be slower or faster than their peers")
    techniques: str = _key(str(Techniques()), _text("LIST"), "techniques of the plan, or none")
    costs: str = _key("", _text("F,I,W"), f"what the plan takes ops to cost, in µs; empty is {_USUAL_COSTS}, or as measured")
    memory: str = _key("", _text("LIMIT"), "micro-batches in flight (6, or 4,3,2,1), bytes (80GiB) or unlimited")
    shared_layers: int | str = _key(
        0, _COUNT_OR_AUTO, "layers that a stage holds of each neighbour, so that load can move; auto chooses by memory"
    )
    plan: str = _key("", _text("FILE"), "train by this plan, which says itself who is dead")
    library: str = _key("", _text("FOLDER"), "take the plan from this library")
    profile: str = _key("", _text("FILE"), "make the plan from this profile, or see that a given one was")
    measure: bool = _key(False, _SWITCH, "measure a profile first, and make the plan from that")
    port: int = _key(0, _PORT, "port at which workers meet; 0 is any free one")
    transport: str = _key("auto", _one_of("auto", "gloo", "nccl", "ipc"), "what carries tensors between workers")
    lease: float = _key(DEFAULT_LEASE_S, _LEASE, "seconds of silence after which a worker counts as dead")
    compare_every: int = _key(10, _COUNT_OR_NONE, "steps between two comparisons of peers; 0 is only before checkpoints")
    restarts: int = _key(3, _COUNT_OR_NONE, "how often an hour a worker that died is started again; 0 is never")
    follow_speeds: bool = _key(
        True, _SWITCH, "change the plan when a worker becomes slow, and leave it out if it is far too slow"
    )
    mean_time_between_failures: str = _key(
        "", _text("30m"), "time in which moving workers or whole layers to other stages must pay; empty is the run's own"
    )

    @property
    def shape(self) -> Shape:
        return Shape(self.pipelines, self.stages, self.microbatches)

    @property
    def op_costs(self) -> str:
        """The costs of ops if no profile says them."""
        return self.costs or _USUAL_COSTS

    @property
    def shares_at_unknown_costs(self) -> bool:
        """Whether layers are shared, or may move, though nothing says what they cost: then it is better to measure that first."""
        is_by_layer = bool(self.shared_layers or self.mean_time_between_failures)
        return is_by_layer and not (self.costs or self.profile or self.plan or self.library)

    @property
    def mean_time_s(self) -> float | None:
        """The mean time between failures, if it was given."""
        text = self.mean_time_between_failures
        return parse_duration_us(text) / 1e6 if text else None

    @property
    def dead_workers(self) -> list[Worker]:
        return [Worker.parse(name) for name in self.dead.split(",") if name.strip()]

    def _check(self) -> None:
        for several in (("plan", "library", "measure"), ("profile", "measure")):
            given = [f"cluster.{name}" for name in several if getattr(self, name)]
            if len(given) > 1:
                raise UserError(f"{joined(given)} each say what the plan is made from: give one of them")
        if self.plan and self.dead:
            raise UserError(
                f"cluster.dead is {shown(self.dead)}, but cluster.plan says itself who is dead: leave one of them out"
            )
        Techniques.parse(self.techniques)
        parse_costs(self.op_costs)
        shape, dead = self.shape, self.dead_workers
        if not self.library:  # which says itself how many dead workers it has plans for
            Cluster.of(shape, dead)
        if self.mean_time_s is not None and self.mean_time_s <= 0:
            raise UserError(f"cluster.mean_time_between_failures is {shown(self.mean_time_between_failures)}, but it is above 0")
        if self.memory and is_bytes(self.memory):
            parse_bytes(self.memory)
        elif self.memory:
            parse_memory(self.memory, 1, Profile.uniform(1, 1, 1, 1))


@dataclass(frozen=True, slots=True)
class ModelSection(_Section):
    """The GPT that is trained."""

    layers: int = _key(8, _COUNT, "layers of the GPT")
    width: int = _key(64, _COUNT, "its width, a multiple of its heads")
    heads: int = _key(4, _COUNT, "its attention heads")
    context: int = _key(64, _COUNT, "bytes of text in a sample")
    dropout: float = _key(0.0, _BELOW_ONE, "share of activations that is dropped")
    tied: bool = _key(False, _SWITCH, "let the head use the matrix of the token embedding")


@dataclass(frozen=True, slots=True)
class DataSection(_Section):
    """The text of the training data."""

    text: str = _key("", _text("PATH"), "file or folder of text; empty is the sources of Python's library")
    samples: int = _key(2, _COUNT, "samples of a micro-batch")
    loader_processes: int = _key(
        0, _COUNT_OR_NONE, "processes of each worker that reads data, which make micro-batches ahead of its ops; 0 is none"
    )
    evaluation_text: str = _key("", _text("PATH"), "file or folder of text on which the GPT is evaluated")


@dataclass(frozen=True, slots=True)
class TrainingSection(_Section):
    """The training."""

    steps: int = _key(20, _COUNT, "steps of the whole run")
    seed: int = _key(1, _SEED, "seed of weights, data and dropout")
    exact: bool = _key(False, _SWITCH, "sums that do not depend on who ran what: equal bit for bit")
    optimizer: str = _key("adamw", _one_of("adamw", "sgd"), "what applies the gradient")
    rate: float = _key(0.003, _ABOVE_ZERO, "learning rate")
    weight_decay: float = _key(0.01, _NOT_BELOW_ZERO, "weight decay")
    momentum: float = _key(0.0, _BELOW_ONE, "momentum of sgd")
    schedule: str = _key("constant", _one_of("constant", "cosine", "linear"), "how the rate falls after the warm-up")
    warmup: int = _key(0, _COUNT_OR_NONE, "steps in which the rate rises to its full value")
    max_norm: float = _key(0.0, _NOT_BELOW_ZERO, "clip the global norm of the gradient; 0 is no clipping")
    precision: str = _key("float32", _one_of("float32", "bfloat16", "float16"), "what ops compute in; float16 scales the loss")
    activation_checkpointing: bool = _key(
        False, _SWITCH, "keep only the inputs of layers, and run them again in the backward pass: less memory, more work"
    )
    compile: str = _key("", _text("BACKEND"), "compile layers with torch.compile and this backend, such as inductor")
    sums: str = _key("float32", _one_of("float32", "float64", "bfloat16"), "what gradients are summed in")
    lean_steps: str = _key(
        AUTO,
        _one_of(AUTO, "yes", "no"),
        "compute a step that may be taken back twice, and copy no optimizer states: less memory, more work; auto is yes on a GPU",
    )
    device: str = _key("cpu", _one_of("cpu", "cuda"), "what workers compute on")
    evaluate_every: int = _key(0, _COUNT_OR_NONE, "steps between two evaluations; 0 is only at the end, if there are data for it")
    patience: int = _key(0, _COUNT_OR_NONE, "stop after so many evaluations without a lower loss; 0 is never")
    time_limit: str = _key("", _text("2h"), "end the run, with a checkpoint, after this time; empty is no limit")

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass can be split into I and W."""
        return not self.activation_checkpointing and not self.compile

    @property
    def time_limit_s(self) -> float | None:
        return parse_duration_us(self.time_limit) / 1e6 if self.time_limit else None

    def _check(self) -> None:
        if self.time_limit_s is not None and self.time_limit_s <= 0:
            raise UserError(f"training.time_limit is {shown(self.time_limit)}, but it is above 0")
        if self.exact and self.sums != "float32":
            raise UserError(f"training.sums is {self.sums}, but exact sums are whole numbers: leave training.sums or exact out")
        if self.momentum and self.optimizer != "sgd":
            raise UserError(f"training.momentum is {self.momentum}, but only sgd has it: leave it out, or choose optimizer sgd")
        if self.warmup > self.steps:
            raise UserError(f"training.warmup is {self.warmup}, more than all {self.steps} steps: warm up for fewer")


@dataclass(frozen=True, slots=True)
class CheckpointSection(_Section):
    """The checkpoints."""

    every: int = _key(100, _COUNT_OR_NONE, "steps between two checkpoints; 0 is only at the end")
    keep: int = _key(2, _COUNT, "checkpoints that are kept, the newest ones")


@dataclass(frozen=True, slots=True)
class LogSection(_Section):
    """Exports of the progress of the run."""

    tensorboard: bool = _key(False, _SWITCH, "write events for TensorBoard beside the results")
    metrics_port: int = _key(0, _PORT, "answer Prometheus at this port of this machine; 0 is off")
    metrics_host: str = _key("127.0.0.1", _text("ADDRESS"), "the address for Prometheus; 0.0.0.0 is every one of this machine")
    otlp: str = _key("", _text("URL"), "send metrics, epochs and recoveries to this OpenTelemetry collector, as http://HOST:4318")
    json_lines: bool = _key(False, _SWITCH, "print a line of JSON for every event but ops, instead of the live view")
    loggers: str = _key("", _text("LIST"), "write steps, evaluations and recoveries to csv, mlflow, tensorboard, wandb")

    @property
    def logger_names(self) -> list[str]:
        names = [name.strip() for name in self.loggers.split(",") if name.strip()]
        return [*names, *(["tensorboard"] if self.tensorboard else [])]


def _of_type(value: Any, kind: type) -> Any | None:
    """The value as one of `kind`, or None if it is something else; true is no number."""
    if isinstance(value, bool) != (kind is bool):
        return None
    try:
        return kind(value) if isinstance(value, (int, float) if kind is float else kind) else None
    except OverflowError:  # a whole number that no float comes near
        return None


def shown(value: Any) -> str:
    """A value as TOML, or a word for a value that no key can have."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{"".join(map(_letter, value))}"'
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:  # Python refuses to write the longest ones
        return f"a number of about {round(value.bit_length() * math.log10(2))} digits"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, dict | list):
        return "a section" if isinstance(value, dict) else "a list"
    return str(value)


def _letter(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"


def joined(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
