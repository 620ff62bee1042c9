"""What the operator judges a rollout by: requests and times of each of two versions that share a model name.

Only such versions are counted, so there are as many series as rollouts and canaries run, not as there are adapters. A
version that answers an alias alone again is forgotten; should it share one later, it counts from 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

from .state import Tenant

# About 25 % apart, so that a percentile is known to 25 %.
_SECONDS: Final = tuple(round(0.01 * 1.25**i, 4) for i in range(46))
# What the version did not do itself: the client left, the gateway ends, or the request was wrong.
_NOT_ITS_OWN: Final = frozenset({"client_gone", "shutdown", "rejected", "refused"})


class Rollouts:
    """A registry of its own, so that it can be read without all else."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "tenantry_gateway_rollout_requests",
            "Requests of versions that share a model name, by whether the version answered.",
            ["served", "outcome"],
            registry=self.registry,
        )
        self._first_byte = Histogram(
            "tenantry_gateway_rollout_first_token",
            "Seconds from arrival to the first byte of an answer.",
            ["served"],
            unit="seconds",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._duration = Histogram(
            "tenantry_gateway_rollout_duration",
            "Seconds from arrival to the last byte of an answer.",
            ["served"],
            unit="seconds",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._counted: set[str] = set()

    def ended(
        self, tenant: Tenant, served: str, outcome: str, *, first_byte: float | None, seconds: float
    ) -> None:
        """A request that was sent to an engine has ended. Times in seconds."""
        if outcome in _NOT_ITS_OWN or served not in shared_names([tenant]):
            return
        self._counted.add(served)
        answered = outcome == "done"
        self._requests.labels(served, "answered" if answered else "failed").inc()
        if answered:
            self._duration.labels(served).observe(seconds)
            if first_byte is not None:
                self._first_byte.labels(served).observe(first_byte)

    def forget_others(self, tenants: Iterable[Tenant]) -> None:
        """Drop the series of versions that share no alias any more."""
        gone = self._counted - shared_names(tenants) if self._counted else set()
        for served in gone:
            for outcome in ("answered", "failed"):
                self._requests.remove(served, outcome)
            self._first_byte.remove(served)
            self._duration.remove(served)
        self._counted -= gone


def shared_names(tenants: Iterable[Tenant]) -> set[str]:
    """Served names that answer an alias together with another."""
    return {
        target.served_name
        for tenant in tenants
        for model in tenant.models.values()
        if len(model.targets) > 1
        for target in model.targets
    }
