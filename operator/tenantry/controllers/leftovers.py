"""After a Tenant is gone there is no status left to say so: what is left of it is looked for, and the answer recorded.

Keys are `Key(uid, name)` of Tenants that were deleted. The record is an event and a line of the log `tenantry.audit`.
It says what was looked at and found empty; it never says that bytes were erased from a disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from tenantry.api import Tier, names
from tenantry.cluster import (
    ADAPTER_POOL,
    DEPLOYMENT,
    LIMIT_RANGE,
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    POD,
    POD_DISRUPTION_BUDGET,
    RESOURCE_QUOTA,
    ROLE_BINDING,
    SERVICE,
    STATEFUL_SET,
    Key,
    Obj,
    key_of,
    uid_of,
)
from tenantry.cluster.client import MANAGED
from tenantry.desired import nodes
from tenantry.desired.problems import join
from tenantry.runtime.controller import DONE, Context, Result
from tenantry.runtime.store import Store

from .looking import Looker
from .placements import routed_replicas
from .reading import listed
from .world import World

audit = logging.getLogger("tenantry.audit")

KINDS = (
    NAMESPACE,
    ADAPTER_POOL,
    STATEFUL_SET,
    DEPLOYMENT,
    POD,
    SERVICE,
    RESOURCE_QUOTA,
    LIMIT_RANGE,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    ROLE_BINDING,
)
"""All that the operator makes for a tenant but ConfigMaps and ServiceAccounts, which nobody should have to read
everywhere and which go with their namespace, and NodePools, which go before the Tenant does."""
AGAIN_SECONDS = 5.0
PATIENCE_SECONDS = 600.0
"""Adapters drain and pods end in their own time; what is there after that is reported as left."""


@dataclass(frozen=True)
class _Departed:
    tenant: Obj
    since: float
    pools: tuple[str, ...]
    dedicated: bool


class LeftoversReconciler:
    def __init__(self, world: World) -> None:
        self.world = world
        self.looker = Looker(world)
        self._departed: dict[Key, _Departed] = {}

    def left(self, old: Obj | None, new: Obj | None, store: Store) -> Iterable[Key]:
        """A Tenant was deleted."""
        if old is None or new is not None:
            return ()
        key = Key(uid_of(old), old["metadata"]["name"])
        pools = tuple(sorted({replica.namespace for replica in routed_replicas(old)}))
        dedicated = Tier(old["spec"]["tier"]).dedicated
        self._departed[key] = _Departed(old, self.world.clock(), pools, dedicated)
        return (key,)

    async def reconcile(self, key: Key, ctx: Context) -> Result:
        gone = self._departed.get(key)
        if gone is None:
            return DONE
        left = [*await self._objects(key, gone, ctx), *await self._adapters(key, gone)]
        patient = self.world.clock() - gone.since < PATIENCE_SECONDS
        if left and patient:
            return Result(AGAIN_SECONDS)
        del self._departed[key]
        pools = join(gone.pools) if gone.pools else "no pool"
        looked = f"looked at {len(KINDS)} kinds, nodes, and the engines that it was on ({pools})"
        note = (
            f"left of the tenant: {join(left)}; {looked}"
            if left
            else f"nothing of the tenant is left: {looked}"
        )
        reason = "LeftBehind" if left else "Departed"
        ctx.recorder.event(gone.tenant, reason, note, action="Delete", type="Warning" if left else "Normal")
        about = {"tenant": key.name, "uid": key.namespace, "outcome": reason, "left": left}
        audit.info("tenant departed: %s", note, extra=about)
        return DONE

    async def _objects(self, key: Key, gone: _Departed, ctx: Context) -> list[str]:
        """Objects of ours that bear its label. Only a dedicated tenant ever had some: those are looked for live."""
        found: list[str] = []
        if gone.dedicated:
            label = f"{MANAGED},{names.TENANT_LABEL}={key.name}"
            for resource in KINDS:
                there = await listed(ctx.client, resource, labelSelector=label)
                theirs = [obj for obj in there if not self._of_a_successor(obj, key)]
                found += [f"{resource.kind} {key_of(obj)}" for obj in theirs]
        held = [n for n in self.world.store.list(NODE) if nodes.holds(n, key.name, key.namespace)]
        return [*found, *(f"Node {node['metadata']['name']}" for node in held)]

    def _of_a_successor(self, obj: Obj, key: Key) -> bool:
        """Whether a tenant of the same name, made since, owns it."""
        owners = {ref.get("uid") for ref in obj["metadata"].get("ownerReferences") or []}
        living = self.world.tenant(key.name)
        return living is not None and uid_of(living) in owners

    async def _adapters(self, key: Key, gone: _Departed) -> list[str]:
        """Adapters of it that some replica still knows, by the replicas' own word now."""
        found = []
        for pool in self.world.pools():
            told = self.world.observations.reported(pool.name).values()
            suspect = any(entry.tenant == key.namespace for report in told for entry in report.adapters)
            if pool.spec.lora is None or not (suspect or pool.name in gone.pools):
                continue
            for replica, report in sorted((await self.looker.replicas(pool)).items()):
                if report is None:
                    found.append(f"{replica}: not asked")
                elif any(adapter.tenant == key.namespace for adapter in report.adapters):
                    found.append(f"{replica}: adapters")
        return found
