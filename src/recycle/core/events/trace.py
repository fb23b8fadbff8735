"""Trace: when nodes join and leave, and when they are slow, by the clock. Simulator and runtime read the same file.

Its text form is that of public spot-instance traces, one change a line, `milliseconds,add|remove,node`. A slowdown is a line
`milliseconds,slow|slow-link,node,speed,milliseconds`, with the times at which it begins and ends:

    0,add,W0_0
    600000,slow,W0_0,0.6,1200000
    1800000,remove,W0_0

A node that hangs, `milliseconds,hang,node`, leaves too, but without a word: its connections stay open, and it answers nobody.

Lines that begin with # are comments, except `# end <milliseconds>`, which is when the trace ends.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened

from recycle.core.errors import FileProblem, UserError
from recycle.core.files import write_text

_MOST_MS = 10**12  # 30 years
_HANG = "hang"
_WORDS = {"add": True, "remove": False, _HANG: False}
_SLOW_WORDS = {"slow": False, "slow-link": True}
_LEAST_SPEED = 0.001


@dataclass(frozen=True, slots=True)
class Change:
    """A node that joins or leaves. Nodes that join at time 0 are there from the start.

    A node that leaves because it `hangs` does so unnoticed.
    """

    at_us: int
    joins: bool
    node: str
    hangs: bool = False

    @property
    def word(self) -> str:
        """The word of this change in the text form of a trace."""
        return _HANG if self.hangs else "add" if self.joins else "remove"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """A node that computes, or whose link to the network sends and receives, at `speed` of what is usual from start to end.

    Slowdowns of one node at the same time multiply. One that goes on while the node is away has no effect meanwhile.
    """

    start_us: int
    end_us: int
    node: str
    speed: float
    is_link: bool = False

    def __post_init__(self) -> None:
        what = f"the {'link of ' if self.is_link else ''}{shortened(self.node)}"
        if not self.start_us < self.end_us:
            raise UserError(f"{what} is slow from {self.start_us // 1000} to {self.end_us // 1000} ms: it ends after it begins")
        if isinstance(self.speed, bool) or not isinstance(self.speed, int | float) or not _LEAST_SPEED <= self.speed <= 1:
            raise UserError(f"{what} has the speed {self.speed!r}, but it is a number from {_LEAST_SPEED} to 1, such as 0.6")
        object.__setattr__(self, "speed", round(float(self.speed), 3))  # as a problem counts speeds, and as the file writes them


@dataclass(frozen=True, slots=True)
class Trace:
    """The changes of a cluster's nodes in order of time, from 0 to `end_us`. Only absent nodes join, only present ones leave.

    The first node may join later than 0: until then nobody is live.

    `slowdowns` are in order of their starts.

    Raises:
        UserError: A change is impossible or out of order, or no node is ever added.

    Example:
        >>> trace = Trace.parse("0,add,W0_0\\n0,add,W1_0\\n1800000,remove,W0_0\\n# end 3600000\\n")
        >>> trace.num_failures, trace.end_us
        (1, 3600000000)
    """

    changes: tuple[Change, ...]
    end_us: int
    slowdowns: tuple[Slowdown, ...] = ()

    def __post_init__(self) -> None:
        before_us, present = 0, set[str]()
        for change in self.changes:
            when = f"at {change.at_us // 1000} ms"
            if not _is_name(change.node):
                raise UserError(
                    f"{shortened(change.node)} is not the name of a node: it has no comma, no line break, no space at its ends"
                )
            if change.at_us < before_us:
                raise UserError(f"{change.node} changes {when}, after a change at {before_us // 1000} ms: sort the trace by time")
            if change.joins and change.hangs:
                raise UserError(f"{change.node} joins and hangs {when}: a node hangs when it leaves")
            if change.joins == (change.node in present):
                problem = "is added, but it is there already" if change.joins else "is removed, but it is not there"
                raise UserError(
                    f"{change.node} {problem} {when}: a node joins before it leaves, and leaves before it joins again"
                )
            (present.add if change.joins else present.discard)(change.node)
            before_us = change.at_us
        if not self.changes:
            raise UserError("the trace has no node: give the nodes that are there from the start as lines '0,add,NODE'")
        if self.end_us < before_us:
            raise UserError(f"the trace ends at {self.end_us // 1000} ms, before its last change at {before_us // 1000} ms")
        if self.end_us > _MOST_MS * 1000:
            raise UserError(f"the trace ends at {self.end_us // 1000} ms, after the {_MOST_MS} ms (30 years) that one may last")
        if self.end_us <= 0:
            raise UserError("the trace ends at 0 ms, so there is no time to look at: add '# end MILLISECONDS' or a later change")
        self._check_slowdowns({change.node for change in self.changes})

    def _check_slowdowns(self, nodes: set[str]) -> None:
        before_us = 0
        for slow in self.slowdowns:
            if slow.node not in nodes:
                raise UserError(f"{shortened(slow.node)} is slow, but it is never added: give a node of the trace")
            if slow.start_us < before_us:
                raise UserError(f"{slow.node} is slow at {slow.start_us // 1000} ms, after a later one: sort the trace by time")
            if slow.start_us > self.end_us:
                raise UserError(f"{slow.node} is slow at {slow.start_us // 1000} ms, after the end of the trace")
            before_us = slow.start_us

    @property
    def initial(self) -> tuple[str, ...]:
        """The nodes that are there from the start, when all changes at time 0 are done."""
        present: dict[str, None] = {}
        for change in self.changes:
            if change.at_us == 0:
                present.update({change.node: None}) if change.joins else present.pop(change.node)
        return tuple(present)

    @property
    def later(self) -> tuple[Change, ...]:
        """The changes after the start."""
        return tuple(change for change in self.changes if change.at_us > 0)

    @property
    def num_failures(self) -> int:
        return sum(not change.joins for change in self.later)

    @property
    def num_hangs(self) -> int:
        return sum(change.hangs for change in self.later)

    @property
    def num_outages(self) -> int:
        """The number of times at which nodes fail: nodes that leave at the same time count once."""
        return len({change.at_us for change in self.later if not change.joins})

    def until(self, end_us: int) -> "Trace":
        """The same trace, cut or stretched to end at `end_us`."""
        slowdowns = tuple(slow for slow in self.slowdowns if slow.start_us < end_us)
        return Trace(tuple(change for change in self.changes if change.at_us <= end_us), end_us, slowdowns)

    def with_slowdowns(self, slowdowns: Iterable[Slowdown]) -> "Trace":
        """The same trace with these slowdowns as well."""
        merged = sorted((*self.slowdowns, *slowdowns), key=lambda slow: slow.start_us)
        return Trace(self.changes, self.end_us, tuple(merged))

    def dumps(self, comments: Iterable[str] = ()) -> str:
        lines = [f"# {comment}" for comment in comments]
        body = [(change.at_us, f"{change.at_us // 1000},{change.word},{change.node}") for change in self.changes]
        body += [(slow.start_us, _slow_line(slow)) for slow in self.slowdowns]
        lines += [line for _, line in sorted(body, key=lambda item: item[0])]
        return "\n".join([*lines, f"# end {self.end_us // 1000}"]) + "\n"

    def save(self, path: Path | str, comments: Iterable[str] = ()) -> None:
        write_text(Path(path), self.dumps(comments))

    @staticmethod
    def parse(text: str) -> "Trace":
        changes, slowdowns, end_us = [], [], None
        for number, line in enumerate(text.splitlines(), start=1):
            body = line.strip()
            if body.startswith("# end "):
                end_us = _read_ms(body.removeprefix("# end "), number)
            elif body and not body.startswith("#"):
                parts = [part.strip() for part in body.split(",")]
                if len(parts) == 5 and parts[1] in _SLOW_WORDS:
                    slowdowns.append(_read_slowdown(parts, number))
                else:
                    changes.append(_read_change(body, number))
        last_us = max([changes[-1].at_us if changes else 0, *(slow.end_us for slow in slowdowns)])
        return Trace(tuple(changes), last_us if end_us is None else end_us, tuple(slowdowns))

    @staticmethod
    def load(path: Path | str) -> "Trace":
        try:
            return Trace.parse(Path(path).read_text(encoding="utf-8"))
        except OSError as problem:
            raise FileProblem(f"cannot read {path}: {problem.strerror or problem}") from None
        except UnicodeDecodeError:
            raise FileProblem(f"{path} is not text: a trace has a line 'milliseconds,add|remove,node' for each change") from None
        except UserError as problem:
            raise FileProblem(f"{path} is not a usable trace: {problem}") from None


def _is_name(node: str) -> bool:
    """Say whether the name can be read back from a line of a trace."""
    return len(node.splitlines()) == 1 and node == node.strip() and "," not in node


def live_counts(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield each time with the number of live nodes from then on, first the start; changes at one time count as one."""
    present, at_us = 0, 0
    for change in trace.changes:
        if change.at_us != at_us:
            yield at_us, present
            at_us = change.at_us
        present += 1 if change.joins else -1
    yield at_us, present


