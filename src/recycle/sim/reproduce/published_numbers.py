"""Published numbers of Gandhi, Zhao, Skiadopoulos, Kozyrakis, "ReCycle", SOSP 2024: samples a second on 32 A100."""

from dataclasses import dataclass

INTERVALS_H = (6.0, 2.0, 0.5)
"""Hours between two failures, in the order of the cells."""


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A model: its shape on 32 workers as we read it, fault-free 1F1B, and each system by interval; None is out of memory."""

    model: str
    num_pipelines: int
    num_stages: int
    fault_free: float
    cells: dict[str, tuple[float, ...] | None]


TABLE = (
    PublishedRow(
        "gpt3-medium",
        16,
        2,
        27.58,
        {"bamboo": (19.47, 18.98, 15.24), "oobleck": (27.26, 25.37, 19.47), "recycle": (27.27, 25.42, 22.27)},
    ),
    PublishedRow("gpt3-3.35b", 8, 4, 14.87, {"bamboo": None, "oobleck": (14.55, 13.44, 9.78), "recycle": (14.59, 14.17, 12.63)}),
    PublishedRow("gpt3-6.7b", 4, 8, 5.33, {"bamboo": None, "oobleck": (4.98, 4.65, 2.78), "recycle": (5.17, 4.85, 3.53)}),
)

PLANNER_SECONDS = 3600
"""Planning for 2,048 GPUs with up to 25 % failures took "under an hour"."""
