"""The work queue's rules, pure: no clock and no tasks, time comes in as an argument.

The semantics are client-go's: a key is dirty at most once; a key that is being processed is not handed out again, but
when it turns dirty meanwhile it comes back as soon as it is done; delays keep the earliest time. Two priorities: what
the first list and the resync add goes behind what just changed.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tenantry.cluster.resources import Key


class Priority(IntEnum):
    """HIGH for changes, LOW for the first list and for resyncs."""

    HIGH = 0
    LOW = 1


@dataclass(frozen=True)
class Backoff:
    """Per key: `base` seconds, doubled with each failure up to `ceiling`, spread by `jitter` (share of the delay)."""

    base: float = 0.05
    ceiling: float = 300.0
    jitter: float = 0.2

    def delay(self, failures: int, chance: float) -> float:
        """Seconds before the next try after `failures` (>= 1) in a row; `chance` is uniform in [0, 1)."""
        plain: float = min(self.ceiling, self.base * 2.0 ** min(failures - 1, 60))
        return plain * (1.0 + self.jitter * (2.0 * chance - 1.0))


@dataclass
class TokenBucket:
    """Bounds retries over all keys: `burst` at once, then `rate` per second."""

    rate: float = 10.0
    burst: float = 100.0
    tokens: float = 100.0
    at: float = 0.0

    def reserve(self, now: float) -> float:
        """Take one token; seconds until it is there."""
        self.tokens = min(self.burst, self.tokens + max(0.0, now - self.at) * self.rate)
        self.at = max(self.at, now)
        self.tokens -= 1.0
        return max(0.0, -self.tokens / self.rate)


class Workset:
    """Which keys are dirty, being processed, or due later."""

    def __init__(
        self,
        backoff: Backoff | None = None,
        bucket: TokenBucket | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._backoff = backoff or Backoff()
        self._bucket = bucket or TokenBucket()
        self._chance = chance
        self._ready: tuple[OrderedDict[Key, float], OrderedDict[Key, float]] = (OrderedDict(), OrderedDict())
        self._again: dict[Key, Priority] = {}
        self._processing: dict[Key, float] = {}
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._failures: dict[Key, int] = {}

    def add(self, key: Key, now: float, priority: Priority = Priority.HIGH) -> bool:
        """Mark a key dirty; whether it was not dirty before."""
        if key in self._processing:
            fresh = key not in self._again
            self._again[key] = min(priority, self._again.get(key, priority))
            return fresh
        if key in self._ready[Priority.HIGH]:
            return False
        if key in self._ready[Priority.LOW]:
            if priority is Priority.HIGH:
                self._ready[Priority.HIGH][key] = self._ready[Priority.LOW].pop(key)
            return False
        self._ready[priority][key] = now
        return True

    def add_after(self, key: Key, delay: float, now: float) -> None:
        """Mark a key dirty `delay` seconds from now, unless it will be sooner anyway."""
        if delay <= 0:
            self.add(key, now)
            return
        due = now + delay
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, key))

    def retry(self, key: Key, now: float) -> float:
        """Mark a key dirty after its back-off, which grows; the delay."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = max(self._backoff.delay(failures, self._chance()), self._bucket.reserve(now))
        self.add_after(key, delay, now)
        return delay

    def forget(self, key: Key) -> None:
        """The key succeeded: its next back-off starts from the beginning."""
        self._failures.pop(key, None)

    def failures(self, key: Key) -> int:
        return self._failures.get(key, 0)

    def release_due(self, now: float) -> int:
        """Move what is due to the ready keys; how many became dirty by it."""
        released = 0
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:
                del self._due[key]
                released += self.add(key, now)
        return released

    def next_due(self) -> float | None:
        """When the next delayed key is due."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> tuple[Key, float] | None:
        """Hand out a key and since when it waited, HIGH before LOW, first in first out; None when none is ready."""
        for ready in self._ready:
            if ready:
                key, since = ready.popitem(last=False)
                self._processing[key] = now
                return key, since
        return None

    def done(self, key: Key, now: float) -> bool:
        """Processing of a key ended; whether it is ready again because it turned dirty meanwhile."""
        del self._processing[key]
        priority = self._again.pop(key, None)
        return priority is not None and self.add(key, now, priority)

    def depth(self, priority: Priority) -> int:
        return len(self._ready[priority])

    def processing(self) -> dict[Key, float]:
        """What is being processed, since when."""
        return dict(self._processing)
