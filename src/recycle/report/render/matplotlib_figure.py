"""The matplotlib figure behind every PNG of the report: without a window or global state, returned as bytes."""

from io import BytesIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recycle.report.render import palette


def new_figure(width_in: float, height_in: float, is_constrained: bool = True) -> Figure:
    """Return an empty figure; a constrained layout keeps room for titles, labels and legends."""
    return Figure(figsize=(width_in, height_in), facecolor=palette.PAPER, layout="constrained" if is_constrained else None)


def png_bytes(figure: Figure, dpi: int = 150) -> bytes:
    """Return the figure as a PNG file, without the version of matplotlib, so that equal figures have equal bytes."""
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, metadata={"Software": None})
    return stream.getvalue()


def simplify_axes(axes: Axes, label_size: float = 8, line_width: float = 0.6) -> None:
    """Leave the left and the lower edge of the axes, and a horizontal grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=palette.FAINT_INK, labelsize=label_size)
    axes.grid(axis="y", color=palette.GRID, linewidth=line_width)
    axes.set_axisbelow(True)
