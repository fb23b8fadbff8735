"""`LossWatch`: notices losses that are infinite or not a number."""

import math
from collections.abc import Callable

from recycle.core.errors import LossNotFinite, UserError

# After so many steps in a row with a loss that is not finite, nothing better is to be expected.
_MOST_NOT_FINITE = 25


class LossWatch:
    """Warns of the first loss of several that is not finite; `fail` gets the error if a run has nothing else."""

    def __init__(self, warn: Callable[[str], None], fail: Callable[[UserError], None]) -> None:
        self._warn, self._fail = warn, fail
        self._num_not_finite = 0

    def add(self, step: int, loss: float) -> None:
        self._num_not_finite = 0 if math.isfinite(loss) else self._num_not_finite + 1
        if self._num_not_finite == 1:
            self._warn(f"the loss of step {step} is {loss}")
        elif self._num_not_finite == _MOST_NOT_FINITE:
            problem = f"the loss was infinite or not a number in {_MOST_NOT_FINITE} steps in a row, to step {step}"
            self._fail(LossNotFinite(problem))
