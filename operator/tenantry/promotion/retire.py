"""When a replica may forget a name: not while a route still names it, nor right after.

Gateways learn of a new route a moment later than it is written, requests that they chose a name for may still wait in
their queues, and requests that they sent before still run. So a name stays declared for `RETIRE_SECONDS` after it was
last needed, and then until the replica reports no request on it, at most `drain` seconds in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

GRACE_SECONDS: Final = 5.0
"""Within this every gateway knows a new route."""
QUEUE_SECONDS: Final = 30.0
"""So long a request may wait in a gateway."""
RETIRE_SECONDS: Final = GRACE_SECONDS + QUEUE_SECONDS


@dataclass(frozen=True)
class Retirement:
    """`keep` stays declared though nothing needs it; `again_in` seconds until the next look, None for none."""

    keep: frozenset[str]
    again_in: float | None


def retire(
    last_needed: Mapping[str, float],
    requests: Mapping[str, int],
    drains: Mapping[str, float],
    now: float,
    grace: float = RETIRE_SECONDS,
) -> Retirement:
    """`last_needed`: when each name that is no longer needed was needed last. All in seconds of one clock."""
    keep: set[str] = set()
    waits: list[float] = []
    for name, since in last_needed.items():
        age = now - since
        limit = max(grace, drains.get(name, 0.0))
        if age < grace:
            keep.add(name)
            waits.append(grace - age)
        elif age < limit and requests.get(name, 0) > 0:
            keep.add(name)
            waits.append(min(limit - age, 1.0))
    return Retirement(frozenset(keep), min(waits) if waits else None)


def gone(held: Iterable[str], needed: Iterable[str]) -> frozenset[str]:
    """Names that a replica holds and nobody needs."""
    return frozenset(held) - frozenset(needed)
