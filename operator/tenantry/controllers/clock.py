"""Wall-clock times as they stand in statuses."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds_since(timestamp: str, now: datetime | None = None) -> float:
    """Age of an RFC 3339 time, never negative; 0 for one that cannot be read."""
    try:
        then = datetime.fromisoformat(timestamp)
    except ValueError:
        return 0.0
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return max(0.0, ((now or datetime.now(UTC)) - then).total_seconds())
