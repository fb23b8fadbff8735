"""The fork server of worker processes: torch is loaded already, the allocator keeps freed memory, and each has one thread.

A worker needs the same memory in every iteration. If freed memory went back to the system, the next micro-batch would have it
mapped and zeroed again, page by page: a tenth of a small model's step.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext

from recycle.host.process_lifetime import children_uninterrupted

_ENVIRONMENT = {
    # For mimalloc, which torch uses on some platforms, and for glibc, which it uses on others. Both read them as they load.
    "MIMALLOC_PURGE_DELAY": "-1",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the most that glibc takes
    # A worker computes in one thread. On Arm, torch's kernels take all cores whatever torch is told, and spin while they wait.
    "OMP_NUM_THREADS": "1",
    # gloo logs every connection that fails, which is part of losing workers; the same errors are raised as exceptions.
    "TORCH_CPP_LOG_LEVEL": "FATAL",
}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def fork_context(preload: Sequence[str]) -> ForkServerContext:
    """A context whose processes start with these modules loaded; there is one server, so the first call decides."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["recycle.runtime.launch.server_signals", "recycle.runtime.launch.preload", *preload])
    with _environment(), children_uninterrupted():
        forkserver.ensure_running()
    return context


def configure_process() -> None:
    """Give this process, which was not forked, the same settings; this has no effect once torch is loaded."""
    if "torch" in sys.modules:
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # glibc read its variables when this process began; afterwards it takes them by mallopt.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**25)


@contextmanager
def _environment() -> Iterator[None]:
    """Set the variables for processes that start inside; what the user has set stays."""
    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
