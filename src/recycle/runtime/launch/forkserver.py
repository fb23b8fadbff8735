"""The server that worker processes are forked from: it has torch loaded already, and an allocator that keeps what it got.

By default an allocator hands freed memory back to the system, and the next micro-batch has it mapped and zeroed again, page by
page: some thousand faults an iteration, a tenth of a small model's step. A worker needs as much memory as its plan says in every
iteration, so nothing is gained by handing it back in between.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext

from recycle.host.process_lifetime import children_uninterrupted

# Of mimalloc, which torch brings along on some platforms, and of glibc, which it uses on others. Both read them as they load.
_KEEP_MEMORY = {
    "MIMALLOC_PURGE_DELAY": "-1",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the most that glibc takes
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# gloo says on the terminal whenever a connection cannot be made, which is part of losing workers: all of it is raised as well.
_SAY_LITTLE = {"TORCH_CPP_LOG_LEVEL": "FATAL"}


def fork_context(preload: Sequence[str]) -> ForkServerContext:
    """A context whose processes start with these modules loaded; the first one asked for decides, for there is one server."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["recycle.runtime.launch.preload", *preload])
    with _environment({**_KEEP_MEMORY, **_SAY_LITTLE}), children_uninterrupted():
        forkserver.ensure_running()
    return context


def settle_in() -> None:
    """Do the same for this process, which no server has forked. It is too late once torch is loaded."""
    if "torch" in sys.modules:
        return
    for name, value in {**_KEEP_MEMORY, **_SAY_LITTLE}.items():
        os.environ.setdefault(name, value)
    # glibc has read its own when this process began, and takes them by another way.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)


@contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """Give these to processes that start now; what the user has set stays."""
    added = {name: value for name, value in more.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
