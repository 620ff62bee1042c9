"""Nodes that Karpenter makes for one tenant: asked for with a NodePool, awaited, and gone with it."""

from __future__ import annotations

from tenantry.api import TenantSpec, names
from tenantry.cluster import NODE, NODE_POOL, Key, NotFound, Obj, is_deleting, owned_by, uid_of
from tenantry.desired import nodepool, nodes
from tenantry.runtime.controller import Context

from .world import World


class NodePools:
    """Karpenter need not be there: its kind is touched for tenants that ask for it, and for those that did."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def ensure(self, tenant: Obj, spec: TenantSpec, ctx: Context) -> str | None:
        """The NodePool as the spec asks for it, or none; what is awaited, in words. Raises NameTaken."""
        isolation, name = spec.isolation, tenant["metadata"]["name"]
        if isolation.node_pool_template_ref is None:
            return await self.remove(tenant, ctx)
        wanted = nodepool.render(
            name,
            uid_of(tenant),
            ctx.config.node_pool_templates[isolation.node_pool_template_ref],
            None if isolation.region is None else (ctx.config.region_label, isolation.region),
            isolation.node_selector,
        )
        try:
            await ctx.ensure(tenant, [wanted])
        except NotFound:
            return "Karpenter must be installed for `isolation.nodePoolTemplateRef`: the API server knows no NodePool"
        if not self._nodes(tenant):
            return f"NodePool `{names.dedicated_pool(name)}` has no node yet: Karpenter makes one for the tenant's pods"
        return None

    async def remove(self, tenant: Obj, ctx: Context) -> str | None:
        """Without the NodePool its nodes go too; what is still there, in words."""
        key = Key("", names.dedicated_pool(tenant["metadata"]["name"]))
        left = self._nodes(tenant)
        if self.world.store.get(NODE_POOL, key) is None and not left and not _asked(tenant):
            return None
        live = await ctx.live(NODE_POOL, key)
        if live is not None and owned_by(live, tenant):
            if not is_deleting(live):
                await ctx.client.delete(NODE_POOL, key, uid=uid_of(live), propagation="Foreground")
            return f"NodePool `{key.name}` is being deleted"
        return f"{len(left)} nodes of NodePool `{key.name}` are being removed" if left else None

    def _nodes(self, tenant: Obj) -> list[Obj]:
        name, uid = tenant["metadata"]["name"], uid_of(tenant)
        return [
            node
            for node in self.world.store.list(NODE)
            if nodes.holds(node, name, uid) and nodepool.is_karpenters(node)
        ]


def _asked(tenant: Obj) -> bool:
    """Whether the spec, valid or not, names a template: then a NodePool may be there that nobody remembers."""
    isolation = (tenant.get("spec") or {}).get("isolation") or {}
    return "nodePoolTemplateRef" in isolation
