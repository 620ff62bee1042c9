"""Until when this engine may run: a file beside it that a gate extends as long as the node proves what it is.

The end is kept by the monotonic clock from the moment the file was read: a clock that is set back later prolongs
nothing. Nobody outside has to act for the engine to end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("tenantry_engine")

_LOOK_SECONDS = 5.0


class Lease:
    """One lease file, written by another process as `{"expiresAt": <Unix seconds>}`."""

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._clock = clock
        self._monotonic = monotonic
        self._written: float | None = None
        self._end = float("-inf")

    def left(self) -> float:
        """Seconds that the engine may still run; 0 or less: it must not. A file that cannot be read extends nothing."""
        try:
            found = json.loads(self._path.read_bytes())["expiresAt"]
            written = float(found) if isinstance(found, int | float) else None
        except (OSError, ValueError, KeyError, TypeError):
            written = None
        now = self._monotonic()
        if written is not None and written != self._written:
            self._written, self._end = written, now + written - self._clock()
        return self._end - now

    async def ended(self, look_seconds: float = _LOOK_SECONDS) -> None:
        """Returns once it has run out."""
        while (left := self.left()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(left, look_seconds))  # the file has no event of its own to wait for
