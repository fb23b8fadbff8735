"""Op, Kind and MicroBatch: one kind of work of one micro-batch at one stage. The text form of an op is `2F0@1`."""

import re
from dataclasses import dataclass
from enum import StrEnum

from recycle.core.errors import UserError

_OP = re.compile(r"(\d+)([FBIW])(\d+)(?:@(\d+))?")


class Kind(StrEnum):
    """F forward; B whole backward; I gradient of the input; W gradient of the weights. B is I and W fused."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the name that torch.distributed.pipelining and the papers use
    W = "W"


@dataclass(frozen=True, slots=True, order=True)
class MicroBatch:
    """Micro-batch `index` of its home pipeline `pipeline`, wherever it is executed."""

    pipeline: int
    index: int


@dataclass(frozen=True, slots=True)
class Op:
    """One kind of work of one micro-batch at one stage; a `Slot` adds worker and time."""

    stage: int
    kind: Kind
    microbatch: MicroBatch

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch.index}@{self.microbatch.pipeline}"

    def text(self, pipeline: int) -> str:
        """Return the text form inside a row of `pipeline`, where the home is named only if it is another."""
        return str(self) if pipeline != self.microbatch.pipeline else f"{self.stage}{self.kind}{self.microbatch.index}"

    @staticmethod
    def parse(text: str, pipeline: int | None = None) -> "Op":
        """Read `2F0@1`, or `2F0` inside a row of `pipeline`."""
        match = _OP.fullmatch(text)
        if not match or (match[4] is None and pipeline is None):
            raise UserError(f"{text!r} is not an op: write <stage><F|B|I|W><micro-batch>@<home pipeline>, such as 2F0@1")
        home = pipeline if match[4] is None else int(match[4])
        assert home is not None
        return Op(int(match[1]), Kind(match[2]), MicroBatch(home, int(match[3])))
