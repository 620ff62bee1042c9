"""What each replica must hold.

A replica may have a thousand tenants, and looks often while any of them changes; so what a tenant needs is worked out
once, and again when something changed that it follows from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tenantry.api.adapter import ChannelName
from tenantry.cluster import ADAPTER_POOL, TENANT, Key, Obj, is_deleting, spec_version, uid_of
from tenantry.desired.pins import pinned
from tenantry.desired.problems import SpecError
from tenantry.engines import Pull
from tenantry.engines.fetcher import AdapterFacts
from tenantry.placement.stored import Placement
from tenantry.promotion import machine
from tenantry.promotion.machine import Release

from . import bindings
from .bindings import bound_adapter, pull, reference, remembered, served
from .placements import routed_names
from .world import Pool, World


@dataclass(frozen=True, slots=True)
class Wanted:
    """A served name that a replica must hold. `adapter` None: only a route still names it.

    `urgency`: 0 serves now, 1 is on its way; the pool's `maxRegistered` cuts from the end. `pinned`: its pages
    stay once it serves.
    """

    name: str
    digest: str
    tenant: str
    pull: Pull | None = None
    adapter: Key | None = None
    drain_seconds: int = 60
    urgency: int = 0
    pinned: bool = False


_Spec = tuple[str, int] | None
"""Which spec an object has: its uid and generation; None where there is none."""


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a tenant needs on a pool, with all that it follows from: the specs of tenant and pools, whose statuses
    change all the time, and whole adapters, which are other objects in the store once they changed."""

    wanted: tuple[Wanted, ...]
    tenant: _Spec
    placement: Placement
    adapters: tuple[tuple[Key, Obj | None], ...]
    pools: tuple[tuple[str, _Spec], ...]
    facts: tuple[tuple[Pull, AdapterFacts | None], ...]

    def stand(self, world: World, tenant: Obj, placement: Placement) -> bool:
        return (
            _spec(tenant) == self.tenant
            and placement is self.placement
            and all(world.adapter(key) is obj for key, obj in self.adapters)
            and all(_spec(world.store.get(ADAPTER_POOL, Key("", name))) == spec for name, spec in self.pools)
            and all(_facts(world, asked) == facts for asked, facts in self.facts)
        )


class Needs:
    """Of all tenants."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, dict[str, _Needs]] = {}

    def on(self, pool: Pool, replica: str) -> dict[str, Wanted]:
        """Everything that the replica must hold, by served name."""
        world, here = self._world, Key(pool.name, replica)
        wanted: dict[str, Wanted] = {}
        routed = world.links.routed_to(here)
        for name in sorted(world.placements.tenants_of(here) | routed):
            tenant = world.tenant(name)
            if tenant is None or is_deleting(tenant):
                continue
            serving = dict(routed_names(tenant, pool.name)) if name in routed else {}
            placed = world.placements.get(name).pools.get(pool.name)
            here_too = placed is not None and replica in placed.replicas
            for entry in self._of(name, tenant, pool.name) if here_too else ():
                before = wanted.get(entry.name)
                urgent = entry.name in serving or (before is not None and before.urgency < entry.urgency)
                wanted[entry.name] = replace(entry, urgency=0) if urgent and entry.urgency else entry
            for served_name, digest in serving.items():
                if served_name not in wanted:
                    key = bindings.adapter_of(served_name)
                    listed = _listed(world, key, digest)
                    wanted[served_name] = Wanted(served_name, digest, uid_of(tenant), listed, key)
        return wanted

    def _of(self, name: str, tenant: Obj, pool: str) -> tuple[Wanted, ...]:
        placement = self._world.placements.get(name)
        if len(self._known) > 2 * self._world.store.count(TENANT) + 100:
            self._known = {n: known for n, known in self._known.items() if self._world.tenant(n) is not None}
        known = self._known.setdefault(name, {})
        needs = known.get(pool)
        if needs is None or not needs.stand(self._world, tenant, placement):
            needs = known[pool] = _work_out(self._world, name, tenant, placement, pool)
        return needs.wanted


def _work_out(world: World, name: str, tenant: Obj, placement: Placement, pool: str) -> _Needs:
    try:
        spec = world.tenant_spec(tenant)
    except SpecError:
        return _Needs((), _spec(tenant), placement, (), (), ())
    adapters = sorted(
        {
            key
            for model in spec.models
            if placement.models.get(model.name) == pool and (key := reference(model)) is not None
        }
    )
    stay = {Key(ref.namespace, ref.name) for ref in pinned(spec, world.config.tiers.get(spec.tier))}
    wanted: list[Wanted] = []
    pools: set[str] = set()
    facts: dict[Pull, AdapterFacts | None] = {}
    for key in adapters:
        found = bound_adapter(world, name, spec, key)
        if found is None:
            continue
        adapter, adapter_spec = found
        pools |= bindings.pool_names(placement, spec, key)
        asked = {channel: machine.wanted(adapter_spec, channel) for channel in ChannelName}
        for release in asked.values():
            if release is not None:
                what = pull(key, adapter_spec, release)
                facts[what] = _facts(world, what)
        stable, canary = (
            bindings.objection(world, key, adapter_spec, asked[channel]) for channel in ChannelName
        )
        memory = remembered(adapter)
        served_now = [release for release, _ in memory.targets]
        for release in machine.declaration(adapter_spec, memory, stable, canary):
            wanted.append(
                Wanted(
                    name=served(key, release),
                    digest=release.digest,
                    tenant=uid_of(tenant),
                    pull=pull(key, adapter_spec, release) if release.source else None,
                    adapter=key,
                    drain_seconds=adapter_spec.rollout.drain_seconds,
                    urgency=0 if any(release.same(other) for other in served_now) else 1,
                    pinned=key in stay,
                )
            )
    return _Needs(
        tuple(wanted),
        _spec(tenant),
        placement,
        tuple((key, world.adapter(key)) for key in adapters),
        tuple((name, _spec(world.store.get(ADAPTER_POOL, Key("", name)))) for name in sorted(pools)),
        tuple(facts.items()),
    )


def _spec(obj: Obj | None) -> _Spec:
    return None if obj is None else spec_version(obj)


def _facts(world: World, asked: Pull) -> AdapterFacts | None:
    transfer = world.observations.artifact(asked)
    return transfer.adapter if transfer is not None else None


def _listed(world: World, key: Key | None, digest: str) -> Pull | None:
    """Where the bytes come from, by the adapter's own list: a replica that restarts under a route needs them again."""
    adapter = world.adapter(key) if key is not None else None
    if adapter is None or key is None:
        return None
    try:
        spec = world.adapter_spec(adapter)
    except SpecError:
        return None
    return next(
        (pull(key, spec, Release.of(entry)) for entry in spec.versions if entry.digest == digest), None
    )
