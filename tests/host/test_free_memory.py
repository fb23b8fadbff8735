"""Memory that threads have freed goes back to the system."""

import ctypes
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recycle.host.free_memory import return_free_memory

LIBC = ctypes.CDLL(None)
BLOCK_BYTES, NUM_BLOCKS = 100_000, 500  # smaller than what the C library takes from the system one by one


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not hasattr(LIBC, "malloc_trim"), reason="this C library is not glibc, and keeps less")
def test_what_a_thread_has_freed_goes_back():
    LIBC.malloc.restype = ctypes.c_void_p
    LIBC.free.argtypes = [ctypes.c_void_p]
    kept = []

    def allocate_and_free():
        blocks = [LIBC.malloc(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
        for block in blocks:
            ctypes.memset(block, 1, BLOCK_BYTES)
        kept.append(LIBC.malloc(BLOCK_BYTES))  # above the others, so that they cannot go back by themselves
        for block in blocks:
            LIBC.free(block)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(allocate_and_free).result()
    before = resident_bytes()
    return_free_memory()
    assert before - resident_bytes() > BLOCK_BYTES * NUM_BLOCKS // 2
    LIBC.free(kept[0])
