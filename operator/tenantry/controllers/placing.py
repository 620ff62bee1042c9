"""Placing one tenant: which pool for each model, which replicas in it. Decides and assumes without awaiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tenantry.api import TenantSpec, names
from tenantry.api.pool import LaneName
from tenantry.cluster import Key, Obj, controller_of, uid_of
from tenantry.desired import route
from tenantry.placement.load import Load
from tenantry.placement.pools import Candidate
from tenantry.placement.replicas import Replica
from tenantry.placement.tenants import Placing, place_tenant

from . import replica_facts
from .placements import Placed, Placement
from .world import Pool, World


def shared(world: World, name: str, spec: TenantSpec, weight: int) -> Placing:
    """On pools that admit the tier. Sees to it that the tenant is looked at again when time alone moves it."""
    placing = place_tenant(_View(world), name, spec, weight, world.placements.get(name))
    waits = [
        again
        for pool_name, placed in placing.placement.pools.items()
        if (pool := world.pool(pool_name)) is not None
        and (again := replica_facts.look_again_in(world, pool, placed.lanes)) is not None
    ]
    if waits:
        world.setup.enqueue("tenant", Key("", name), after=min(waits))
    return placing


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
    placed = Placed(weight, lanes, "every replica of the tenant's own pool")
    models = {model.name: pool.name for model in spec.models}
    if not lanes:
        return Placing(
            Placement(models, {pool.name: placed}), dict.fromkeys(models, "the pool has no replicas yet")
        )
    return Placing(Placement(models, {pool.name: placed}), {})


@dataclass(frozen=True)
class _View:
    """The world as placement asks of it."""

    world: World

    def candidates(self, tenant: str) -> Sequence[Candidate]:
        return [self._candidate(pool, tenant) for pool in self.world.pools()]

    def lane(self, pool: str, lane: LaneName, held: Sequence[str]) -> Sequence[Replica]:
        return replica_facts.of_lane(self.world, self._pool(pool), lane, held)

    def loads(self, pool: str, lane: LaneName, tenant: str) -> Mapping[str, Load]:
        return self.world.placements.loads(pool, lane, tenant)

    def pinned_pages(self, pool: str, tenant: str) -> int:
        obj, placed = self.world.tenant(tenant), self.world.placements.get(tenant).pools.get(pool)
        if obj is None or placed is None:
            return 0
        return replica_facts.pinned_pages(self.world, self._pool(pool), placed.replicas, uid_of(obj))

    def _pool(self, name: str) -> Pool:
        pool = self.world.pool(name)
        assert pool is not None, "a pool vanished within one decision"
        return pool

    def _candidate(self, pool: Pool, tenant: str) -> Candidate:
        return Candidate(
            name=pool.name,
            spec=pool.spec,
            lanes=tuple(len(self.world.lane_replicas(pool, lane.name)) for lane in pool.spec.lanes),
            tenants=self.world.placements.count_on(pool.name, tenant),
            dedicated=pool.tenant is not None,
            deleting=pool.deleting,
        )


__all__ = ["Placing", "dedicated", "shared"]
