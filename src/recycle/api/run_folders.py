"""`new_folder`: the folder of a run whose user named none."""

from itertools import count
from pathlib import Path

from recycle.core.errors import FileProblem

NUMBER = "{number}"
NEW_RUN = f"runs/{NUMBER}"
"""The folder of a run by default: the number is the first one that is free."""


def new_folder(pattern: str) -> Path:
    """Make a folder whose name has the first free number in the place of `{number}`, and return it."""
    for number in count(1):
        folder = Path(pattern.replace(NUMBER, str(number)))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as problem:
            raise FileProblem(
                f"cannot make {folder}: {problem.strerror or problem}; name another folder with out, or give out=None to record "
                "nothing"
            ) from None
        return folder
    raise AssertionError("numbers do not end")
