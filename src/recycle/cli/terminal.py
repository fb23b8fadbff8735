"""Terminal output with rich: charts with the colours of `report.render.terminal_chart`, and progress bars.

rich omits colours under NO_COLOR, and every escape sequence if the output is not a terminal; charts are readable without them.
"""

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.text import Text

from recycle.core.errors import UserError
from recycle.report.render import terminal_chart as chart
from recycle.report.render.palette import PAINTS

LEAST_WIDTH = 40
PIPED_WIDTH = 120
_ASCII = str.maketrans({"·": ".", "▏": "|", "▕": "|", "│": "|", "─": "-", "┬": "+", "×": "x", "µ": "u", "⋮": ":"})
_ASCII |= dict.fromkeys(range(0x2800, 0x2900), "*")  # the braille dots of a curve
# A style for every style name of a chart; fills have their own ink, for dark and light backgrounds.
STYLES = {
    **dict.fromkeys((chart.BUBBLE, chart.DEAD, chart.AXIS), Style(dim=True)),
    **dict.fromkeys((chart.TITLE, chart.WINDOW), Style(bold=True)),
    **dict.fromkeys((chart.LABEL, chart.PLAIN), Style()),
    chart.NOTE: Style(italic=True, dim=True),
    **{look: Style(color=paint.ink, bgcolor=paint.fill) for look, paint in PAINTS.items()},
    **{look + chart.REROUTED: Style(color="#000000", bgcolor=paint.pale, underline=True) for look, paint in PAINTS.items()},
}


class Terminal(Console):
    """rich's console, but a closed pipe raises BrokenPipeError, on which `main` ends the command quietly."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def chart_width(console: Console) -> int:
    """The width of a chart: that of the terminal, or PIPED_WIDTH for a pipe or a file."""
    return console.width if console.is_terminal else PIPED_WIDTH


def chosen_width(asked: int | None, console: Console) -> int:
    """The width that `--width` asks for, or else that of the terminal."""
    if asked is None:
        return max(LEAST_WIDTH, chart_width(console))
    if asked < LEAST_WIDTH:
        raise UserError(f"--width is {asked}, too narrow for a chart: give at least {LEAST_WIDTH} columns")
    return asked


def print_lines(lines: Iterable[chart.Line], console: Console) -> None:
    """Print chart lines without wrapping, cropping or markup; in ASCII if the encoding has nothing else."""
    for line in lines:
        text = Text(no_wrap=True, overflow="ignore")
        for cell in line:
            text.append(cell.text.translate(_ASCII) if console.options.ascii_only else cell.text, STYLES[cell.style])
        console.print(text, soft_wrap=True, crop=False, highlight=False)


def progress_bar(*more: ProgressColumn) -> Progress:
    """Return a progress bar on stderr that disappears at the end; disabled if stderr is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *more)
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
