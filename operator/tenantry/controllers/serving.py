"""From a placement to what may be routed now: only what is ready and loaded, and the old until the new can serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from tenantry.api import AdapterSpec, Route, TenantSpec, Tier
from tenantry.api.pool import LaneName
from tenantry.api.tenant import RouteModel, RouteTarget, TenantModel
from tenantry.cluster import Key, Obj
from tenantry.desired import route
from tenantry.desired.isolation import Observation
from tenantry.desired.limits import effective_limits, weight_of
from tenantry.promotion.machine import Held

from . import bindings, pods
from .placements import Placement
from .world import Pool, World


@dataclass(frozen=True)
class Serving:
    """What may be routed now.

    `missing`: models that are not served where the placement wants them. `moved`: everything that is routed runs
    there. `in_force`: the tier by which requests were routed until now, and `held`: that they still are, since the
    place of the new tier lacks what `waits` says. `unserved`: aliases of the spec that nothing answers now.
    """

    route: Route | None
    missing: tuple[TenantModel, ...]
    moved: bool
    ready: bool
    unserved: tuple[str, ...] = ()
    in_force: Tier | None = None
    held: bool = False
    waits: str = ""


def stored_route(tenant: Obj) -> Route | None:
    wire = (tenant.get("status") or {}).get("route")
    if not wire:
        return None
    try:
        return Route.model_validate(wire)
    except ValidationError:
        return None


def resolve(world: World, tenant: Obj, spec: TenantSpec, placement: Placement) -> Serving:
    """The route that holds now, alias by alias: each moves as soon as its new place can serve it."""
    name = name_of(tenant)
    old = stored_route(tenant)
    served: dict[str, route.Served] = {}
    for model in spec.models:
        target = target_of(world, name, spec, model, placement, old=old) or _kept(
            world, name, spec, model.name, old
        )
        if target is not None:
            served[model.name] = target
    placed = {
        pool_name: found
        for pool_name in sorted({target.pool for target in served.values()})
        if (found := _placed(world, pool_name, placement, served, old)) is not None
    }
    served = {alias: target for alias, target in served.items() if target.pool in placed}
    policy = world.config.tiers[spec.tier]
    limits = effective_limits(spec.limits, policy)
    built = route.build(spec, limits, weight_of(spec.weight, policy), placed.values(), served)
    missing = tuple(model for model in spec.models if model.name not in served)
    return Serving(
        route=built,
        missing=missing,
        unserved=tuple(model.name for model in missing),
        moved=all(placement.models.get(alias) == target.pool for alias, target in served.items()),
        ready=built is not None and all(_any_ready(world, pool) for pool in placed.values()),
    )


def prune_route(world: World, tenant: Obj) -> Route | None:
    """The stored route without adapters that are gone or no longer the tenant's: for specs that cannot be read."""
    old = stored_route(tenant)
    if old is None:
        return None
    name = name_of(tenant)
    models = [model for model in old.models if all(exists(world, name, target.served_name, target.digest)
                                                   for target in model.targets)]  # fmt: skip
    return old.model_copy(update={"models": models}) if models else None


def integrity(world: World, built: Route | None) -> Observation:
    """Whether the engines report the digests that the route names."""
    if built is None:
        return Observation(None, "nothing is served")
    confirmed = total = 0
    for pool_route in built.pools:
        pool = world.pool(pool_route.name)
        if pool is None:
            continue
        wanted = [t for m in built.models if m.pool == pool.name for t in m.targets if t.digest]
        for replica in sorted({replica for lane in pool_route.lanes for replica in lane.replicas}):
            for target in wanted:
                held = _held(world, pool, replica, target.served_name, target.digest)
                total += 1
                confirmed += held is Held.LOADED
    if not total:
        return Observation(None, "no adapter is in use", idle=True)
    if confirmed == total:
        return Observation(True, "every replica reports the digests of the spec")
    return Observation(None, "not every replica has reported its digests")


def aliases(tenant: Obj, spec: TenantSpec) -> list[TenantModel]:
    """The models of the spec that the stored route answers, by whatever."""
    old = stored_route(tenant)
    answered = {model.name for model in old.models} if old is not None else set()
    return [model for model in spec.models if model.name in answered]


def name_of(tenant: Obj) -> str:
    return str(tenant["metadata"]["name"])


def target_of(
    world: World,
    tenant: str,
    spec: TenantSpec,
    model: TenantModel,
    placement: Placement,
    *,
    old: Route | None,
) -> route.Served | None:
    """What the placement's pool can serve under the alias right now."""
    pool = world.pool(placement.models.get(model.name, ""))
    placed = placement.pools.get(pool.name) if pool is not None else None
    if pool is None or placed is None:
        return None
    ready = [replica for replica in placed.replicas if world.is_ready(pool, replica)]
    key = bindings.reference(model)
    if key is None:
        return route.Served(pool.name, pool.spec.base_model.name) if ready else None
    found = bindings.bound_adapter(world, tenant, spec, key)
    if found is None:
        return None
    targets = [
        RouteTarget(served_name=bindings.served(key, release), digest=release.digest, weight=weight)
        for release, weight in bindings.remembered(found[0]).targets
    ]
    if not targets or not _anywhere(world, pool, targets[0], ready):
        return None
    # What has traffic keeps it while nobody has been asked yet, as after a restart of this process.
    before = _routed(old, model.name)
    second = next(
        (t for t in targets[1:] if t.served_name in before or _anywhere(world, pool, t, ready)), None
    )
    return route.Served(pool.name, targets[0].served_name, targets[0].digest, second)


