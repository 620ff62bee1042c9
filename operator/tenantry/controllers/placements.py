"""Who is placed where: the statuses, plus what workers decided a moment ago and have not written yet.

Until this process leads nothing is known here: the statuses are another's to write, and may not have been heard yet.
Nobody misses it, for every key is due once then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from tenantry.api.pool import LaneName
from tenantry.cluster import TENANT, Key, Obj
from tenantry.engines import ReplicaReport
from tenantry.placement.load import Load, count, without
from tenantry.placement.standing import Standings
from tenantry.placement.stored import NOWHERE, Placed, Placement, from_status
from tenantry.runtime.store import Store

_K = TypeVar("_K")


class Placements:
    """Reading and assuming never await, so parallel workers cannot overcommit a pool."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tenants: dict[str, Placement] = {}
        self._loads: dict[tuple[str, LaneName], dict[str, Load]] = {}
        self._on_replica: dict[Key, set[str]] = {}
        self._on_pool: dict[str, set[str]] = {}
        self._lanes: dict[tuple[str, LaneName], tuple[str, ...]] = {}
        self.standings = Standings()
        self.pins: dict[Key, tuple[ReplicaReport, Mapping[str, int]]] = {}

    def get(self, tenant: str) -> Placement:
        return self._tenants.get(tenant, NOWHERE)

    def tenants_on(self, pool: str) -> frozenset[str]:
        return frozenset(self._on_pool.get(pool, ()))

    def count_on(self, pool: str, without: str) -> int:
        """Tenants of a pool but one."""
        found = self._on_pool.get(pool, ())
        return len(found) - (without in found)

    def tenants_of(self, replica: Key) -> frozenset[str]:
        return frozenset(self._on_replica.get(replica, ()))

    def loads(self, pool: str, lane: LaneName, without_tenant: str) -> dict[str, Load]:
        """What all tenants but one put on each replica of a lane."""
        loads = self._loads.get((pool, lane), {})
        own = self._tenants.get(without_tenant, NOWHERE).pools.get(pool)
        if own is None:
            return dict(loads)
        return without(loads, own.load, own.lanes.get(lane, ()))

    def lane(self, pool: str, lane: LaneName, replicas: Iterable[str]) -> None:
        """The replicas that a lane has now: one that is no more begins anew when it comes back."""
        present = tuple(replicas)
        before = self._lanes.get((pool, lane), ())
        if present == before:
            return
        self._lanes[pool, lane] = present
        for gone in set(before) - set(present):
            self.standings.forget(Key(pool, gone))
            self.pins.pop(Key(pool, gone), None)

    def assume(self, tenant: str, placement: Placement) -> frozenset[Key]:
        """Take a placement as done; the replicas that it adds or leaves."""
        before = self.get(tenant)
        if before == placement:
            return frozenset()
        self._count(tenant, before, -1)
        self._count(tenant, placement, 1)
        if placement.pools or placement.models:
            self._tenants[tenant] = placement
        else:
            self._tenants.pop(tenant, None)
        return _keys(before) ^ _keys(placement)

    def forget(self, tenant: str) -> frozenset[Key]:
        """The replicas that the tenant was on."""
        return self.assume(tenant, NOWHERE)

    def begin(self) -> None:
        """From the statuses, once the store is complete and before anything is placed."""
        for tenant in self._store.list(TENANT):
            placement = from_status(tenant)
            if placement.pools:
                self.assume(tenant["metadata"]["name"], placement)

    def _count(self, tenant: str, placement: Placement, sign: int) -> None:
        for pool, placed in placement.pools.items():
            _member(self._on_pool, pool, tenant, sign)
            for lane, replicas in placed.lanes.items():
                count(self._loads.setdefault((pool, lane), {}), placed.load, replicas, sign)
                for replica in replicas:
                    _member(self._on_replica, Key(pool, replica), tenant, sign)


def routed_replicas(tenant: Obj | None) -> frozenset[Key]:
    """`Key(pool, replica)` of every replica that the stored route names."""
    route = ((tenant or {}).get("status") or {}).get("route") or {}
    return frozenset(
        Key(pool["name"], replica)
        for pool in route.get("pools") or []
        for lane in pool.get("lanes") or []
        for replica in lane.get("replicas") or []
    )


def stored_lanes(tenant: Obj, pool: str, lane: LaneName) -> frozenset[str]:
    """The replicas of one lane of a pool that the stored route names."""
    route = (tenant.get("status") or {}).get("route") or {}
    return frozenset(
        replica
        for entry in route.get("pools") or []
        if entry["name"] == pool
        for found in entry.get("lanes") or []
        if found["name"] == lane.value
        for replica in found.get("replicas") or []
    )


def routed_names(tenant: Obj, pool: str) -> Iterable[tuple[str, str]]:
    """(served name, digest) of every adapter that the stored route serves from the pool."""
    route = (tenant.get("status") or {}).get("route") or {}
    for model in route.get("models") or []:
        if model.get("pool") == pool:
            for target in model.get("targets") or []:
                if target.get("digest"):
                    yield target["servedName"], target["digest"]


def adapter_names(tenant: Obj, pool: str) -> Iterable[str]:
    """Aliases and served names under which the stored route serves adapters from the pool."""
    route = (tenant.get("status") or {}).get("route") or {}
    for model in route.get("models") or []:
        served = [target["servedName"] for target in model.get("targets") or [] if target.get("digest")]
        if model.get("pool") == pool and served:
            yield from (str(model["name"]), *served)


def _keys(placement: Placement) -> frozenset[Key]:
    return frozenset(
        Key(pool, replica) for pool, placed in placement.pools.items() for replica in placed.replicas
    )


def _member(index: dict[_K, set[str]], key: _K, tenant: str, sign: int) -> None:
    if sign > 0:
        index.setdefault(key, set()).add(tenant)
    elif key in index:
        index[key].discard(tenant)
        if not index[key]:
            del index[key]


__all__ = [
    "NOWHERE",
    "Placed",
    "Placement",
    "Placements",
    "from_status",
    "routed_names",
    "routed_replicas",
]
