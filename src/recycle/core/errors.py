"""UserError and its kinds: errors that a user can cause, each with an exit code.

The command line prints the sentence and exits with `exit_code`. Bugs of ReCycle stay assertions and tracebacks.
"""


class UserError(ValueError):
    """Input that cannot be used, explained in one sentence."""

    exit_code = 2


class MemoryTooSmall(UserError):
    """No schedule at all fits into the memory that was given."""


class FileProblem(UserError):
    """A file or folder that is missing, unreadable, unwritable, corrupt or not ours."""


class Uncuttable(UserError):
    """A model that cannot be cut into the asked number of stages, or at the asked layers."""

    exit_code = 10


class DatasetTooSmall(UserError):
    """A data set that does not fill one step."""

    exit_code = 11


class ForeignPlan(UserError):
    """A plan or a library that was made for another shape, profile or set of dead workers."""

    exit_code = 12


class PortInUse(UserError):
    """A port that another program listens on."""

    exit_code = 13


class ForeignRun(UserError):
    """A run to resume that trained something else."""

    exit_code = 14


class NoCheckpoint(UserError):
    """A run to resume without a whole checkpoint."""

    exit_code = 15


class Unsendable(UserError):
    """A stage that returns something that cannot be sent to the next one."""

    exit_code = 16


class LossNotScalar(UserError):
    """A loss that is not one number."""

    exit_code = 17


class PlannerFailed(UserError):
    """A planner that failed with an error of its own."""

    exit_code = 21


class PeersDiffer(UserError):
    """Peers of a stage that hold different weights, without a majority that could be right."""

    exit_code = 22


class LossNotFinite(UserError):
    """A loss that was infinite or not a number in many steps in a row."""

    exit_code = 23


class NotSaved(UserError):
    """A run that is done, but whose last checkpoint could not be written."""

    exit_code = 24


class LeadershipLost(UserError):
    """A coordinator that does not lead its job any more: another one does, or has."""

    exit_code = 25


class CallbackFailed(UserError):
    """A callback that raised an error, in a run that must not go on without it."""

    exit_code = 26


class DataFailed(UserError):
    """Data that could not be read: a sample raised an error, a stream ended, or nothing was made within the deadline."""

    exit_code = 27


class Stopped(UserError):
    """A run that was asked to stop by a signal before its last step."""

    exit_code = 130

    def __init__(self, sentence: str, signal_number: int = 2) -> None:
        super().__init__(sentence)
        self.exit_code = 128 + signal_number


class WorkerFailed(UserError):
    """A worker that failed with an error, and its last output."""

    exit_code = 20
