"""Prometheus metrics of the fetcher."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

registry = CollectorRegistry()

pulls = Counter(
    "tenantry_fetcher_pulls_total",
    "Pulls that ended, by result (ok or a reason)",
    ["result"],
    registry=registry,
)
pull_seconds = Histogram(
    "tenantry_fetcher_pull_seconds",
    "Seconds from asking to verified bytes in the cache",
    buckets=(0.1, 0.5, 1, 5, 15, 60, 300, 900),
    registry=registry,
)
signatures = Counter(
    "tenantry_fetcher_signatures_total",
    "Signatures that were asked for, by result (ok or a reason)",
    ["result"],
    registry=registry,
)
pushes = Counter(
    "tenantry_fetcher_pushes_total",
    "Pushes that ended, by result (ok or a reason)",
    ["result"],
    registry=registry,
)
cache_bytes = Gauge("tenantry_fetcher_cache_bytes", "Bytes of verified adapters on disk", registry=registry)
refused = Counter("tenantry_fetcher_refused_total", "Requests that were not proven", registry=registry)
