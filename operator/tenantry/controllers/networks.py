"""The cluster's own networks, which no tenant's egress may touch, and what stays open when one of them moves in."""

from __future__ import annotations

from collections.abc import Sequence

from tenantry.api import TenantSpec, Tier, names
from tenantry.api.tenant import GatewayPlace
from tenantry.cluster import (
    DEPLOYMENT,
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    SERVICE_CIDR,
    Key,
    NotFound,
    Obj,
    owned_by,
)
from tenantry.desired import gate, gateway, network
from tenantry.desired.tenant import cluster_ranges
from tenantry.runtime.controller import Context

from .world import World

FRESH_SECONDS = 60.0
"""How long the list of Service ranges is believed: they change once in a cluster's life, if ever."""


def serving_gateway(world: World, tenant: str, spec: TenantSpec) -> GatewayPlace:
    """By which gateway requests go: by the tenant's own once it answers, and in tier Regulated by no other ever."""
    own = gateway.is_own(spec) and (spec.tier is Tier.REGULATED or own_gateway_answers(world, tenant))
    return GatewayPlace.DEDICATED if own else GatewayPlace.SHARED


def policies(world: World, tenant: Obj, spec: TenantSpec, egress: Sequence[str] | None = None) -> list[Obj]:
    """The policies of the tenant's namespace as they are to be now. `egress`: instead of what the spec lists.

    While a tenant moves in from another tier, the gateway that still serves it reaches its engines too.
    """
    name, status = tenant["metadata"]["name"], tenant.get("status") or {}
    gateways = {serving_gateway(world, name, spec)}
    route = status.get("route") or {}
    if route and status.get("tier") != spec.tier.value:
        gateways.add(GatewayPlace(route.get("gateway", GatewayPlace.SHARED)))
    return network.policies(
        names.tenant_namespace(name),
        name,
        world.config.release_namespace,
        spec.isolation.egress if egress is None else egress,
        gated=gate.is_secured(spec),
        gateways=gateways,
    )


def own_gateway_answers(world: World, tenant: str) -> bool:
    """Whether a pod of the tenant's own gateway is available."""
    found = world.store.get(DEPLOYMENT, Key(world.config.release_namespace, names.own_gateway(tenant)))
    return bool(((found or {}).get("status") or {}).get("availableReplicas"))


class Networks:
    """Pod, node, Service and protected ranges."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._services: tuple[str, ...] = ()
        self._asked = float("-inf")

    async def protected(self, ctx: Context) -> list[tuple[str, str]]:
        """CIDRs with what each is, for `egress_problems`."""
        ranges = cluster_ranges(self.world.store.list(NODE), ctx.config.protected_cidrs)
        return [*ranges, *((cidr, "the cluster's Services") for cidr in await self._service_ranges(ctx))]

    async def narrow(
        self, tenant: Obj, spec: TenantSpec, protected: list[tuple[str, str]], ctx: Context
    ) -> None:
        """Close what an earlier egress list opens and the cluster has taken since (a new node, say).

        The spec is refused as it stands, so nothing else of it is applied.
        """
        where = names.tenant_namespace(tenant["metadata"]["name"])
        space = self.world.store.get(NAMESPACE, Key("", where))
        if space is None or not owned_by(space, tenant):
            return
        kept = network.permitted(spec.isolation.egress, protected)
        closed = policies(self.world, tenant, spec, kept)
        await ctx.ensure(tenant, closed)
        await ctx.prune(tenant, [NETWORK_POLICY], closed)

    async def _service_ranges(self, ctx: Context) -> tuple[str, ...]:
        """From the API; an older API server does not know the kind, and then `protectedCidrs` must name them."""
        if self.world.clock() - self._asked < FRESH_SECONDS:
            return self._services
        found: list[str] = []
        try:
            async for entry in ctx.client.list(SERVICE_CIDR):
                found += entry.get("spec", {}).get("cidrs") or []
        except NotFound:
            found = []
        self._services, self._asked = tuple(found), self.world.clock()
        return self._services
