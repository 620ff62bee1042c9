"""Placing one tenant: which pool for each model, which replicas in it. Decides and assumes without awaiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tenantry.api import TenantSpec, names
from tenantry.api.pool import LaneName
from tenantry.cluster import Obj, controller_of, uid_of
from tenantry.desired import route
from tenantry.placement import pools as pool_choice
from tenantry.placement.replicas import Wish, place

from .placements import Placed, Placement
from .world import Pool, World


@dataclass(frozen=True)
class Placing:
    """The placement, and for each model without a place the reason."""

    placement: Placement
    objections: Mapping[str, str]


def shared(world: World, name: str, spec: TenantSpec, weight: int) -> Placing:
    """On pools that admit the tier."""
    previous = world.placements.get(name)
    offered = [_candidate(world, pool, name) for pool in world.pools()]
    models: dict[str, str] = {}
    objections: dict[str, str] = {}
    for model in spec.models:
        wish = pool_choice.PoolWish(
            spec.tier, model.base_model, model.adapter_ref is not None, model.pool_ref
        )
        before = previous.models.get(model.name) or next(iter(sorted(previous.pools)), None)
        choice = pool_choice.choose(wish, offered, before)
        if choice.pool is None:
            objections[model.name] = choice.reason
        else:
            models[model.name] = choice.pool
    placed = {}
    for pool_name in sorted(set(models.values())):
        pool = world.pool(pool_name)
        assert pool is not None
        placed[pool_name] = _spread(world, name, spec, weight, pool)
    for alias, pool_name in models.items():
        if not placed[pool_name].lanes:
            objections[alias] = f"pool `{pool_name}`: {placed[pool_name].reason}"
    return Placing(Placement(models, placed), objections)


def dedicated(world: World, tenant: Obj, spec: TenantSpec, weight: int) -> Placing:
    """On every replica of the tenant's own pool."""
    name = tenant["metadata"]["name"]
    pool = world.pool(names.dedicated_pool(name))
    owner = controller_of(pool.obj) if pool is not None else None
    if pool is None or owner is None or owner.get("uid") != uid_of(tenant):
        waiting = f"pool `{names.dedicated_pool(name)}` is being made"
        return Placing(Placement(), {model.name: waiting for model in spec.models})
    lanes = {
        lane: found
        for lane in route.lanes_for(spec.lane, pool.spec)
        if (found := tuple(world.lane_replicas(pool, lane)))
    }
    placed = Placed(weight, lanes, "the tenant's own pool")
    models = {model.name: pool.name for model in spec.models}
    if not lanes:
        return Placing(
            Placement(models, {pool.name: placed}), dict.fromkeys(models, "the pool has no replicas yet")
        )
    return Placing(Placement(models, {pool.name: placed}), {})


def _candidate(world: World, pool: Pool, tenant: str) -> pool_choice.Candidate:
    return pool_choice.Candidate(
        name=pool.name,
        spec=pool.spec,
        replicas=len(world.replicas(pool)),
        tenants=len(world.placements.tenants_on(pool.name) - {tenant}),
        dedicated=pool.tenant is not None,
        deleting=pool.deleting,
    )


def _spread(world: World, tenant: str, spec: TenantSpec, weight: int, pool: Pool) -> Placed:
    rules = pool.spec.placement
    before = world.placements.get(tenant).pools.get(pool.name)
    lanes: dict[LaneName, tuple[str, ...]] = {}
    reasons = []
    for lane in route.lanes_for(spec.lane, pool.spec):
        assignment = place(
            Wish(tenant, weight, rules.replicas_per_tenant),
            world.lane_replicas(pool, lane),
            world.placements.loads(pool.name, lane, tenant),
            before.lanes.get(lane, ()) if before is not None else (),
            rules.max_tenants_per_replica,
        )
        if assignment.replicas:
            lanes[lane] = assignment.replicas
        reasons.append(f"{lane.value}: {assignment.reason}")
    reason = "; ".join(reasons)
    if before is not None and before.reason and before.lanes == lanes:
        reason = before.reason  # why it came there, not that it stayed: nothing is to be written anew
    return Placed(weight, lanes, reason)
