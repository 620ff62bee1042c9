"""Prometheus metrics. Tenant labels on counters only, at most 1000 of them; histograms by lane and pool."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .rollouts import Rollouts

MAX_TENANTS = 1000
OTHER = "other"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rollouts = Rollouts()
        self._tenants: set[str] = set()
        self.requests = Counter(
            "tenantry_gateway_requests",
            "Requests by how they ended.",
            ["tenant", "route", "outcome", "status"],
            registry=self.registry,
        )
        self.shed = Counter(
            "tenantry_gateway_shed",
            "Requests refused, by reason.",
            ["tenant", "code"],
            registry=self.registry,
        )
        self.tokens = Counter(
            "tenantry_gateway_tokens", "Tokens charged.", ["tenant", "type"], registry=self.registry
        )
        self.first_token = Histogram(
            "gen_ai_server_time_to_first_token",
            "Seconds from arrival to the first byte sent to the client.",
            ["pool", "lane"],
            unit="seconds",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "gen_ai_server_request_duration",
            "Seconds from arrival to the last byte.",
            ["pool", "lane"],
            unit="seconds",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.queue_time = Histogram(
            "tenantry_gateway_queue_time",
            "Seconds that admitted requests waited.",
            ["pool", "lane"],
            unit="seconds",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge("tenantry_gateway_in_flight", "Sequences in flight.", registry=self.registry)
        self.queued = Gauge("tenantry_gateway_queued", "Requests waiting in queues.", registry=self.registry)
        self.oldest_lease = Gauge(
            "tenantry_gateway_oldest_lease_seconds",
            "Seconds since the stalest request in flight last showed life.",
            registry=self.registry,
        )
        self.expired_leases = Counter(
            "tenantry_gateway_expired_leases", "Leases that nothing settled.", registry=self.registry
        )
        self.replicas = Gauge(
            "tenantry_gateway_replicas", "Replicas by whether they answer.", ["state"], registry=self.registry
        )
        self.rejected_objects = Gauge(
            "tenantry_gateway_rejected_objects", "Objects that could not be read.", registry=self.registry
        )
        self.ledger_failures = Gauge(
            "tenantry_gateway_ledger_failures", "Writes that the ledger refused.", registry=self.registry
        )
        self.state_ready = Gauge(
            "tenantry_gateway_state_ready", "1 once tenants and endpoints were read.", registry=self.registry
        )

    def tenant(self, name: str) -> str:
        """The label of a proven tenant; from the 1001st on `other`."""
        if name in self._tenants:
            return name
        if len(self._tenants) < MAX_TENANTS:
            self._tenants.add(name)
            return name
        return OTHER
