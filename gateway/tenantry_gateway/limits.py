"""What a tenant may use: requests and tokens a minute, tokens a month, sequences in flight. Pure.

Tokens are taken at admission, as many as the request can use at most, and settled to what it used on every way out. So
parallel requests cannot pass a limit together, and a stream is charged like any other request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum

from tenantry.api.tenant import EffectiveLimits

MINUTE = 60.0


@dataclass
class Window:
    """A leaky bucket: holds one minute's worth and drains evenly, so it never blocks for longer than it must.

    A burst is at most one minute's worth; over longer times the rate is the limit. It stores what was used, not what
    is left: a changed limit applies at once, to past use as well.
    """

    used: float = 0.0
    at: float = 0.0

    def level(self, limit: int, now: float) -> float:
        """What counts as used now."""
        if now > self.at:
            self.used = max(0.0, self.used - (now - self.at) * limit / MINUTE)
            self.at = now
        return self.used

    def available(self, limit: int, now: float) -> float:
        return limit - self.level(limit, now)

    def wait(self, amount: float, limit: int, now: float) -> float:
        """Seconds until `amount` fits, 0 when it fits now."""
        return max(0.0, (amount - self.available(limit, now)) * MINUTE / limit)

    def take(self, amount: float, limit: int, now: float) -> None:
        self.used = self.level(limit, now) + amount

    def give(self, amount: float, limit: int, now: float) -> None:
        self.used = max(0.0, self.level(limit, now) - amount)


@dataclass
class Lease:
    """One request in flight: what it holds until it is settled. `expires` in the caller's clock."""

    id: str
    sequences: int
    reserve: int
    month: str
    expires: float = 0.0


class Fit(Enum):
    """Whether a request fits its tenant's limits now."""

    YES = "yes"
    CONCURRENCY = "concurrency"
    TOKENS_HELD = "tokens_held"  # fits once requests in flight give back what they do not use
    TOKENS = "rate_tokens"
    BUDGET = "budget"


@dataclass
class Usage:
    """What one tenant uses."""

    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    leases: dict[str, Lease] = field(default_factory=dict)
    month: str = ""
    month_used: int = 0

    @property
    def in_flight(self) -> int:
        return sum(lease.sequences for lease in self.leases.values())

    @property
    def reserved(self) -> int:
        return sum(lease.reserve for lease in self.leases.values())

    def in_month(self, month: str) -> int:
        """Tokens used in that month; a new month starts at 0."""
        if month > self.month:
            self.month, self.month_used = month, 0
        return self.month_used


class Limiter:
    """Usage of all tenants, by uid. `month_used` tells what the ledger knows of a tenant, by (uid, month)."""

    def __init__(
        self, lease_seconds: float, month_used: Callable[[str, str], int] = lambda _uid, _month: 0
    ) -> None:
        self._usage: dict[str, Usage] = {}
        self._lease_seconds = lease_seconds
        self._month_used = month_used

    def usage(self, uid: str, month: str) -> Usage:
        """The tenant's usage, made with what the ledger knows of it on first use."""
        found = self._usage.get(uid)
        if found is None:
            found = self._usage[uid] = Usage(month=month, month_used=self._month_used(uid, month))
        return found

    def take_request(self, uid: str, limits: EffectiveLimits, now: float, month: str) -> float:
        """Count one request. Returns 0, or the seconds to wait; then nothing was counted."""
        window = self.usage(uid, month).requests
        wait = window.wait(1, limits.requests_per_minute, now)
        if wait == 0:
            window.take(1, limits.requests_per_minute, now)
        return wait

    def fit(
        self, uid: str, limits: EffectiveLimits, reserve: int, sequences: int, *, now: float, month: str
    ) -> tuple[Fit, float]:
        """Whether the request fits, and else the seconds after which it would, if nothing else happened."""
        usage = self.usage(uid, month)
        if limits.monthly_tokens is not None and (
            usage.in_month(month) + usage.reserved + reserve > limits.monthly_tokens
        ):
            if usage.leases and usage.in_month(month) + reserve <= limits.monthly_tokens:
                return Fit.TOKENS_HELD, 1.0
            return Fit.BUDGET, 0.0
        wait = usage.tokens.wait(reserve, limits.tokens_per_minute, now)
        if wait > 0:
            if usage.tokens.wait(reserve - usage.reserved, limits.tokens_per_minute, now) == 0:
                return Fit.TOKENS_HELD, wait
            return Fit.TOKENS, wait
        if usage.in_flight + sequences > limits.max_in_flight:
            return Fit.CONCURRENCY, 1.0
        return Fit.YES, 0.0

    def acquire(self, lease: Lease, uid: str, limits: EffectiveLimits, now: float) -> None:
        """Take all of it at once. Only after `fit` said YES, without anything between."""
        usage = self.usage(uid, lease.month)
        usage.tokens.take(lease.reserve, limits.tokens_per_minute, now)
        usage.leases[lease.id] = lease
        self.renew(lease, now)

    def lease(self, uid: str, request_id: str) -> Lease | None:
        usage = self._usage.get(uid)
        return usage.leases.get(request_id) if usage else None

    def renew(self, lease: Lease, now: float) -> None:
        """The request is alive."""
        lease.expires = now + self._lease_seconds

    def settle(self, uid: str, request_id: str, limits: EffectiveLimits, used: int, now: float) -> bool:
        """End the lease: give back what was not used, charge what was. False when it was settled before."""
        usage = self._usage.get(uid)
        lease = usage.leases.pop(request_id, None) if usage else None
        if usage is None or lease is None:
            return False
        if used <= lease.reserve:
            usage.tokens.give(lease.reserve - used, limits.tokens_per_minute, now)
        else:
            usage.tokens.take(used - lease.reserve, limits.tokens_per_minute, now)
        usage.in_month(lease.month)
        if usage.month == lease.month:
            usage.month_used += used
        return True

    def expire(self, now: float) -> list[Lease]:
        """Drop leases that nothing renewed; they count as used in full."""
        expired = []
        for usage in self._usage.values():
            for lease in [lease for lease in usage.leases.values() if lease.expires <= now]:
                del usage.leases[lease.id]
                usage.month_used += lease.reserve
                expired.append(lease)
        return expired

    def stalest(self, now: float) -> float:
        """Seconds since the stalest lease was renewed, 0 without leases."""
        ends = [lease.expires for usage in self._usage.values() for lease in usage.leases.values()]
        return max(0.0, now + self._lease_seconds - min(ends)) if ends else 0.0

    def in_flight(self) -> int:
        """Sequences in flight of all tenants."""
        return sum(usage.in_flight for usage in self._usage.values())


def month_of(wall: float) -> str:
    """`2026-03` of a Unix time, UTC."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m")


def month_start(month: str) -> float:
    """Unix time at which the month begins."""
    return datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC).timestamp()


def until_next_month(wall: float) -> float:
    """Seconds until the next month begins, UTC."""
    now = datetime.fromtimestamp(wall, UTC)
    first = (now.replace(day=1, hour=0, minute=0, second=0, microsecond=0) + timedelta(days=32)).replace(
        day=1
    )
    return (first - now).total_seconds()