def _routed(old: Route | None, alias: str) -> set[str]:
    """Served names that answer the alias by the stored route."""
    models = old.models if old is not None else []
    return {target.served_name for model in models if model.name == alias for target in model.targets}


def _anywhere(world: World, pool: Pool, target: RouteTarget, replicas: list[str]) -> bool:
    return any(_held(world, pool, r, target.served_name, target.digest) is Held.LOADED for r in replicas)


def _kept(world: World, tenant: str, spec: TenantSpec, alias: str, old: Route | None) -> route.Served | None:
    """What the alias is served by already, as long as that may go on."""
    before: RouteModel | None = (
        next((m for m in old.models if m.name == alias), None) if old is not None else None
    )
    if before is None:
        return None
    pool, target = world.pool(before.pool), before.targets[0]
    if pool is None or pool.deleting:
        return None
    model = next(model for model in spec.models if model.name == alias)
    key = bindings.adapter_of(target.served_name) if target.digest else None
    found = bindings.bound_adapter(world, tenant, spec, key) if key is not None else None
    if key is not None and found is None:
        return None
    if key is None and model.adapter_ref is not None and target.digest:
        return None
    return route.Served(before.pool, target.served_name, target.digest, _second(before, key, found))


def _second(before: RouteModel, key: Key | None, found: tuple[Obj, AdapterSpec] | None) -> RouteTarget | None:
    """The other version of a kept route, as long as the adapter still shares the traffic between these two."""
    if key is None or found is None:
        return None
    targets = bindings.remembered(found[0]).targets
    names = [bindings.served(key, release) for release, _ in targets]
    if len(targets) < 2 or names != [target.served_name for target in before.targets]:
        return None
    return RouteTarget(served_name=names[1], digest=targets[1][0].digest, weight=targets[1][1])


def exists(world: World, tenant: str, served_name: str, digest: str) -> bool:
    if not digest:
        return True
    key = bindings.adapter_of(served_name)
    adapter = world.adapter(key) if key is not None else None
    return adapter is not None and adapter.get("spec", {}).get("tenantRef") == tenant


def _placed(
    world: World,
    pool_name: str,
    placement: Placement,
    served: Mapping[str, route.Served],
    old: Route | None,
) -> route.PlacedPool | None:
    """The pool with the replicas that may be sent requests; None when there is none."""
    pool = world.pool(pool_name)
    if pool is None:
        return None
    needed = {(t.name, t.digest) for t in served.values() if t.pool == pool_name and t.digest}
    assigned = placement.pools.get(pool_name)
    replicas: dict[LaneName, tuple[str, ...]] = {}
    for lane in pool.spec.lanes:
        previous = _previous(old, pool_name, lane.name)
        existing = world.lane_replicas(pool, lane.name)
        wanted = assigned.lanes.get(lane.name, ()) if assigned is not None else ()
        if assigned is None:
            found = tuple(replica for replica in previous if replica in existing)
        else:
            loaded = [r for r in wanted if world.is_ready(pool, r) and holds(world, pool, r, needed)]
            found = route.routable(wanted, loaded, previous, existing)
        if found:
            replicas[lane.name] = found[:64]
    if not replicas:
        return None
    return route.PlacedPool(pool.name, pool.uid, pool.namespace, pool.spec, replicas, world.is_secured(pool))


def _previous(old: Route | None, pool: str, lane: LaneName) -> list[str]:
    if old is None:
        return []
    return [
        r
        for p in old.pools
        if p.name == pool
        for entry in p.lanes
        if entry.name == lane
        for r in entry.replicas
    ]


def holds(world: World, pool: Pool, replica: str, needed: set[tuple[str, str]]) -> bool:
    return all(_held(world, pool, replica, name, digest) is Held.LOADED for name, digest in needed)


def _held(world: World, pool: Pool, replica: str, name: str, digest: str) -> Held:
    pod = world.pod(pool, replica)
    process = pods.incarnation(pod) if pod is not None else None
    seen = world.observations.get(Key(pool.name, replica), process) if process is not None else None
    return Held.UNKNOWN if seen is None else seen.held(name, digest)[0]


def _any_ready(world: World, placed: route.PlacedPool) -> bool:
    pool = world.pool(placed.name)
    return pool is not None and any(
        world.is_ready(pool, replica) for lane in placed.replicas.values() for replica in lane
    )
