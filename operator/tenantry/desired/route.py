"""The gateway's routing table of one tenant, from where it is placed and what is loaded there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tenantry.api import names
from tenantry.api.pool import AdapterPoolSpec, LaneName
from tenantry.api.tenant import (
    EffectiveLimits,
    LanePreference,
    Route,
    RouteLane,
    RouteModel,
    RoutePool,
    RouteTarget,
    TenantModel,
    TenantSpec,
)


@dataclass(frozen=True)
class PlacedPool:
    """A pool that serves the tenant and, lane by lane, the replicas that requests may go to."""

    name: str
    uid: str
    namespace: str
    spec: AdapterPoolSpec
    replicas: Mapping[LaneName, tuple[str, ...]]
    tls: bool = False


@dataclass(frozen=True)
class Served:
    """What answers to an alias: the base model (no digest) or an adapter's active version."""

    pool: str
    name: str
    digest: str = ""
    second: RouteTarget | None = None
    """Another version that answers a part of the requests."""


def lanes_for(preference: LanePreference, spec: AdapterPoolSpec) -> list[LaneName]:
    """The lanes that a tenant uses: what it prefers where the pool has it, else every lane."""
    present = [lane.name for lane in spec.lanes]
    if preference is LanePreference.AUTO:
        return present
    wanted = LaneName(preference.value.lower())
    return [wanted] if wanted in present else present


def build(
    spec: TenantSpec,
    limits: EffectiveLimits,
    weight: int,
    pools: Iterable[PlacedPool],
    served: Mapping[str, Served],
) -> Route | None:
    """The route, sorted. `served` maps aliases; one that nothing serves yet is left out. None: nothing serves."""
    models = [_model(model, served[model.name]) for model in spec.models if model.name in served]
    used = {model.pool for model in models}
    routed = [_pool(pool) for pool in sorted(pools, key=lambda pool: pool.name) if pool.name in used]
    if not models or not routed:
        return None
    return Route(
        weight=weight,
        lane=spec.lane,
        limits=limits,
        pools=routed,
        models=sorted(models, key=lambda model: model.name),
    )


def _model(model: TenantModel, served: Served) -> RouteModel:
    second = served.second
    weight = 100 - (second.weight if second is not None else 0)
    first = RouteTarget(served_name=served.name, digest=served.digest, weight=weight)
    return RouteModel(
        name=model.name,
        pool=served.pool,
        targets=[first] if second is None else [first, second],
        fallback=model.fallback,
    )


def _pool(pool: PlacedPool) -> RoutePool:
    lanes = [
        RouteLane(
            name=lane.name,
            service=names.lane_workload(pool.name, lane.name),
            slots=lane.slots,
            max_input_tokens=lane.max_input_tokens,
            replicas=sorted(pool.replicas[lane.name]),
        )
        for lane in pool.spec.lanes
        if pool.replicas.get(lane.name)
    ]
    return RoutePool(name=pool.name, uid=pool.uid, namespace=pool.namespace, tls=pool.tls, lanes=lanes)


def routable(
    assigned: Sequence[str], loaded: Iterable[str], previous: Iterable[str], existing: Iterable[str]
) -> tuple[str, ...]:
    """Make before break: requests go to the old replicas until every new one holds what the tenant needs.

    A restarted replica leaves the route as it is (the gateway asks replicas what they hold), so a restart rewrites
    no Tenant; the set is narrower than `assigned` only while a move or a first load is under way.
    """
    there = set(loaded)
    if all(replica in there for replica in assigned):
        return tuple(assigned)
    alive = set(existing)
    kept = [replica for replica in previous if replica in alive]
    return tuple(sorted({*kept, *(replica for replica in assigned if replica in there)}))


def names_on(route: Route | None, pool: str, replica: str) -> dict[str, str]:
    """Served name -> digest of every adapter that the route may send to that replica."""
    if route is None:
        return {}
    here = any(
        candidate.name == pool and any(replica in lane.replicas for lane in candidate.lanes)
        for candidate in route.pools
    )
    if not here:
        return {}
    return {
        target.served_name: target.digest
        for model in route.models
        if model.pool == pool
        for target in model.targets
        if target.digest
    }
