"""One round of probes for a dedicated tenant: a short-lived pod on each of its nodes, and what they tell.

A round is level-triggered: `advance` does what can be done now and says when to come back. Pods are named after the
round, owned by the Tenant, and deleted as soon as their last words are read.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tenantry.api import names
from tenantry.cluster import POD, AlreadyExists, ApiError, Client, Key, Obj, key_of, uid_of
from tenantry.cluster.objects import owner_reference
from tenantry.evidence import probe
from tenantry.evidence.network import Inside, Target, parse

from .reading import read
from .world import World

AT_ONCE = 4
LATE_SECONDS = probe.DEADLINE_SECONDS + 60.0
"""A pod that has not ended by then never will: its image cannot be pulled, or its node is gone."""


@dataclass
class Round:
    """Which nodes are probed, and what is known of each."""

    nodes: tuple[str, ...]
    targets: tuple[Target, ...]
    image: str
    runtime_class: str | None
    began: float
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    made: dict[str, str] = field(default_factory=dict)  # node -> uid of its pod
    knocked: dict[str, Mapping[int, str]] = field(default_factory=dict)
    told: dict[str, Inside] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return len(self.told) == len(self.nodes)

    def name(self, node: str) -> str:
        return probe.name(self.id, self.nodes.index(node))


class Prober:
    """Carries rounds on. Needs no memory of its own."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def advance(self, tenant: Obj, going: Round, client: Client) -> None:
        """Make pods, visit those that run, read those that ended. Raises ApiError of reads."""
        name = tenant["metadata"]["name"]
        open_ = [node for node in going.nodes if node not in going.told]
        running = [node for node in open_ if node in going.made]
        for node in open_:
            if node not in going.made and len(running) < AT_ONCE:
                await self._make(tenant, going, node, client)
                running.append(node)
        await asyncio.gather(
            *(self._visit(name, going, node, client) for node in running if node in going.made)
        )

    async def _make(self, tenant: Obj, going: Round, node: str, client: Client) -> None:
        wanted = probe.pod(
            tenant["metadata"]["name"],
            going.name(node),
            node,
            image=going.image,
            pull_policy=self.world.config.image_pull_policy,
            runtime_class=going.runtime_class,
            targets=going.targets,
        )
        wanted["metadata"]["ownerReferences"] = [owner_reference(tenant)]
        try:
            made = await client.create(wanted)
        except AlreadyExists:
            going.told[node] = Inside(node, fault="a pod of its name is there already")
        except ApiError as error:
            going.told[node] = Inside(node, fault=f"its pod was refused ({error.status} {error.reason})")
        else:
            going.made[node] = uid_of(made)

    async def _visit(self, tenant: str, going: Round, node: str, client: Client) -> None:
        key = Key(names.tenant_namespace(tenant), going.name(node))
        pod = await read(client, POD, key)
        if pod is None or uid_of(pod) != going.made[node]:
            going.told[node] = Inside(node, fault="its pod was deleted by somebody")
            return
        status = pod.get("status") or {}
        phase, ip = status.get("phase"), status.get("podIP")
        if phase in ("Succeeded", "Failed"):
            words = _last_words(pod)
            going.told[node] = (
                parse(node, words, going.knocked.get(node, {}))
                if words
                else Inside(node, fault=f"it ended without a word ({status.get('reason') or phase})")
            )
        elif phase == "Running" and ip:
            if node not in going.knocked:
                going.knocked[node] = await self.world.knock(str(ip), probe.PORTS)
            if self.world.clock() - going.began < LATE_SECONDS:
                return
        if node not in going.told and self.world.clock() - going.began >= LATE_SECONDS:
            going.told[node] = Inside(node, fault=f"its pod did not run ({_why(pod)})")
        if node in going.told:
            await client.delete(POD, key, uid=going.made[node])

    async def sweep(self, tenant: str, client: Client) -> None:
        """Delete the probes of an operator that ended in between."""
        for pod in left_over(self.world, tenant):
            await client.delete(POD, key_of(pod), uid=uid_of(pod))


def left_over(world: World, tenant: str) -> list[Obj]:
    """Probes' pods in the tenant's namespace."""
    found = world.store.list(POD, names.tenant_namespace(tenant))
    return [
        p
        for p in found
        if p["metadata"].get("labels", {}).get(names.COMPONENT_LABEL) == probe.PROBE_COMPONENT
    ]


def _last_words(pod: Obj) -> str:
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("message"):
            return str(ended["message"])
    return ""


def _why(pod: Obj) -> str:
    """Kubernetes' own word for what holds a pod up; never its message, which may name images or nodes of others."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason"):
            return str(waiting["reason"])
    unmet: Sequence[Obj] = [c for c in status.get("conditions") or [] if c.get("status") == "False"]
    return next((str(c["reason"]) for c in unmet if c.get("reason")), str(status.get("phase", "unknown")))
