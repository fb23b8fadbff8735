"""The chart of a campaign: the throughput of each system over time, and the live nodes with every failure marked."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from recycle.core.events.record import Changed, Event, Spell
from recycle.report.record.metrics import measure, throughput_over_time
from recycle.report.render import palette
from recycle.report.render.matplotlib_figure import new_figure, png_bytes, simplify_axes

LineStyle = tuple[str, str | tuple[int, tuple[float, ...]]]
# Okabe and Ito's colours, which colour-blind readers can distinguish, each with its own dashes for print without colour.
# A system has the same line in every picture.
_SYSTEM_LINES: dict[str, LineStyle] = {
    "recycle": ("#0072B2", "-"),
    "recycle-rerouting": ("#4C9BD6", (0, (10, 1))),
    "elaswave": ("#E69F00", (0, (5, 1, 1, 1))),
    "resihp": ("#B2182B", (0, (3, 1, 1, 1))),
    "resihp, 1 GPU lost": ("#F4A6A6", (0, (1, 3))),
    "odyssey": ("#1B7837", (0, (7, 1, 2, 1))),
    "odyssey-rerouting": ("#A6A6D8", (0, (1, 1.5))),
    "oobleck": ("#D55E00", (0, (6, 1.5))),
    "oobleck-zb": ("#FFA35C", (0, (6, 1, 1, 1, 1, 1))),
    "bamboo": ("#009E73", (0, (3, 1.2))),
    "varuna": ("#CC79A7", (0, (1, 1))),
    "replica-drop": ("#8C6D00", (0, (6, 1.5, 1, 1.5))),
    "replica-drop-zb": ("#C9A227", (0, (3, 3))),
    "checkpoint-restart": ("#56B4E9", (0, (4, 1, 1, 1, 1, 1))),
    "checkpoint-restart-spare": ("#7F3C8D", (0, (2, 2))),
    "checkpoint-restart-spare-zb": ("#B98BC9", (0, (2, 1, 6, 1))),
    "fault-scaled": ("#999999", (0, (8, 2))),
    "ideal": ("#000000", (0, (1, 2))),
}
LINES = tuple(_SYSTEM_LINES.values())
_NUM_BINS = 144


def line_of(name: str, names: Sequence[str]) -> LineStyle:
    """The colour and dashes of a system, or of any other name by its position in `names`."""
    return _SYSTEM_LINES.get(name) or LINES[names.index(name) % len(LINES)]


def draw_campaign(records: Mapping[str, Sequence[Event]], title: str, fault_free: float) -> bytes:
    """Return a PNG: samples a second over time, one line a system, and below it the number of live nodes."""
    figure = new_figure(10, 5.6)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[5, 1])
    _draw_throughput(top, records, fault_free)
    _draw_nodes(bottom, next(iter(records.values())))
    top.set_title(title, fontsize=11, color=palette.INK, loc="left", fontweight="bold")
    bottom.set_xlabel("hours", color=palette.INK)
    return png_bytes(figure)


def _draw_throughput(axes: Axes, records: Mapping[str, Sequence[Event]], fault_free: float) -> None:
    axes.axhline(fault_free, color=palette.GRID, linewidth=1)
    for name, record in records.items():
        colour, dashes = line_of(name, list(records))
        points = throughput_over_time(record, _NUM_BINS)
        mean = measure(record).throughput
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.5, label=f"{name} ({mean:.3g})")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("samples / s", color=palette.INK)
    axes.text(1.005, fault_free, "fault-free", transform=axes.get_yaxis_transform(), va="center", ha="left", fontsize=7)
    axes.legend(fontsize=8, frameon=False, ncols=1, loc="center left", bbox_to_anchor=(1.06, 0.5), title="system (mean)")
    simplify_axes(axes)


def _draw_nodes(axes: Axes, record: Sequence[Event]) -> None:
    changes = [event for event in record if isinstance(event, Changed)]
    end = max((getattr(event, "end_us", 0) for event in record), default=0) / 3.6e9
    first = next((event.num_live for event in record if isinstance(event, Spell)), 0)
    after = {change.at_us: change.num_live for change in changes}  # changes at the same time are drawn once
    times = [0.0, *(at_us / 3.6e9 for at_us in after), end]
    counts = [first, *after.values()]
    axes.step(times, [*counts, counts[-1]], where="post", color=palette.INK, linewidth=1.2)
    failures = [change for change in changes if not change.joins]
    hours, counts = [change.at_us / 3.6e9 for change in failures], [after[change.at_us] for change in failures]
    axes.plot(hours, counts, linestyle="none", marker="x", markersize=4, color="#D55E00")
    axes.set_ylabel("live nodes", color=palette.INK)
    axes.set_xlim(0, end or 1)
    simplify_axes(axes)
