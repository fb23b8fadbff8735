"""`start_process`: a process is forked from the server, although that may end meanwhile, or descriptors may be short."""

from contextlib import suppress
from multiprocessing.process import BaseProcess

from recycle.host.process_lifetime import refuse_without_descriptors

# A start takes a socket, two pipes, and a copy of an end.
_DESCRIPTORS_OF_A_START = 6


def start_process(process: BaseProcess) -> None:
    """Start a process, with another fork server if this one ends in the middle of that; raise OSError if it cannot be started."""
    refuse_without_descriptors(_DESCRIPTORS_OF_A_START)
    with suppress(ConnectionError, EOFError):
        process.start()
        return
    try:
        process.start()
    except EOFError:
        raise ConnectionError("the server that starts processes ended") from None
