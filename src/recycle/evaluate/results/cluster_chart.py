"""The picture of a measured cluster: throughput of every variant beside 1F1B without a failure, and where the prediction was."""

from collections.abc import Sequence
from io import BytesIO

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recycle.evaluate.results.cluster_tables import BEST, Line
from recycle.report.render import palette

_COLOURS = {"nobody": palette.PAINTS["F"].fill, "torch": palette.GRID, "dead": palette.PAINTS["I"].fill}
_MEANINGS = {"nobody": "nobody dead", "torch": "nobody dead, torch's schedules", "dead": "with dead workers"}


def draw_cluster(lines: Sequence[Line], yardstick: Line, title: str) -> bytes:
    """Return a PNG with a bar for every variant: its throughput as a share of the yardstick's."""
    figure = Figure(figsize=(9, 1.6 + 0.42 * len(lines)), facecolor=palette.PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    seen: set[str] = set()
    for place, line in enumerate(lines):
        share, kind = line.share_of(yardstick), _kind(line)
        axes.barh(place, share, 0.66, color=_COLOURS[kind], label=_MEANINGS[kind] if kind not in seen else None)
        seen.add(kind)
        axes.text(0.01, place, f"{share:.0%}  {line.typical_us / 1e3:.0f} ms", va="center", fontsize=8, color=_ink(kind))
        if line.is_predicted:
            at = share / (1 + line.error(BEST))
            mark = "predicted from rehearsals in between" if "mark" not in seen else None
            axes.plot([at, at], [place - 0.38, place + 0.38], color=palette.INK, linewidth=2, label=mark)
            seen.add("mark")
    axes.axvline(1, color=palette.FAINT_INK, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(lines)), [_label(line) for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel(f"throughput, as a share of fault-free {yardstick.title}", color=palette.INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=palette.INK, labelsize=8)
    axes.set_title(title, fontsize=10, fontweight="bold", color=palette.INK, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=4, fontsize=8, frameon=False)
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=150, metadata={"Software": None})
    return stream.getvalue()


def _kind(line: Line) -> str:
    if line.dead:
        return "dead"
    return "nobody" if line.is_predicted else "torch"


def _ink(kind: str) -> str:
    return palette.PAPER if kind == "nobody" else palette.INK


def _label(line: Line) -> str:
    return f"{line.title}\n{line.dead} dead" if line.dead else line.title
