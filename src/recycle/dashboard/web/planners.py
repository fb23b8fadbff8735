"""`Planners`: plans in a process of its own, which is ended if a plan takes too long, so that the next question need not wait."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any


class Planners:
    """Asks one executor, which `make` makes, and a new one after it failed or was too slow."""

    def __init__(self, make: Callable[[], Executor]) -> None:
        self._make, self._executor = make, make()

    async def ask(self, question: Callable[[], dict[str, Any]], most_s: float) -> dict[str, Any]:
        """Return the answer to a question; raises TimeoutError, or BrokenProcessPool if the process ended."""
        try:  # an executor whose process was killed while it had nothing to do refuses questions
            running = asyncio.get_running_loop().run_in_executor(self._executor, question)
            return await asyncio.wait_for(running, most_s)
        except (TimeoutError, BrokenProcessPool):
            self.close()
            self._executor = self._make()
            raise

    def close(self) -> None:
        """End the executor, with what it plans now."""
        processes = list((getattr(self._executor, "_processes", None) or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            with suppress(OSError, ValueError):  # it has ended
                process.kill()
