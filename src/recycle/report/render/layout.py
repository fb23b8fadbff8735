"""The layout of the picture of an iteration, which `svg` and `png` draw: title, axis, one band for each worker, legend.

Lengths are in screen pixels. Small plans show every slot; in big plans slots narrower than a pixel are merged, so that a picture
of a million slots remains a small file.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from recycle.core.cluster import Worker
from recycle.report.render.palette import PAINTS
from recycle.report.timeline.timeline import Block, Lane, Span, Timeline, axis_ticks, merged

MOST_SLOTS = 20_000
MOST_RUNS = 200_000
MOST_LANES_PX = 40_000.0  # matplotlib refuses pictures of 65,536 pixels
BUBBLE, WINDOW, BESIDE, MORE, FEWER = "bubble", "window", "beside", "more", "fewer"
# The height of the bar on an op that computes more or fewer layers than its stage has.
MARK_PX = 4.0
FONT_PX = 11.0
LETTER_PX = 0.66 * FONT_PX


@dataclass(frozen=True, slots=True)
class Band:
    """A lane with its upper edge: the blocks of its window, and the pale blocks beside it."""

    lane: Lane
    blocks: tuple[Block, ...]
    beside: tuple[Block, ...]
    top_px: float


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """A legend entry at (x, y): a look of the palette, or BUBBLE, WINDOW, BESIDE, MORE, FEWER, and its meaning."""

    look: str
    is_rerouted: bool
    meaning: str
    x_px: float
    y_px: float


class Picture:
    """The layout of one iteration: title, axis, bands from top to bottom, legend."""

    left_px, right_px, top_px = 84.0, 24.0, 74.0

    def __init__(self, timeline: Timeline, plot_px: float | None = None, length_us: int | None = None) -> None:
        """Lay out an iteration; a page with two pictures gives both the same width and length of the axis."""
        self.timeline, self.shape = timeline, timeline.problem.shape
        first, last = timeline.extent
        self.extent: Span = first, last if length_us is None else first + length_us
        # About 36 pixels for the shortest op, between the width of a page and of a screen.
        wanted_px = 36.0 * (self.extent[1] - self.extent[0]) / self.timeline.shortest_us
        self.plot_px = plot_px or min(1600.0, max(760.0, wanted_px))
        self.num_lanes = self.shape.num_workers
        self.is_merged = self.timeline.num_ops > MOST_SLOTS
        lane_px = 22.0 if self.num_lanes <= 48 else max(2.0, 1056.0 / self.num_lanes)
        self.lane_px = min(lane_px, MOST_LANES_PX / self.num_lanes)
        self.gap_px = min(10.0, self.lane_px / 2)
        self.title, self.subtitle = (" · ".join(clauses) for clauses in (self.timeline.about, self.timeline.rating))
        self.height_px = self.legend()[-1].y_px + 16

    @property
    def width_px(self) -> float:
        return self.left_px + self.plot_px + self.right_px

    @property
    def lanes_px(self) -> float:
        return self.num_lanes * self.lane_px + (self.shape.num_pipelines - 1) * self.gap_px

    @property
    def axis(self) -> tuple[str, list[tuple[int, str]]]:
        """The unit and the ticks of the axis."""
        return axis_ticks(self.extent, int(self.plot_px // 55))

    @property
    def slot_px(self) -> float:
        """The height of a slot; high lanes have a gap between them."""
        return self.lane_px - (2 if self.lane_px > 8 else 0)

    @property
    def has_lane_labels(self) -> bool:
        return self.lane_px >= 0.8 * FONT_PX

    def has_pipeline_label(self, worker: Worker) -> bool:
        """Whether this lane is labelled with its pipeline, where lanes are too low for labels of their own."""
        pipeline_px = self.shape.num_stages * self.lane_px + self.gap_px
        every = max(1, math.ceil(1.3 * FONT_PX / pipeline_px))
        return worker.stage == 0 and worker.pipeline % every == 0

    def x_px(self, time_us: int) -> float:
        first, last = self.extent
        return self.left_px + self.plot_px * (time_us - first) / (last - first)

    def bands(self) -> Iterator[Band]:
        num_stages = self.shape.num_stages
        columns = max(20, min(int(self.plot_px), MOST_RUNS // self.num_lanes))
        for number, worker in enumerate(self.shape.workers()):
            lane = self.timeline.lane(worker, with_ops=not self.is_merged)
            beside = tuple(self.timeline.neighbours(lane))
            blocks = lane.blocks
            if self.is_merged:
                blocks = tuple(merged(blocks, self.extent, columns))
                beside = tuple(merged(sorted(beside, key=lambda block: block.start_us), self.extent, columns))
            top = self.top_px + number * self.lane_px + number // num_stages * self.gap_px
            yield Band(lane, blocks, beside, top)

    def mark(self, block: Block) -> str:
        """MORE or FEWER if the op computes more or fewer layers than its stage's own, else nothing."""
        if self.is_merged or not block.more_layers:
            return ""
        return MORE if block.more_layers > 0 else FEWER

    def label(self, block: Block) -> str:
        """The longest label that fits into the block, of kind, micro-batch and (if re-routed) home pipeline."""
        if self.is_merged or self.lane_px < FONT_PX + 2:
            return ""
        room = self.x_px(block.end_us) - self.x_px(block.start_us) - 3
        letter = PAINTS[block.look].letter
        texts = [*block.labels(letter), str(block.op.microbatch.index) if block.op else letter]
        return next((text for text in texts if len(text) * LETTER_PX <= room), "")

    def legend(self) -> list[LegendEntry]:
        """Return the entries for all looks of the iteration, in as many lines as needed."""
        entries: list[LegendEntry] = []
        x, y = self.left_px, self.top_px + self.lanes_px + 30
        for look, is_rerouted, meaning in self._meanings():
            width = 44 + 0.56 * FONT_PX * len(meaning)
            if entries and x + width > self.width_px:
                x, y = self.left_px, y + 20
            entries.append(LegendEntry(look, is_rerouted, meaning, x, y))
            x += width
        return entries

    def _meanings(self) -> Iterator[tuple[str, bool, str]]:
        looks = self.timeline.looks
        for look, paint in PAINTS.items():
            if look in looks:
                yield look, False, f"{paint.letter} {paint.meaning}"
        if self.timeline.has_rerouted:
            yield min(looks & set("FIBW"), key="FIBW".index), True, "re-routed from another pipeline"
        if self.timeline.has_cuts and not self.is_merged:
            yield MORE, False, "more layers than the stage's own"
            yield FEWER, False, "fewer"
        yield BUBBLE, False, "bubble"
        yield WINDOW, False, "next iteration starts"
        if len(set(self.timeline.windows)) > 1:
            yield BESIDE, False, "iteration before or after"
