"""Gauges that follow objects by their changes: no scan, and nothing left of what is gone."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY
from tenantry.cluster import ADAPTER_POOL, TENANT
from tenantry.controllers.metrics import Census


def tenant(name: str, stalled: str, tier: str, *leaving: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "status": {
            "tier": tier,
            "conditions": [{"type": "Stalled", "status": stalled}],
            "isolation": [
                {"guarantee": "CensusTest", "state": "Enforced" if stalled == "False" else "Configured"}
            ],
            "leaving": [{"pool": pool} for pool in leaving],
        },
    }


def pool(ready: int) -> dict[str, Any]:
    lane = {"name": "fast", "replicas": 3, "readyReplicas": ready}
    return {"metadata": {"name": "census"}, "status": {"lanes": [lane]}}


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_counts_follow_what_changes() -> None:
    census = Census()
    stalled = {"kind": "Tenant", "condition": "Stalled", "status": "True"}
    one, two = tenant("one", "True", "Smb", "old"), tenant("two", "True", "Free")
    census.changed(TENANT, None, one)
    census.changed(TENANT, None, two)
    assert value("tenantry_objects", **stalled) == 2
    assert value("tenantry_tenants_leaving") == 1
    healed = tenant("one", "False", "Smb")
    census.changed(TENANT, one, healed)
    assert value("tenantry_objects", **stalled) == 1
    assert value("tenantry_tenants", tier="Smb") == 1
    assert value("tenantry_tenants_leaving") == 0
    assert value("tenantry_isolation_guarantees", guarantee="CensusTest", state="Enforced") == 1
    census.changed(TENANT, healed, None)
    census.changed(TENANT, two, None)
    assert value("tenantry_objects", **stalled) == 0
    assert value("tenantry_tenants", tier="Free") == 0
    assert value("tenantry_isolation_guarantees", guarantee="CensusTest", state="Configured") == 0


def test_a_pool_that_is_gone_takes_its_series_along() -> None:
    census = Census()
    labels = {"pool": "census", "lane": "fast", "state": "ready"}
    census.changed(ADAPTER_POOL, None, pool(1))
    census.changed(ADAPTER_POOL, pool(1), pool(2))
    assert value("tenantry_pool_replicas", **labels) == 2
    census.changed(ADAPTER_POOL, pool(2), None)
    assert value("tenantry_pool_replicas", **labels) is None
