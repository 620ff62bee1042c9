"""Who is placed where: the statuses, plus what workers decided a moment ago and have not written yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tenantry.api import names
from tenantry.api.pool import LaneName
from tenantry.cluster import TENANT, Key, Obj
from tenantry.placement.replicas import Load
from tenantry.runtime.store import Store


@dataclass(frozen=True)
class Placed:
    """A tenant's place in one pool."""

    weight: int
    lanes: Mapping[LaneName, tuple[str, ...]]
    reason: str = ""

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(sorted({replica for lane in self.lanes.values() for replica in lane}))


@dataclass(frozen=True)
class Placement:
    """`models` maps aliases to pools."""

    models: Mapping[str, str] = field(default_factory=dict)
    pools: Mapping[str, Placed] = field(default_factory=dict)


_K = TypeVar("_K")
NOWHERE = Placement()


class Placements:
    """Reading and assuming never await, so parallel workers cannot overcommit a pool."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seeded = False
        self._tenants: dict[str, Placement] = {}
        self._loads: dict[tuple[str, LaneName], dict[str, Load]] = {}
        self._on_replica: dict[Key, set[str]] = {}
        self._on_pool: dict[str, set[str]] = {}

    def get(self, tenant: str) -> Placement:
        self._seed()
        return self._tenants.get(tenant, NOWHERE)

    def tenants_on(self, pool: str) -> frozenset[str]:
        self._seed()
        return frozenset(self._on_pool.get(pool, ()))

    def tenants_of(self, replica: Key) -> frozenset[str]:
        self._seed()
        return frozenset(self._on_replica.get(replica, ()))

    def loads(self, pool: str, lane: LaneName, without: str) -> dict[str, Load]:
        """What all tenants but one put on each replica of a lane."""
        self._seed()
        loads = dict(self._loads.get((pool, lane), {}))
        own = self._tenants.get(without, NOWHERE).pools.get(pool)
        for replica in own.lanes.get(lane, ()) if own is not None else ():
            loads[replica] = _plus(loads.get(replica, Load()), -own.weight, -1) if own is not None else Load()
        return loads

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

    def _seed(self) -> None:
        """Once, from the statuses: the store is complete before anything is placed."""
        if self._seeded:
            return
        self._seeded = True
        for tenant in self._store.list(TENANT):
            placement = from_status(tenant)
            if placement.pools:
                self.assume(tenant["metadata"]["name"], placement)

    def _count(self, tenant: str, placement: Placement, sign: int) -> None:
        for pool, placed in placement.pools.items():
            _member(self._on_pool, pool, tenant, sign)
            for lane, replicas in placed.lanes.items():
                loads = self._loads.setdefault((pool, lane), {})
                for replica in replicas:
                    loads[replica] = _plus(loads.get(replica, Load()), sign * placed.weight, sign)
                    _member(self._on_replica, Key(pool, replica), tenant, sign)


def from_status(tenant: Obj) -> Placement:
    """The placement that a Tenant's status tells. Replicas carry their lane in their name."""
    status = tenant.get("status") or {}
    route = status.get("route") or {}
    weight = int(route.get("weight", 1))
    pools = {}
    for entry in status.get("placement") or []:
        pool, replicas = entry["pool"], entry.get("replicas") or []
        lanes = {
            lane: tuple(r for r in replicas if r.startswith(f"{names.lane_workload(pool, lane)}-"))
            for lane in LaneName
        }
        pools[pool] = Placed(
            weight, {lane: found for lane, found in lanes.items() if found}, entry.get("reason", "")
        )
    models = {model["name"]: model["pool"] for model in route.get("models") or []}
    return Placement(models, pools)


def routed_replicas(tenant: Obj | None) -> frozenset[Key]:
    """`Key(pool, replica)` of every replica that the stored route names."""
    route = ((tenant or {}).get("status") or {}).get("route") or {}
    return frozenset(
        Key(pool["name"], replica)
        for pool in route.get("pools") or []
        for lane in pool.get("lanes") or []
        for replica in lane.get("replicas") or []
    )


def routed_names(tenant: Obj, pool: str) -> Iterable[tuple[str, str]]:
    """(served name, digest) of every adapter that the stored route serves from the pool."""
    route = (tenant.get("status") or {}).get("route") or {}
    for model in route.get("models") or []:
        if model.get("pool") == pool:
            for target in model.get("targets") or []:
                if target.get("digest"):
                    yield target["servedName"], target["digest"]


def _keys(placement: Placement) -> frozenset[Key]:
    return frozenset(
        Key(pool, replica) for pool, placed in placement.pools.items() for replica in placed.replicas
    )


def _plus(load: Load, weight: int, tenants: int) -> Load:
    return Load(max(0, load.weight + weight), max(0, load.tenants + tenants))


def _member(index: dict[_K, set[str]], key: _K, tenant: str, sign: int) -> None:
    if sign > 0:
        index.setdefault(key, set()).add(tenant)
    elif key in index:
        index[key].discard(tenant)
        if not index[key]:
            del index[key]
