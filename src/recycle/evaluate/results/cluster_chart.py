"""The bar chart of a measured cluster: the throughput of every variant relative to fault-free 1F1B, with predictions marked."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from recycle.evaluate.results.cluster_tables import FULL, VariantResult
from recycle.report.render import palette
from recycle.report.render.matplotlib_figure import new_figure, png_bytes

_COLOURS = {
    "no worker dead": palette.PAINTS["F"].fill,
    "no worker dead, torch's schedules": palette.GRID,
    "with dead workers": palette.PAINTS["I"].fill,
}
_FAULT_FREE, _TORCH, _DEGRADED = _COLOURS


def draw_cluster(results: Sequence[VariantResult], baseline: VariantResult, title: str) -> bytes:
    """Return the chart as the bytes of a PNG file."""
    return png_bytes(cluster_figure(results, baseline, title))


def cluster_figure(results: Sequence[VariantResult], baseline: VariantResult, title: str) -> Figure:
    """Return a figure with a bar for every variant: its throughput as a share of the baseline's."""
    figure = new_figure(9, 1.6 + 0.42 * len(results))
    axes = figure.subplots()
    for place, result in enumerate(results):
        share, kind = result.share_of(baseline), _kind(result)
        axes.barh(place, share, 0.66, color=_COLOURS[kind], label=kind)
        ink = palette.PAPER if kind == _FAULT_FREE else palette.INK
        axes.text(0.01, place, f"{share:.0%}  {result.typical_us / 1e3:.0f} ms", va="center", fontsize=8, color=ink)
        if result.is_predicted:
            at = share / (1 + result.error(FULL))
            axes.plot([at, at], [place - 0.38, place + 0.38], color=palette.INK, linewidth=2, label="predicted")
    axes.axvline(1, color=palette.FAINT_INK, linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(results)), [_label(result) for result in results])
    axes.invert_yaxis()
    axes.set_xlabel(f"throughput, as a share of {baseline.title}", color=palette.INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=palette.INK, labelsize=8)
    axes.set_title(title, fontsize=10, fontweight="bold", color=palette.INK, loc="left")
    handles, labels = axes.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    # Outside the axes, where the constrained layout keeps room for it: it is as wide as the figure, not as the axes.
    figure.legend(by_label.values(), by_label, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _kind(result: VariantResult) -> str:
    if result.dead:
        return _DEGRADED
    return _FAULT_FREE if result.is_predicted else _TORCH


def _label(result: VariantResult) -> str:
    return f"{result.title}\n{result.dead} dead" if result.dead else result.title
