"""What a benchmark is: a command line, and tables of cases, run one by one with progress shown, printed and kept as Markdown."""

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import recycle

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
YES, NO, UNJUDGED = "yes", "no", "–"
QUIET_LOAD = 0.5
_LIBRARIES = ("numpy", "numba", "scipy", "ortools")
_NUMBER = re.compile(r"\d[\d.]*(,\d{3})*( [GM]iB)?")

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: what is shown while it runs, and what makes its row."""

    label: str
    run: Callable[[], Row]


@dataclass(frozen=True, slots=True)
class Section:
    """One table. The last cell of a row says whether it meets its target: YES, NO or UNJUDGED."""

    name: str
    title: str
    about: str
    header: Row
    cases: tuple[Case, ...]


Results = dict[str, list[Row]]
"""The rows of each section, by its name."""


@dataclass(frozen=True, slots=True)
class Script:
    """A benchmark as its user sees it: its name, what it measures, its tables, and what `--quick` and `--save` mean to it."""

    name: str
    description: str
    tables: tuple[str, ...]
    quick: str
    save: str = "keep the tables under docs/benchmarks"
    libraries: tuple[str, ...] = _LIBRARIES
    quantity: str = "times"
    width: int = 150

    def run(self, make: Callable[[str, bool], Sequence[Section]]) -> int:
        """Measure what the command line asks for; `make` gives the sections of a table, quick or not. Return the exit code."""
        args = self.arguments()
        # Whoever ends this ends what it has started: an exit runs what cleans up, a signal's own end would not.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            console, about = self.introduce()
            sections = [section for name in args.only or self.tables for section in make(name, args.quick)]
            results = measure(sections, console)
            if args.save:
                console.print(f"wrote {self.keep(args.only or (), about, sections, results)}")
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        return exit_code(results)

    def arguments(self) -> argparse.Namespace:
        """What the command line asks for: `only` some tables, `quick`, `save`."""
        parser = argparse.ArgumentParser(description=self.description)
        parser.add_argument(
            "--only", nargs="+", choices=self.tables, metavar="TABLE", help=f"only these: {', '.join(self.tables)}"
        )
        parser.add_argument("--quick", action="store_true", help=self.quick)
        parser.add_argument("--save", action="store_true", help=self.save)
        args = parser.parse_args()
        if args.save and args.quick:
            parser.error("--save keeps the numbers that count: leave --quick out")
        return args

    def introduce(self) -> tuple[Console, list[Row]]:
        """Print where the numbers will come from, with a warning if others are at work there; return the console, and that."""
        console = Console(width=None if sys.stdout.isatty() else self.width, highlight=False)
        about = machine(" ".join([f"python benchmarks/{self.name}.py", *sys.argv[1:]]), self.libraries)
        for name, value in about:
            console.print(f"{name:<13} {value}", soft_wrap=True)
        if (load := os.getloadavg()[0]) > QUIET_LOAD:
            warning = f"warning: the load average is {load:.2f}, so the {self.quantity} below are too high"
            console.print(warning, style="bold red")
        return console, about

    def keep(self, only: Sequence[str], about: list[Row], sections: list[Section], results: Results) -> Path:
        """Write the tables under docs/benchmarks, and return where; if they are only some, the file's name says which."""
        day = datetime.date.today().isoformat()
        path = ROOT / "docs" / "benchmarks" / f"{'-'.join([day, self.name, *only])}.md"
        path.write_text(markdown(f"{self.name.capitalize()} benchmark, {day}", about, sections, results), encoding="utf-8")
        return path.relative_to(ROOT)


def exit_code(results: Results) -> int:
    """1 if a row misses its target."""
    return int(any(row[-1] == NO for rows in results.values() for row in rows))


