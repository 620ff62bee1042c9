"""What may be claimed of one tenant now: its own evidence, its pools' evidence, and the digests of its adapters."""

from __future__ import annotations

from collections.abc import Mapping

from tenantry.api import Route, TenantSpec, Tier
from tenantry.cluster import Obj
from tenantry.desired.isolation import UNSEEN, Observation
from tenantry.evidence.book import Subject
from tenantry.evidence.findings import together

from . import bindings, serving
from .world import World

RESTART_SECONDS = 30.0
"""What was claimed before a restart stands so long, until reports are read and replicas asked again."""


def subject_of(tenant: str) -> Subject:
    return Subject("Tenant", tenant)


def pool_subject(pool: str) -> Subject:
    return Subject("AdapterPool", pool)


def observations(
    world: World, tenant: Obj, spec: TenantSpec, route: Route | None, tier: Tier
) -> dict[str, Observation]:
    """By guarantee; what nobody looked at is not there. `tier`: the one whose place serves."""
    name = tenant["metadata"]["name"]
    found: dict[str, Observation] = {}
    if tier.dedicated:
        found |= world.evidence.observations(subject_of(name))
    else:
        found |= _of_pools(world, route)
    before = _claimed(world, tenant)
    looked = found.get("AdapterIntegrity")
    if not (tier.dedicated and looked is not None and looked.holds is False):
        now = _changed_version(world, name, spec) or serving.integrity(world, route)
        kept = before.get("AdapterIntegrity")
        if kept is not None and now.holds is None and (kept.holds or not now.idle):
            now = kept
        found["AdapterIntegrity"] = now
    return before | found


def _claimed(world: World, tenant: Obj) -> dict[str, Observation]:
    """What the stored status says, shortly after a restart: nothing later.

    What is not looked at at all needs no word of what was said before.
    """
    if world.clock() - world.began >= RESTART_SECONDS:
        return {}
    entries = (tenant.get("status") or {}).get("isolation") or []
    return {
        str(entry["guarantee"]): Observation(True if entry["state"] == "Enforced" else None, entry["reason"])
        for entry in entries
        if entry["state"] in ("Enforced", "Configured") and entry["reason"] != UNSEEN.get(entry["guarantee"])
    }


def _of_pools(world: World, route: Route | None) -> Mapping[str, Observation]:
    """What holds on every pool that serves the tenant; a shared pool is looked at once for all on it."""
    pages = []
    for routed in route.pools if route is not None else []:
        pool = world.pool(routed.name)
        pages.append(world.evidence.observations(pool_subject(pool.name)) if pool is not None else {})
    guarantees = {name for page in pages for name in page}
    found = {name: together(page.get(name) for page in pages) for name in sorted(guarantees)}
    return {name: observation for name, observation in found.items() if observation is not None}


def _changed_version(world: World, tenant: str, spec: TenantSpec) -> Observation | None:
    """A version that is served with other bytes than the Adapter's spec names by now."""
    for model in spec.models:
        key = bindings.reference(model)
        found = bindings.bound_adapter(world, tenant, spec, key) if key is not None else None
        if found is None:
            continue
        adapter, adapter_spec = found
        named = {version.version: version.digest for version in adapter_spec.versions}
        for release, _ in bindings.remembered(adapter).targets:
            if named.get(release.version, release.digest) != release.digest:
                return Observation(
                    False, f"`{key}` {release.version} is served with other bytes than its spec names"
                )
    return None
