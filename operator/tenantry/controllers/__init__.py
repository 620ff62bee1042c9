"""Level-triggered reconcilers of the three kinds and of replicas, and what wakes them."""

from __future__ import annotations

from tenantry.api import names
from tenantry.cluster import (
    ADAPTER,
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
    TENANT,
)
from tenantry.runtime.controller import Controller, Setup, Watch, label_key, own_key

from .adapter import AdapterReconciler
from .evidence_watches import EvidenceWatches
from .leftovers import LeftoversReconciler
from .metrics import COUNTED
from .pods import trim_node, trim_pod, trim_stateful_set
from .pool import PoolReconciler
from .pool_evidence import PoolEvidenceReconciler
from .replica import ReplicaReconciler
from .tenant import TenantReconciler
from .tenant_evidence import TenantEvidenceReconciler
from .watches import Watches, owner_pool, owner_tenant
from .world import World


def build(setup: Setup) -> list[Controller]:
    """All controllers over one shared world. To be called once, before the first object arrives."""
    return controllers(World(setup))


def controllers(world: World) -> list[Controller]:
    """The same for a world that was made elsewhere."""
    store = world.store
    store.set_trim(POD, trim_pod)
    store.set_trim(NODE, trim_node)
    store.set_trim(STATEFUL_SET, trim_stateful_set)
    on = Watches(world)
    guard = TenantEvidenceReconciler(world)
    leftovers = LeftoversReconciler(world)
    sees = EvidenceWatches(world, guard.look_now)
    world.evidence.on_news(sees.news)
    # Of ConfigMaps and ServiceAccounts only single ones are read, so that no right to all of them is needed.
    fences = (
        NAMESPACE,
        ROLE_BINDING,
        RESOURCE_QUOTA,
        LIMIT_RANGE,
        NETWORK_POLICY,
        DEPLOYMENT,
        SERVICE,
    )
    return [
        Controller(
            "tenant",
            TenantReconciler(world),
            [
                Watch(TENANT, own_key),
                Watch(ADAPTER_POOL, on.pool_to_tenants),
                Watch(ADAPTER_POOL, owner_tenant),
                Watch(STATEFUL_SET, on.workload_to_tenants),
                Watch(POD, on.pod_to_tenants),
                Watch(ADAPTER, on.adapter_to_tenants),
                Watch(NODE, on.node_to_tenants),
                *(Watch(resource, owner_tenant) for resource in fences),
                *(Watch(resource, on.counted(resource)) for resource in COUNTED),
            ],
        ),
        Controller(
            "pool",
            PoolReconciler(world),
            [
                Watch(ADAPTER_POOL, own_key),
                Watch(TENANT, on.tenant_to_pool),
                Watch(STATEFUL_SET, owner_pool),
                Watch(SERVICE, owner_pool),
                Watch(POD_DISRUPTION_BUDGET, owner_pool),
                Watch(POD, label_key(names.POOL_LABEL)),
            ],
        ),
        Controller(
            "replica",
            ReplicaReconciler(world),
            [
                Watch(POD, on.pod_to_replica),
                Watch(TENANT, on.tenant_to_replicas),
                Watch(ADAPTER, on.adapter_to_replicas),
            ],
        ),
        Controller(
            "adapter",
            AdapterReconciler(world),
            [
                Watch(ADAPTER, on.own_adapter),
                Watch(TENANT, on.tenant_to_adapters),
                Watch(ADAPTER_POOL, on.pool_to_adapters),
                Watch(POD, on.pod_to_adapters),
            ],
        ),
        Controller(
            "evidence",
            guard,
            [
                Watch(TENANT, sees.tenant),
                Watch(NODE, sees.node),
                Watch(NAMESPACE, sees.namespace),
                Watch(RESOURCE_QUOTA, sees.quota),
                Watch(NETWORK_POLICY, sees.policy),
                Watch(ADAPTER_POOL, owner_tenant),
                Watch(POD, sees.pod),
            ],
        ),
        Controller(
            "pool-evidence",
            PoolEvidenceReconciler(world),
            [Watch(ADAPTER_POOL, own_key), Watch(POD, sees.pool_pod)],
            workers=2,
        ),
        Controller("leftovers", leftovers, [Watch(TENANT, leftovers.left)], workers=2),
    ]


__all__ = ["World", "build", "controllers"]
