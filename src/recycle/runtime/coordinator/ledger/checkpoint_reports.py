"""`CheckpointReports`: the ledger's part for saved stages. A checkpoint is not ahead of the record, and is decided once.

While a recovery looks for the checkpoint to go back to, no other checkpoint is completed: if the recovery then goes back to an
earlier one, a later one would hold steps that are not in the record any more, and perhaps a wrong gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from recycle.core.events.record import Event, Saved
from recycle.runtime.checkpoint.folder import CheckpointComplete, CheckpointIncomplete
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved


class CheckpointReports:
    """Hands each report to `give`, at once or when its step is in the record; `decide` is called with the outcome.

    `is_ahead` says whether a step is not in the record yet. `write` gets the event of a complete checkpoint, `warn` the reason
    for one that will never be. `newest` is the number of steps of the newest checkpoint, 0 if there is none.
    """

    def __init__(
        self,
        give: Callable[[StageSaved | StageNotSaved], None] | None,
        is_ahead: Callable[[int], bool],
        write: Callable[[Event], None],
        warn: Callable[[str], None],
        now_us: Callable[[], int],
        newest: int = 0,
    ) -> None:
        self._give, self._is_ahead, self._write, self._warn, self._now_us = give, is_ahead, write, warn, now_us
        self.newest = newest
        self._early: list[StageSaved | StageNotSaved] = []
        self._is_held = False
        self._decided: set[int] = set()
        self._differing: set[int] = set()
        self._positions: dict[int, dict[str, Mapping[str, str]]] = {}

    def keep_positions(self, num_steps: int, positions: Mapping[str, Mapping[str, str]]) -> None:
        """Keep a worker's positions in streams, by part, for the checkpoint after `num_steps` steps; the farthest counts."""
        known = self._positions.setdefault(num_steps, {}) if positions else {}
        for part, reached in positions.items():
            known[part] = max((known.get(part, reached), reached), key=lambda each: max(map(int, each), default=0))

    def add(self, report: StageSaved | StageNotSaved) -> None:
        assert self._give is not None
        if self._is_held or self._is_ahead(report.num_steps - 1):  # ahead: a slow peer has not reported yet
            self._early.append(report)
            return
        if report.num_steps in self._differing:
            report = StageNotSaved(report.num_steps, report.stage, "peers hold different weights")
        if isinstance(report, StageSaved) and report.num_steps in self._positions:
            report = replace(report, positions=self._positions[report.num_steps])
        self._give(report)

    def release(self) -> None:
        """Add the reports that waited for a step again: it is in the record now."""
        early, self._early = self._early, []
        for report in early:
            self.add(report)

    def hold(self) -> None:
        """Hand over what came so far, and hold later reports until `go_back`: a checkpoint is looked for."""
        self._is_held = False
        self.release()
        self._is_held = True

    def refuse(self, num_steps: int) -> None:
        """Have no checkpoint after `num_steps` steps: peers hold different weights."""
        self._differing.add(num_steps)
        if self._give is not None:
            self.decide([CheckpointIncomplete(num_steps, "peers hold different weights")])

    def allow_again(self, num_steps: int) -> bool:
        """Allow the checkpoint after `num_steps` steps again, because a new epoch begins there; return whether it was refused."""
        was_refused = num_steps in self._differing
        self._differing.discard(num_steps)
        return was_refused

    def restore(self, num_steps: int) -> None:
        """Note a checkpoint that an earlier coordinator has completed."""
        self._decided.add(num_steps)
        self.newest = num_steps

    def go_back(self, num_steps: int) -> None:
        """Forget all later checkpoints, whose steps are redone, and hand over the reports on others that were held."""
        self.newest = min(self.newest, num_steps)
        self._decided = {number for number in self._decided if number <= num_steps}
        self._differing = {number for number in self._differing if number <= num_steps}
        self._early = [report for report in self._early if report.num_steps <= num_steps]
        self._positions = {number: kept for number, kept in self._positions.items() if number <= num_steps}
        self._is_held = False
        self.release()

    def is_pending(self, report: StageSaved | StageNotSaved) -> bool:
        return report in self._early or report.num_steps not in self._decided

    def decide(self, decided: Sequence[CheckpointComplete | CheckpointIncomplete]) -> None:
        """Write that checkpoints are complete, or will not be: nobody has to report on them again.

        One that was not may be complete in a later epoch, which writes the last checkpoint again.
        """
        for each in decided:
            if each.num_steps in self._decided and (each.num_steps <= self.newest or isinstance(each, CheckpointIncomplete)):
                continue
            self._decided.add(each.num_steps)
            self._positions.pop(each.num_steps, None)
            match each:
                case CheckpointComplete(num_steps, folder, size_bytes):
                    self.newest = max(self.newest, num_steps)
                    self._write(Saved(self._now_us(), num_steps, folder.name, size_bytes))
                case CheckpointIncomplete(num_steps, reason):
                    self._warn(f"there is no checkpoint of {num_steps} steps, but training goes on: {reason}")
