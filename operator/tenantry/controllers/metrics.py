"""What the controllers measure: objects by what their conditions say, and moves between tiers."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import Counter, Gauge, Histogram

from tenantry.cluster import ADAPTER, ADAPTER_POOL, TENANT, Obj, Resource

OBJECTS = Gauge(
    "tenantry_objects", "Tenants, AdapterPools and Adapters by condition.", ["kind", "condition", "status"]
)
TENANTS = Gauge(
    "tenantry_tenants", "Tenants by the tier in force, `None` while nothing serves them.", ["tier"]
)
GUARANTEES = Gauge(
    "tenantry_isolation_guarantees",
    "Guarantees of all tenants by what was seen of them.",
    ["guarantee", "state"],
)
REPLICAS = Gauge("tenantry_pool_replicas", "Engine replicas of a pool's lane.", ["pool", "lane", "state"])
MOVES = Counter("tenantry_tenant_moves_total", "Changes of tier that took effect.", ["from_tier", "to_tier"])
PHASE_SECONDS = Histogram(
    "tenantry_tenant_move_phase_seconds",
    "Time that a place which a tenant left spent in a phase.",
    ["phase"],
    buckets=(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0),
)
LEAVING = Gauge("tenantry_tenants_leaving", "Places that tenants have left and that are not empty yet.")

COUNTED = (TENANT, ADAPTER_POOL, ADAPTER)


class Census:
    """Keeps the gauges by what changed, so that a scrape costs nothing however many objects there are."""

    def __init__(self) -> None:
        self._objects: Tally[tuple[str, str, str]] = Tally()
        self._tiers: Tally[str] = Tally()
        self._guarantees: Tally[tuple[str, str]] = Tally()
        self._leaving = 0

    def changed(self, resource: Resource, old: Obj | None, new: Obj | None) -> None:
        """An object of one of our kinds came, changed or went."""
        touched = set()
        for obj, sign in ((old, -1), (new, 1)):
            for kind, status in _conditions(obj):
                key = (resource.kind, kind, status)
                self._objects[key] += sign
                touched.add(key)
        for key in touched:
            OBJECTS.labels(*key).set(self._objects[key])
        if resource == TENANT:
            self._tenant(old, new)
        if resource == ADAPTER_POOL:
            _replicas(old, new)

    def _tenant(self, old: Obj | None, new: Obj | None) -> None:
        for obj, sign in ((old, -1), (new, 1)):
            if obj is None:
                continue
            status = obj.get("status") or {}
            tier = str(status.get("tier"))
            self._tiers[tier] += sign
            TENANTS.labels(tier).set(self._tiers[tier])
            self._leaving += sign * len(status.get("leaving") or [])
            for entry in status.get("isolation") or []:
                key = (str(entry.get("guarantee")), str(entry.get("state")))
                self._guarantees[key] += sign
                GUARANTEES.labels(*key).set(self._guarantees[key])
        LEAVING.set(self._leaving)


def _conditions(obj: Obj | None) -> Iterator[tuple[str, str]]:
    for condition in ((obj or {}).get("status") or {}).get("conditions") or []:
        yield str(condition.get("type")), str(condition.get("status"))


def _replicas(old: Obj | None, new: Obj | None) -> None:
    """Series of lanes that are gone go with them."""
    before, after = _lanes(old), _lanes(new)
    for key in set(before) - set(after):
        for state in ("wanted", "ready"):
            REPLICAS.remove(*key, state)
    for key, (wanted, ready) in after.items():
        REPLICAS.labels(*key, "wanted").set(wanted)
        REPLICAS.labels(*key, "ready").set(ready)


def _lanes(pool: Obj | None) -> dict[tuple[str, str], tuple[int, int]]:
    if pool is None:
        return {}
    return {
        (str(pool["metadata"]["name"]), str(lane.get("name"))): (
            int(lane.get("replicas", 0)),
            int(lane.get("readyReplicas", 0)),
        )
        for lane in (pool.get("status") or {}).get("lanes") or []
    }
