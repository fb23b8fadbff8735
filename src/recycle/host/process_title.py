"""The title of a process in `ps` and `top`, so that a user finds the process that a message names."""

import threading
from contextlib import suppress


def set_title(title: str) -> None:
    """Give this process a title; without the package `setproctitle` it keeps its command line.

    The short name of the process is the beginning of the title, without spaces: Slurm (proctrack/linuxproc) does not find, and so
    does not end, a process that has a space in it.
    """
    with suppress(ImportError):
        from setproctitle import setproctitle, setthreadtitle

        setproctitle(title)
        if threading.current_thread() is threading.main_thread():
            setthreadtitle(title.replace(" ", "-"))
