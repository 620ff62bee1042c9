"""What a dedicated tenant owns: nodes, a fenced namespace and its pool. Made in this order, undone in reverse."""

from __future__ import annotations

from tenantry.api import TenantSpec, names
from tenantry.cluster import (
    ADAPTER_POOL,
    CONFIG_MAP,
    DEPLOYMENT,
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    POD,
    ROLE_BINDING,
    SERVICE,
    STATEFUL_SET,
    Key,
    Obj,
    controller_of,
    is_deleting,
    key_of,
    owned_by,
    uid_of,
)
from tenantry.cluster.client import MANAGED
from tenantry.desired import gate, gateway, namespace, nodepool, nodes, quota
from tenantry.desired.tenant import derived_pool
from tenantry.evidence import probe
from tenantry.runtime.controller import Context

from . import networks
from .deleting import remaining, why_it_stays
from .networks import own_gateway_answers
from .nodepools import NodePools
from .probing import left_over
from .world import World

RIGHTS = "the operator's rights in the tenant's namespace take effect"
"""The API server's authorizer learns of a RoleBinding a moment after it was made."""


class Dedicated:
    """Enterprise tenants' own objects."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.node_pools = NodePools(world)

    async def ensure(self, tenant: Obj, spec: TenantSpec, ctx: Context) -> str | None:
        """Everything in place and up to date; else what is still awaited. Raises NameTaken."""
        name = tenant["metadata"]["name"]
        if names.FINALIZER not in tenant["metadata"].get("finalizers", []):
            tenant = await ctx.add_finalizer(tenant)
        shortage = await self._claim(tenant, spec, ctx)
        shortage = await self.node_pools.ensure(tenant, spec, ctx) or shortage
        await ctx.ensure(tenant, [namespace.namespace(name)])
        config = ctx.config
        binding = namespace.role_binding(
            name, config.service_account, config.release_namespace, config.tenant_role
        )
        bound = self.world.store.get(ROLE_BINDING, key_of(binding)) is not None
        await ctx.ensure(tenant, [binding])
        if not bound:
            return RIGHTS
        certificates = await ctx.client.get(
            CONFIG_MAP, Key(config.release_namespace, names.IDENTITY_CONFIGMAP)
        )
        if certificates is None:
            return f"ConfigMap `{config.release_namespace}/{names.IDENTITY_CONFIGMAP}` is awaited"
        policies = networks.policies(self.world, tenant, spec)
        policy = gate.policy_of(spec, config)
        fences = [
            *policies,
            namespace.service_account(name),
            probe.service_account(name),
            namespace.identity(name, certificates.get("data") or {}),
            quota.resource_quota(name, config.quota),
            quota.limit_range(name),
            *([] if policy is None else [gate.config_map(name, policy)]),
        ]
        await ctx.ensure(tenant, fences)
        await ctx.prune(tenant, [NETWORK_POLICY], policies)
        assert spec.dedicated is not None
        template = config.pool_templates[spec.dedicated.pool_template_ref]
        await ctx.ensure(tenant, [derived_pool(name, spec, template)])
        return shortage or await self._gateway(tenant, spec, ctx)

    async def _gateway(self, tenant: Obj, spec: TenantSpec, ctx: Context) -> str | None:
        """The tenant's own gateway, where it has one; what is awaited of it, in words."""
        name, release = tenant["metadata"]["name"], ctx.config.release_namespace
        wanted = []
        if gateway.is_own(spec):
            if ctx.config.gateway is None:
                return "the operator must be told of the gateway's image and keys (`gateway`)"
            wanted = gateway.render(name, release, ctx.config.gateway)
        await ctx.ensure(tenant, wanted)
        await ctx.prune(tenant, [DEPLOYMENT, SERVICE], wanted)
        if not wanted or own_gateway_answers(self.world, name):
            return None
        return f"Deployment `{release}/{names.own_gateway(name)}` is not available yet"

    async def teardown(self, tenant: Obj, ctx: Context) -> str | None:
        """One step of undoing everything; what is still awaited, None when nothing of it is left.

        Engines go first and the namespace only when no pod runs there, so that policies stand until then. Nodes are
        given back last. Nothing is touched that this very tenant does not own.
        """
        name = tenant["metadata"]["name"]
        await ctx.prune(tenant, [ADAPTER_POOL, DEPLOYMENT, SERVICE], [])
        pool = await ctx.live(ADAPTER_POOL, Key("", names.dedicated_pool(name)))
        if pool is not None and owned_by(pool, tenant):
            return f"AdapterPool `{names.dedicated_pool(name)}` is being deleted"
        where = names.tenant_namespace(name)
        live = await ctx.live(NAMESPACE, Key("", where))
        if live is not None and owned_by(live, tenant):
            await self._stop_engines(where, names.dedicated_pool(name), ctx)
            for pod in left_over(self.world, name):
                await ctx.client.delete(POD, key_of(pod), uid=uid_of(pod))
            left = await self._running(where, ctx)
            if left:
                return f"{left} in namespace `{where}` are still there"
            await ctx.prune(tenant, [NAMESPACE], [])
            live = await ctx.live(NAMESPACE, Key("", where))
            if live is not None:
                why = why_it_stays(live)
                return f"namespace `{where}` is being deleted{': ' if why else ''}{why}"
        made = await self.node_pools.remove(tenant, ctx)
        if made is not None:
            return made
        for node in list(self.world.store.list(NODE)):
            if nodes.holds(node, name, uid_of(tenant)):
                await self._patch(node, nodes.release_patch(node), ctx)
        self.world.links.short_of_nodes.discard(name)
        return None

    async def _stop_engines(self, where: str, pool: str, ctx: Context) -> None:
        """The garbage collector would do it too, but learns of new kinds only now and then."""
        for workload in list(self.world.store.list(STATEFUL_SET, where)):
            owner = controller_of(workload) or {}
            if (owner.get("kind"), owner.get("name")) == (ADAPTER_POOL.kind, pool) and not is_deleting(
                workload
            ):
                await ctx.client.delete(STATEFUL_SET, key_of(workload), uid=uid_of(workload))

    async def _running(self, where: str, ctx: Context) -> str:
        """Workloads and pods of ours in the namespace, in words; empty when none is left."""
        counts = []
        for resource in (STATEFUL_SET, POD):
            found = [obj async for obj in ctx.client.list(resource, namespace=where, labels=MANAGED)]
            if found:
                counts.append(remaining(found, resource.plural))
        return " and ".join(counts)

    async def _claim(self, tenant: Obj, spec: TenantSpec, ctx: Context) -> str | None:
        """Take and give back nodes; what is missing, in words."""
        name = tenant["metadata"]["name"]
        isolation = spec.isolation
        claim = nodes.Claim(
            tenant=name,
            uid=uid_of(tenant),
            count=isolation.nodes if isolation.node_pool_template_ref is None else 0,
            region=isolation.region,
            region_label=ctx.config.region_label,
            selector=isolation.node_selector,
        )
        known = {
            node["metadata"]["name"]: node
            for node in self.world.store.list(NODE)
            if not nodepool.is_karpenters(node)
        }
        plan = nodes.plan(claim, list(known.values()), self._busy(name))
        for taken in plan.take:
            await self._patch(known[taken], nodes.claim_patch(known[taken], name, uid_of(tenant)), ctx)
        for released in plan.release:
            await self._patch(known[released], nodes.release_patch(known[released]), ctx)
        if not plan.missing:
            self.world.links.short_of_nodes.discard(name)
            return None
        self.world.links.short_of_nodes.add(name)
        return plan.reason

    def _busy(self, tenant: str) -> frozenset[str]:
        pods = self.world.store.list(POD, names.tenant_namespace(tenant))
        return frozenset(str(pod["spec"]["nodeName"]) for pod in pods if pod.get("spec", {}).get("nodeName"))

    async def _patch(self, node: Obj, patch: Obj, ctx: Context) -> None:
        """Conditional on what was read: two tenants never take the same node."""
        meta = node["metadata"]
        await ctx.client.merge_patch(
            NODE, Key("", meta["name"]), patch, uid=uid_of(node), version=meta["resourceVersion"]
        )
