"""Each tenant's cap on what it has in flight here; what is beyond it waits in the order of its arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tenantry_engine.errors import RequestError


@dataclass
class _Line:
    running: int = 0
    waiting: deque[tuple[asyncio.Future[None], int, int]] = field(default_factory=deque)


class Caps:
    """Counts sequences by the tenant's uid. `most_waiting` bounds all that wait, whoever sent it."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._lines: dict[str, _Line] = {}
        self.running = 0
        self.waiting = 0

    @asynccontextmanager
    async def hold(self, uid: str, cap: int, sequences: int) -> AsyncIterator[None]:
        """Runs the block once there is room under the cap. A request larger than its cap runs alone.

        Raises RequestError 503 when too many wait already.
        """
        line = self._lines.setdefault(uid, _Line())
        if line.waiting or not _fits(line, cap, sequences):
            await self._wait(uid, line, cap, sequences)
        else:
            self._start(line, sequences)
        try:
            yield
        finally:
            line.running -= sequences
            self.running -= sequences
            self._next(uid, line)

    async def _wait(self, uid: str, line: _Line, cap: int, sequences: int) -> None:
        if self.waiting >= self._most_waiting:
            raise RequestError(
                "too many requests are waiting here already", status=503, code="overloaded", retry_after=1
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.waiting.append((turn, cap, sequences))
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn came as its client went
                line.running -= sequences
                self.running -= sequences
            else:
                line.waiting = deque(entry for entry in line.waiting if entry[0] is not turn)
            self._next(uid, line)
            raise
        finally:
            self.waiting -= 1

    def _next(self, uid: str, line: _Line) -> None:
        while line.waiting and _fits(line, *line.waiting[0][1:]):
            turn, _, sequences = line.waiting.popleft()
            if not turn.done():
                self._start(line, sequences)
                turn.set_result(None)
        if not line.running and not line.waiting and self._lines.get(uid) is line:
            del self._lines[uid]

    def _start(self, line: _Line, sequences: int) -> None:
        line.running += sequences
        self.running += sequences


def _fits(line: _Line, cap: int, sequences: int) -> bool:
    return line.running == 0 or line.running + sequences <= cap
