"""Looks at the live cluster for one dedicated tenant. Only reads, but for the dry run of a pod that must be refused.

Objects are read past the store: it holds trimmed copies, and only of what bears our label.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tenantry.api import TenantSpec, names
from tenantry.cluster import (
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_QUOTA,
    ApiError,
    Client,
    Key,
    Obj,
    Resource,
    uid_of,
)
from tenantry.engines import EngineError, ReplicaReport
from tenantry.evidence import checks, probe
from tenantry.evidence.checks import Separation
from tenantry.evidence.findings import Finding, blind

from . import networks, pods
from .reading import listed, read
from .world import Pool, World

POLICY = Resource(
    "admissionregistration.k8s.io", "v1", "validatingadmissionpolicies", "ValidatingAdmissionPolicy", False
)
BINDING = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "validatingadmissionpolicybindings",
    "ValidatingAdmissionPolicyBinding",
    False,
)
AT_ONCE = 16
ADMISSION_SECONDS = 5.0

Found = list[tuple[str, str, Finding]]
"""(guarantee, aspect, finding)"""


class Looker:
    """Shared by all tenants: admission policies are the cluster's, so they are read once for many."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._admission: tuple[float, dict[str, tuple[Obj | None, Obj | None]]] | None = None

    async def look(self, tenant: Obj, spec: TenantSpec, held: list[Obj], client: Client) -> Found:
        """Everything that can be seen without a probe. What cannot be read is a finding too."""
        world, name = self.world, tenant["metadata"]["name"]
        space, at = names.tenant_namespace(name), world.evidence.now()
        config = world.config
        nodes = [node["metadata"]["name"] for node in held]
        found: Found = [("DedicatedNodes", "taints", checks.taints(name, uid_of(tenant), held, at))]

        async def neighbours() -> Finding:
            around = [await listed(client, POD, fieldSelector=f"spec.nodeName={node}") for node in nodes]
            own = await listed(client, POD, space)
            every = {
                (p["metadata"]["namespace"], p["metadata"]["name"]): p
                for part in [*around, own]
                for p in part
            }
            return checks.neighbours(space, nodes, every.values(), config.privileged_namespaces, at)

        async def quota() -> Finding:
            live = await read(client, RESOURCE_QUOTA, Key(space, "tenantry"))
            return checks.quota(live, config.quota.hard, at)

        async def policies() -> Finding:
            wanted = networks.policies(world, tenant, spec)
            return checks.policies(wanted, await listed(client, NETWORK_POLICY, space), at)

        async def refusal() -> Finding:
            live = await read(client, NAMESPACE, Key("", space))
            status, message = await self._dry_run(client, probe.privileged(name), space)
            return checks.hardening(live, status, message, at)

        found.append(("DedicatedNodes", "neighbours", await _guarded(neighbours(), at)))
        found.append(("QuotaEnforced", "quota", await _guarded(quota(), at)))
        found.append(("PodHardening", "refusal", await _guarded(refusal(), at)))
        intact = await _guarded(policies(), at)
        found += [(guarantee, "policies", intact) for guarantee in ("NetworkIsolation", "NoEgress")]
        for guarantee in ("DedicatedNodes", "NetworkIsolation", "NoEgress", "PodHardening", "QuotaEnforced"):
            found.append((guarantee, "admission", await _guarded(self._admitted(client, guarantee, at), at)))
        return found

    async def held(self, tenant: str, client: Client) -> list[Obj]:
        """The tenant's nodes, live."""
        return await listed(client, NODE, labelSelector=f"{names.NODE_TENANT_LABEL}={tenant}")

    def urls(self, pool: Pool) -> dict[str, str]:
        """Where each ready replica of the pool is asked."""
        world = self.world
        ready = [replica for replica in world.replicas(pool) if world.is_ready(pool, replica)]
        found = {
            replica: pods.address(pod) for replica in ready if (pod := world.pod(pool, replica)) is not None
        }
        return {replica: world.peer(pool, replica, ip).url for replica, ip in found.items() if ip}

    async def replicas(self, pool: Pool) -> dict[str, ReplicaReport | None]:
        """What each ready replica of the pool says of itself; None when it did not answer."""
        world, gate = self.world, asyncio.Semaphore(AT_ONCE)

        async def ask(replica: str) -> ReplicaReport | None:
            pod = world.pod(pool, replica)
            ip = pods.address(pod) if pod is not None else None
            if ip is None or world.driver is None:
                return None
            async with gate:
                try:
                    return await world.driver.observe(world.peer(pool, replica, ip))
                except EngineError:
                    return None

        ready = [replica for replica in world.replicas(pool) if world.is_ready(pool, replica)]
        return dict(zip(ready, await asyncio.gather(*map(ask, ready)), strict=True))

    async def _admitted(self, client: Client, guarantee: str, at: float) -> Finding:
        wanted = self.world.config.admission.get(guarantee, [])
        known = self._admission
        if known is None or self.world.clock() - known[0] > ADMISSION_SECONDS:
            every = sorted({name for group in self.world.config.admission.values() for name in group})
            policies = {
                name: (
                    await read(client, POLICY, Key("", name)),
                    await read(client, BINDING, Key("", name)),
                )
                for name in every
            }
            known = self._admission = (self.world.clock(), policies)
        return checks.admission(wanted, known[1], at)

    async def _dry_run(self, client: Client, pod: Obj, namespace: str) -> tuple[int, str]:
        try:
            await client.transport.request("POST", POD.path(namespace), query={"dryRun": "All"}, body=pod)
        except ApiError as error:
            return error.status, error.message
        return 201, ""


async def _guarded(look: Any, at: float) -> Finding:
    """A look that the API server refuses or does not answer proves nothing, and stops no other."""
    try:
        finding: Finding = await look
    except ApiError as error:
        return blind(f"the API server did not show it ({error.status} {error.reason})", at)
    except (ValueError, KeyError) as error:
        return blind(f"what the API server showed cannot be read ({type(error).__name__})", at)
    return finding


def separation(report: ReplicaReport | None) -> Separation | None:
    """A replica's own counts; None when it tells none."""
    told = report.separation if report is not None else None
    if told is None:
        return None
    return Separation(
        frozenset(told.tenants),
        told.tenant_count,
        told.prompt_tokens,
        told.cached_tokens,
        told.crossed_tokens,
    )


def tables(reports: Mapping[str, ReplicaReport | None]) -> dict[str, dict[str, str] | None]:
    """The verified part of each replica's page table."""
    return {
        name: {a.name: a.digest for a in report.adapters if a.state.verified} if report is not None else None
        for name, report in reports.items()
    }


def engines(uid: str, reports: Mapping[str, ReplicaReport | None], at: float) -> Found:
    """What the replicas of a dedicated tenant say of separation and of whom they know."""
    counts = {name: separation(report) for name, report in reports.items()}
    holders = {
        name: frozenset(adapter.tenant for adapter in report.adapters if adapter.tenant)
        for name, report in reports.items()
        if report is not None
    }
    return [
        ("PromptSeparation", "counters", checks.separation(counts, at)),
        ("DedicatedProcess", "engines", checks.process(uid, counts, holders, at)),
    ]
