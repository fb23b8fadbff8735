"""The palette of every picture: the colours of Okabe and Ito, which colour-blind readers can distinguish.

The hues also differ in lightness, so that F, W and I differ in a grey print. Re-routed work is marked by more than colour: it is
pale with stripes in a picture, lower case and underlined in a terminal.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Paint:
    """The colours of one look: its fill, the ink on it, the pale fill for re-routed work; its letter and its meaning."""

    fill: str
    ink: str
    pale: str
    letter: str
    meaning: str


PAINTS: Mapping[str, Paint] = {
    "F": Paint("#0072b2", "#ffffff", "#b3d5e8", "F", "forward"),
    "B": Paint("#d55e00", "#000000", "#f2cfb3", "B", "whole backward"),
    "I": Paint("#e69f00", "#000000", "#f8e2b3", "I", "input gradient"),
    "W": Paint("#009e73", "#000000", "#b3e2d5", "W", "weight gradient"),
    "reduce": Paint("#cc79a7", "#000000", "#f0d7e5", "R", "reduce gradients"),
    "optimizer": Paint("#4d4d4d", "#ffffff", "#cacaca", "O", "optimizer step"),
}
"""By look: the four kinds of op, the reduction, the optimizer step."""

INK = "#222222"
FAINT_INK = "#6b6b6b"
PAPER = "#ffffff"
BUBBLE = "#ebebeb"
WINDOW = "#000000"
GRID = "#c4c4c4"
MORE = "#000000"
FEWER = "#ffffff"
