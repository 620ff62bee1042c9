"""The work queue of one controller: the rules of `workset` with a clock, a timer and waiting workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tenantry.cluster.resources import Key

from . import metrics
from .workset import Priority, Workset


class Queue:
    """To be used from one event loop. Keys are handed out by `get` and must come back by `done`."""

    def __init__(
        self, name: str, workset: Workset | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._set = workset or Workset()
        self._clock = clock
        self._available = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        metrics.watch_queue(name, self._set, clock)

    def add(self, key: Key, priority: Priority = Priority.HIGH) -> None:
        """Mark a key dirty."""
        if self._set.add(key, self._clock(), priority):
            metrics.QUEUE_ADDS.labels(self.name, self.name).inc()
            self._available.set()

    def add_after(self, key: Key, delay: float) -> None:
        """Mark a key dirty `delay` seconds from now."""
        if delay <= 0:
            self.add(key)
            return
        self._set.add_after(key, delay, self._clock())
        self._arm()

    def retry(self, key: Key) -> float:
        """Mark a key dirty after its back-off; the delay."""
        metrics.QUEUE_RETRIES.labels(self.name, self.name).inc()
        delay = self._set.retry(key, self._clock())
        self._arm()
        return delay

    def forget(self, key: Key) -> None:
        self._set.forget(key)

    async def get(self) -> Key:
        """The next key to process; waits for one."""
        while True:
            self._release()
            taken = self._set.take(self._clock())
            if taken is not None:
                key, since = taken
                metrics.QUEUE_DURATION.labels(self.name, self.name).observe(self._clock() - since)
                return key
            self._available.clear()
            await self._available.wait()

    def done(self, key: Key) -> None:
        """Processing of the key ended."""
        since = self._set.processing()[key]
        metrics.WORK_DURATION.labels(self.name, self.name).observe(self._clock() - since)
        if self._set.done(key, self._clock()):
            self._available.set()

    def idle(self) -> bool:
        """Whether nothing is ready or being processed; delayed keys do not count."""
        return not (self._set.depth(Priority.HIGH) or self._set.depth(Priority.LOW) or self._set.processing())

    def oldest_processing(self) -> float:
        """Seconds for which the longest running key has been processed."""
        started = self._set.processing().values()
        return self._clock() - min(started) if started else 0.0

    def _release(self) -> None:
        released = self._set.release_due(self._clock())
        if released:
            metrics.QUEUE_ADDS.labels(self.name, self.name).inc(released)
            self._available.set()
        self._arm()

    def _arm(self) -> None:
        due = self._set.next_due()
        if due is None or (self._timer is not None and self._timer_due == due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._timer_due = None
        self._release()
