"""What placement is told of replicas: zone and readiness from pods and nodes, pages from what replicas report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from tenantry.api.pool import LaneName
from tenantry.cluster import NODE, Key, Obj
from tenantry.engines import ReplicaReport
from tenantry.placement.replicas import Replica
from tenantry.placement.standing import PATIENCE_SECONDS

from . import pods
from .world import Pool, World

ZONE_LABEL: Final = "topology.kubernetes.io/zone"

PIN_SHARE: Final = 2
"""One page of so many may be pinned: an engine keeps at least half for sequences and for adapters that come and go."""


def of_lane(world: World, pool: Pool, lane: LaneName, held: Sequence[str]) -> list[Replica]:
    """Every replica of the lane on which a tenant that is on `held` may be."""
    world.placements.lane(pool.name, lane, world.lane_replicas(pool, lane))
    return [_replica(world, pool, name) for name in world.placeable(pool, lane, held)]


def look_again_in(world: World, pool: Pool, seats: Mapping[LaneName, Collection[str]]) -> float | None:
    """Seconds until time alone would change where a tenant with those seats belongs; None: it would not."""
    now, standings = world.clock(), world.placements.standings
    waits = []
    for lane, seated in seats.items():
        for name in world.lane_replicas(pool, lane):
            replica = Key(pool.name, name)
            left = standings.changes_in(replica, now, seated=name in seated)
            if left is not None:
                waits.append(left)
            elif name in seated and standings.is_lost(replica, now):
                waits.append(PATIENCE_SECONDS)  # nothing took the tenant: ask again
    return min(waits) if waits else None


def pinned_pages(world: World, pool: Pool, replicas: Iterable[str], tenant: str) -> int:
    """Pages that pinned adapters of the tenant (a uid) hold on the replica where they hold most."""
    return max((_pins(world, pool, replica).get(tenant, 0) for replica in replicas), default=0)


def _pins(world: World, pool: Pool, replica: str) -> Mapping[str, int]:
    """Pinned pages by tenant; counted once for each report."""
    report = _report(world, pool, replica, world.pod(pool, replica))
    if report is None:
        return {}
    known = world.placements.pins.get(Key(pool.name, replica))
    if known is None or known[0] is not report:
        counted: dict[str, int] = {}
        for entry in report.adapters:
            if entry.pinned:
                counted[entry.tenant] = counted.get(entry.tenant, 0) + entry.pages
        known = world.placements.pins[Key(pool.name, replica)] = (report, counted)
    return known[1]


def _replica(world: World, pool: Pool, name: str) -> Replica:
    pod = world.pod(pool, name)
    ready = pod is not None and pods.is_ready(pod)
    report = _report(world, pool, name, pod)
    total = report.capacity.pages.total if report is not None else 0
    return Replica(
        name=name,
        zone=_zone(world, pod),
        standing=world.placements.standings.see(Key(pool.name, name), ready, world.clock()),
        pages=total // PIN_SHARE if total else None,
    )


def _report(world: World, pool: Pool, name: str, pod: Obj | None) -> ReplicaReport | None:
    seen = world.observations.get(Key(pool.name, name), pods.incarnation(pod)) if pod is not None else None
    return seen.report if seen is not None else None


def _zone(world: World, pod: Obj | None) -> str:
    """Empty until the pod has a node, and where nodes name no zones."""
    node = ((pod or {}).get("spec") or {}).get("nodeName")
    found = world.store.get(NODE, Key("", node)) if node else None
    labels = (found or {"metadata": {}})["metadata"].get("labels") or {}
    return str(labels.get(ZONE_LABEL, ""))
