"""`PatientProtocol`: HTTP as uvicorn speaks it, for a limited time: a connection that sends no whole request is closed.

uvicorn limits how long a connection may be idle after an answer, but not how long it may take to send the head of a request.
Without a limit, silent connections would take all places, and nobody else would be answered.
"""

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """Closes a connection `LONGEST_HEAD_S` after it was opened, or after the first byte of a request whose head is not whole."""

    LONGEST_HEAD_S: ClassVar[float] = 10.0
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_limit()

    def data_received(self, data: bytes) -> None:
        if self._limit is None and not self._is_answering:
            self._set_limit()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering:
            self._remove_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._remove_limit()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _set_limit(self) -> None:
        self._limit = self.loop.call_later(self.LONGEST_HEAD_S, self._close_if_silent)

    def _remove_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _close_if_silent(self) -> None:
        self._limit = None
        if not self._is_answering:
            self.transport.abort()
