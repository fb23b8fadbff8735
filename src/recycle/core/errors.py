"""What can be wrong with what a user gave us.

Everything a user can cause is a `UserError`: its text is one sentence that says what is wrong, which value, and what to do. The
command line prints it and exits with `exit_code`, which a script can tell apart; our own mistakes stay assertions and tracebacks.
"""


class UserError(ValueError):
    """Input that cannot be used, explained in one sentence."""

    exit_code = 2


class MemoryTooSmall(UserError):
    """No schedule at all fits into the memory that was given."""


class FileProblem(UserError):
    """A file or folder that is missing, unreadable, unwritable, corrupt or not ours."""


class Uncuttable(UserError):
    """A model that cannot be cut into so many stages, or not there."""

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


class WorkerFailed(UserError):
    """A worker that could not go on, with its last words."""

    exit_code = 20
