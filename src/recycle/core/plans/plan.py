"""Plan, Row and Slot: the schedule of one iteration, one row for each live worker, and the plan file.

Rows are kept as columns (a string of kinds, arrays of chains and starts), because a plan may have a million
slots; `Plan.slots` gives them one by one. A chain is a micro-batch by number: home pipeline * M + index.
"""

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recycle.core.cluster import Shape, Worker
from recycle.core.errors import FileProblem, UserError
from recycle.core.files import parse_json, read_json, write_text
from recycle.core.op import Kind, MicroBatch, Op
from recycle.core.plans.cuts import Cuts, cuts_from_json, cuts_to_json
from recycle.core.plans.op_costs import OpCosts
from recycle.core.problem import Problem

FORMAT, VERSION = "recycle-plan", 1


@dataclass(frozen=True, slots=True)
class Slot:
    """An op with its worker, start and end."""

    worker: Worker
    op: Op
    start_us: int
    end_us: int

    @property
    def is_rerouted(self) -> bool:
        return self.worker.pipeline != self.op.microbatch.pipeline

    def __str__(self) -> str:
        return f"{self.op} on {self.worker} from {self.start_us} to {self.end_us} µs"


@dataclass(frozen=True, slots=True)
class Row:
    """The ops of one worker in order, as three columns of equal length."""

    worker: Worker
    kinds: str
    chains: "array[int]" = field(repr=False)
    starts_us: "array[int]" = field(repr=False)

    def __post_init__(self) -> None:
        assert len(self.kinds) == len(self.chains) == len(self.starts_us)

    def __len__(self) -> int:
        return len(self.kinds)


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of a plan. `bound_us` is proven for all plans in which live workers keep their own micro-batches.

    `seconds` is how long the planner took. It is not written to files, so that the same problem gives the same bytes on every
    machine: it is 0 in a plan that was read.
    """

    bound_us: int
    status: str  # "optimal" or "feasible"
    method: str
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule of one iteration, one row for each live worker; the next iteration is the same and starts `period_us` later.

    `cuts` says where micro-batches are cut other than at the base boundaries of the stages.

    Example:
        >>> import recycle
        >>> plan = recycle.solve(recycle.problem(3, 4, 6, fail="W1_2", costs="1,1,1", memory=6))
        >>> len(plan.rows), plan.gap
        (11, 1.0)
    """

    problem: Problem
    rows: tuple[Row, ...]
    period_us: int
    quality: Quality
    cuts: Cuts = ()

    @property
    def costs(self) -> OpCosts:
        """The duration and the memory of every op; keep it where many are asked for."""
        return OpCosts(self.problem, self.cuts)

    @property
    def num_ops(self) -> int:
        return sum(len(row) for row in self.rows)

    @property
    def gap(self) -> float:
        """The period over its proven lower bound: 1.0 is optimal, and infinity says that nothing is proven."""
        return self.period_us / self.quality.bound_us if self.quality.bound_us > 0 else math.inf

    def period_at_us(self, busy_us: int) -> int:
        """The period scaled to the measured speed: `busy_us` is the sum of the durations of all ops of an iteration."""
        return round(self.period_us * busy_us / sum(self.busy_us(row) for row in self.rows))

    def busy_us(self, row: Row) -> int:
        """The sum of the durations of the ops of a row."""
        return sum(self.costs.durations_us(row.worker, row.kinds, row.chains))

    def slots(self, row: Row) -> Iterator[Slot]:
        """Yield the slots of one row in order."""
        stage, durations = row.worker.stage, self.costs.durations_us(row.worker, row.kinds, row.chains)
        for letter, chain, start, duration in zip(row.kinds, row.chains, row.starts_us, durations, strict=True):
            yield Slot(row.worker, Op(stage, Kind(letter), microbatch_of(self.problem.shape, chain)), start, start + duration)

    def all_slots(self) -> Iterator[Slot]:
        for row in self.rows:
            yield from self.slots(row)

    def save(self, path: Path | str) -> None:
        write_text(Path(path), self.dumps())

    def dumps(self) -> str:
        """Return the plan as JSON, one row a line; a slot is `start:op`."""
        texts = [_chain_texts(self.problem.shape, pipeline) for pipeline in range(self.problem.shape.num_pipelines)]
        rows = (f'  "{row.worker}": "{_row_text(row, texts[row.worker.pipeline])}"' for row in self.rows)
        return json.dumps(self.head())[:-1] + ',\n "rows": {\n' + ",\n".join(rows) + "\n }}\n"

    def head(self) -> dict[str, Any]:
        """Return everything but the rows, for JSON."""
        head: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "period_us": self.period_us,
            "bound_us": self.quality.bound_us,
            "status": self.quality.status,
            "method": self.quality.method,
            "problem": self.problem.to_json(),
        }
        if self.cuts:
            head["cuts"] = cuts_to_json(self.cuts)
        return head

    @staticmethod
    def from_head(head: Mapping[str, Any], rows: tuple[Row, ...], problem: Problem | None = None) -> "Plan":
        """Return the plan with this head and these rows; `problem` is that of the head, if it was read already."""
        problem = problem or Problem.from_json(head["problem"])
        quality = Quality(int(head["bound_us"]), str(head["status"]), str(head["method"]), float(head.get("seconds", 0.0)))
        cuts = cuts_from_json(head["cuts"], problem.shape) if "cuts" in head else ()
        return Plan(problem, rows, int(head["period_us"]), quality, cuts)

    @staticmethod
    def parse(text: str) -> "Plan":
        """Return the plan of a text that `dumps` of this release made."""
        return _from_json(json.loads(text))

    @staticmethod
    def load(path: Path | str) -> "Plan":
        return _from_file(read_json(Path(path), FORMAT, VERSION), path)

    @staticmethod
    def load_text(text: str, path: Path) -> "Plan":
        """Return the plan in the text of the file at `path`, as `load` does."""
        return _from_file(parse_json(text, path, FORMAT, VERSION), path)


