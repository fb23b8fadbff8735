"""The title of a process in `ps` and `top`, so that a user finds the process that a message names."""

from contextlib import suppress


def set_title(title: str) -> None:
    """Give this process a title; without the package `setproctitle` it keeps its command line."""
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)
