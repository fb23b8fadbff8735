"""What can be wrong with what a user gave us.

Everything a user can cause is a `UserError`: its text is one sentence that says what is wrong, which
value, and what to do. The command line prints it and exits with `exit_code`; our own mistakes stay
assertions and tracebacks.
"""


class UserError(ValueError):
    """Input that cannot be used, explained in one sentence."""

    exit_code = 2


class MemoryTooSmall(UserError):
    """No schedule at all fits into the memory that was given."""


class FileProblem(UserError):
    """A file or folder that is missing, unreadable, unwritable, corrupt or not ours."""