def _from_file(data: dict[str, Any], path: Path | str) -> Plan:
    try:
        return _from_json(data)
    except UserError as problem:
        raise FileProblem(f"{path} is not a usable plan: {problem}") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as problem:
        raise FileProblem(f"{path} is not a whole plan: {type(problem).__name__} {problem}; plan again") from None


def chain_of(shape: Shape, microbatch: MicroBatch) -> int:
    return microbatch.pipeline * shape.num_microbatches + microbatch.index


def microbatch_of(shape: Shape, chain: int) -> MicroBatch:
    return MicroBatch(*divmod(chain, shape.num_microbatches))


def make_row(shape: Shape, worker: Worker, timed_ops: Iterable[tuple[int, Op]]) -> Row:
    """Make a row from (start, op) pairs in order; the ops must belong to the worker's stage and to the shape."""
    kinds, chains, starts = [], array("q"), array("q")
    for start, op in timed_ops:
        home, index = op.microbatch.pipeline, op.microbatch.index
        if op.stage != worker.stage:
            raise UserError(f"the row of {worker} holds {op}, but that worker holds stage {worker.stage} only")
        if home >= shape.num_pipelines or index >= shape.num_microbatches:
            raise UserError(
                f"the row of {worker} holds {op}, but there are only {shape.num_pipelines} pipelines "
                f"of {shape.num_microbatches} micro-batches"
            )
        kinds.append(op.kind.value)
        chains.append(chain_of(shape, op.microbatch))
        starts.append(start)
    return Row(worker, "".join(kinds), chains, starts)


def _chain_texts(shape: Shape, pipeline: int) -> list[str]:
    """The part of an op's text after its kind, for every chain, inside a row of `pipeline`."""
    homes = ("" if home == pipeline else f"@{home}" for home in range(shape.num_pipelines))
    return [f"{index}{home}" for home in homes for index in range(shape.num_microbatches)]


def _row_text(row: Row, chain_texts: list[str]) -> str:
    stage = row.worker.stage
    slots = zip(row.kinds, row.chains, row.starts_us, strict=True)
    return " ".join([f"{start}:{stage}{kind}{chain_texts[chain]}" for kind, chain, start in slots])


def _from_json(data: Mapping[str, Any]) -> Plan:
    problem = Problem.from_json(data["problem"])
    shape, rows, pipeline, ops = problem.shape, [], -1, {}
    for worker, text in ((Worker.parse(name), text) for name, text in data["rows"].items()):
        if worker.pipeline != pipeline:  # the rows of a pipeline follow one another
            pipeline, ops = worker.pipeline, _ops_of_pipeline(shape, worker.pipeline)
        rows.append(_parse_row(shape, worker, text, ops))
    return Plan.from_head(data, tuple(rows), problem)


def _parse_row(shape: Shape, worker: Worker, text: str, ops: Mapping[str, tuple[str, int]]) -> Row:
    """Parse a row; `ops` maps the texts of the ops of a pipeline's rows, without their stage, to kind and chain."""
    tokens, prefix = [token.partition(":") for token in text.split()], str(worker.stage)
    found = [ops.get(op.removeprefix(prefix)) if op.startswith(prefix) else None for _, _, op in tokens]
    whole = [each for each in found if each is not None]
    if len(whole) < len(found) or not all(start.isdecimal() for start, _, _ in tokens):
        return _parse_strange_row(shape, worker, text)
    kinds, chains = "".join([kind for kind, _ in whole]), array("q", [chain for _, chain in whole])
    return Row(worker, kinds, chains, array("q", [int(start) for start, _, _ in tokens]))


def _ops_of_pipeline(shape: Shape, pipeline: int) -> dict[str, tuple[str, int]]:
    """Kind and chain of every op that a worker of the pipeline can run, by the op's text without its stage."""
    texts = _chain_texts(shape, pipeline)
    return {f"{kind.value}{text}": (kind.value, chain) for kind in Kind for chain, text in enumerate(texts)}


def _parse_strange_row(shape: Shape, worker: Worker, text: str) -> Row:
    """Parse a row that is written in another way than ours, or say what is wrong with it."""
    pairs = []
    for token in text.split():
        start, _, op = token.partition(":")
        if not start.isdecimal():
            raise UserError(f"the row of {worker} holds {token!r}, but a slot is written <start>:<op>, such as 12:2F0@1")
        pairs.append((int(start), Op.parse(op, worker.pipeline)))
    return make_row(shape, worker, pairs)