def machine(command: str, libraries: Sequence[str] = _LIBRARIES) -> list[Row]:
    """Where and from what the numbers come."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries)
    return [
        ("command", command),
        ("commit", _commit()),
        ("processor", f"{_processor()}, {os.cpu_count()} cores, {platform.machine()}"),
        ("memory", f"{memory / GIB:.0f} GiB"),
        ("system", platform.system()),
        ("versions", f"recycle {recycle.__version__}, Python {platform.python_version()}, {versions}"),
        ("load average", f"{os.getloadavg()[0]:.2f} at the start"),
    ]


def _commit() -> str:
    commit = _output("git", "rev-parse", "--short", "HEAD").strip()
    changed = _output("git", "status", "--porcelain", "--untracked-files=no").strip()
    return f"{commit} with uncommitted changes" if changed else commit or "unknown"


def _processor() -> str:
    """The processor's name, as Linux on x86, Linux elsewhere or macOS tell it."""
    for command in (("cat", "/proc/cpuinfo"), ("lscpu",), ("sysctl", "machdep.cpu")):
        if found := re.search(r"(?:model name|brand_string)\s*:\s*(.+)", _output(*command), re.IGNORECASE):
            return found[1].strip()
    return platform.processor() or "unknown"


def _output(*command: str) -> str:
    """What a command prints; nothing where there is no such command."""
    try:
        return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout
    except OSError:
        return ""


def measure(sections: list[Section], console: Console) -> Results:
    """Run every case, showing which; print each table when it is whole. A log, which has no progress bar, gets each row."""
    results: Results = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(len(section.cases) for section in sections))
        for section in sections:
            rows = results[section.name] = []
            for case in section.cases:
                progress.update(task, description=f"{section.name}: {case.label}")
                rows.append(case.run())
                progress.advance(task)
                if not progress.console.is_terminal:
                    print(f"{section.name}: {' | '.join(rows[-1])}", file=sys.stderr, flush=True)
            _print(section, rows, console)
    return results


def _print(section: Section, rows: list[Row], console: Console) -> None:
    table = Table(title=section.title, title_justify="left", title_style="bold")
    for name, is_right in zip(section.header, _right_aligned(rows), strict=True):
        table.add_column(name, justify="right" if is_right else "left")
    for row in rows:
        table.add_row(*row, style="bold red" if row[-1] == NO else None)
    console.print(table)
    console.print(_verdict(rows), "\n", style="italic")


def _verdict(rows: list[Row]) -> str:
    judged = [row[-1] for row in rows if row[-1] != UNJUDGED]
    if not judged:
        return "Not judged: there is no target for it, or this run is too small for one."
    others = "" if len(judged) == len(rows) else "; the others are not judged"
    return f"{judged.count(YES)} of {len(judged)} rows meet the target{others}."


def _right_aligned(rows: Sequence[Row]) -> list[bool]:
    """The columns that hold numbers only."""
    return [all(_NUMBER.fullmatch(cell) for cell in column) for column in zip(*rows, strict=True)]


def markdown_table(header: Row, rows: Sequence[Row]) -> str:
    """A table with aligned columns, so that it reads well raw too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    right = _right_aligned(rows)

    def line(row: Row) -> str:
        cells = (cell.rjust(w) if is_right else cell.ljust(w) for cell, w, is_right in zip(row, widths, right, strict=True))
        return f"| {' | '.join(cells)} |"

    rule = "|".join("-" * (width + 1) + (":" if is_right else "-") for width, is_right in zip(widths, right, strict=True))
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


def markdown(title: str, about: list[Row], sections: list[Section], results: Results) -> str:
    """The whole report."""
    parts = [f"# {title}", markdown_table(("", ""), about)]
    for section in sections:
        rows = results[section.name]
        parts += [f"## {section.title}", section.about, _verdict(rows), markdown_table(section.header, rows)]
    return "\n\n".join(parts) + "\n"


def write_between_marks(path: Path, text: str) -> None:
    """Put `text` between the two benchmark marks of the file at `path`."""
    marked = r"(.*<!-- benchmark: begin[^\n]*-->\n).*(<!-- benchmark: end -->.*)"
    found = re.fullmatch(marked, path.read_text(encoding="utf-8"), re.DOTALL)
    if not found:
        raise SystemExit(f"{path} has no place for the table: give it '<!-- benchmark: begin -->' and '<!-- benchmark: end -->'")
    path.write_text(f"{found[1]}\n{text}\n\n{found[2]}", encoding="utf-8")
