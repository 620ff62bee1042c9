"""Every metric that Tenantry's processes expose, from the very objects that count: for the reference and for tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry


@dataclass(frozen=True)
class Series:
    """A metric of a process: `names` are those of its samples, `labels` those of its series."""

    process: str
    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def names(self) -> tuple[str, ...]:
        if self.kind == "histogram":
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (f"{self.name}_total",) if self.kind == "counter" else (self.name,)


def exposed() -> list[Series]:
    """All of them, by process and name."""
    import tenantry.cluster.transport
    import tenantry.controllers.metrics
    import tenantry.fetcher.metrics as fetcher
    import tenantry.runtime.metrics  # noqa: F401
    from tenantry_engine.server.metrics import Metrics as EngineMetrics
    from tenantry_gateway.metrics import Metrics as GatewayMetrics

    registries = {
        "operator": REGISTRY,
        "gateway": GatewayMetrics().registry,
        "fetcher": fetcher.registry,
        "engine": EngineMetrics("model").registry,
    }
    found = [series for process, registry in registries.items() for series in _series(process, registry)]
    return sorted(set(found), key=lambda series: (series.process, series.name))


def _series(process: str, registry: CollectorRegistry) -> Iterator[Series]:
    for collector in _collectors(registry):
        for family in collector.collect():
            labels = getattr(collector, "_labelnames", None)
            if labels is None:
                labels = getattr(family, "_labelnames", ())
            yield Series(process, family.name, family.type, tuple(labels), family.documentation)


def _collectors(registry: CollectorRegistry) -> Iterable[Any]:
    return list(registry._collector_to_names)