def _read_change(body: str, number: int) -> Change:
    parts = [part.strip() for part in body.split(",")]
    if len(parts) != 3 or parts[1] not in _WORDS or not parts[2]:
        raise UserError(
            f"line {number} is {shortened(body)}, but a change is written milliseconds,add|remove|hang,node, "
            "such as 1800000,remove,W1_2, and a slowdown like 600000,slow,W1_2,0.6,1200000"
        )
    return Change(_read_ms(parts[0], number), _WORDS[parts[1]], parts[2], parts[1] == _HANG)


def _read_slowdown(parts: list[str], number: int) -> Slowdown:
    start, word, node, speed, end = parts
    try:
        value = float(speed)
    except ValueError:
        raise UserError(f"line {number} gives the speed {shortened(speed)}, but it is a number such as 0.6") from None
    return Slowdown(_read_ms(start, number), _read_ms(end, number), node, value, _SLOW_WORDS[word])


def _slow_line(slow: Slowdown) -> str:
    word = "slow-link" if slow.is_link else "slow"
    return f"{slow.start_us // 1000},{word},{slow.node},{slow.speed:g},{slow.end_us // 1000}"


def _read_ms(text: str, number: int) -> int:
    # The length is looked at first: Python refuses to turn thousands of digits into a number.
    if not text.strip().isdecimal() or len(text) > 20 or int(text) > _MOST_MS:
        raise UserError(
            f"line {number} gives the time {shortened(text)}, but it is a whole number of milliseconds from 0 to {_MOST_MS}"
        )
    return int(text) * 1000
