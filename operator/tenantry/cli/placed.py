"""Where `tenantry plan` sees the tenants of shared tiers, and why there, by the operator's own rules.

Offline, pools have their least number of replicas and nobody is on them but the tenants of the file. With a cluster,
pools are as large as they are there, everybody who is placed counts, and a tenant that is placed is told as placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tenantry.api import TenantSpec, names
from tenantry.api.pool import AdapterPoolSpec, LaneName
from tenantry.placement.load import Load, load_of
from tenantry.placement.pools import Candidate
from tenantry.placement.replicas import Replica
from tenantry.placement.stored import NOWHERE, Placement, from_status
from tenantry.placement.tenants import place_tenant

if TYPE_CHECKING:
    from .cluster import Cluster

Obj = dict[str, Any]


@dataclass
class Fleet:
    """Pools as placement sees them (its `View`). What is explained counts for those that come after it."""

    pools: Mapping[str, AdapterPoolSpec]
    sizes: Mapping[str, Mapping[LaneName, int]]
    dedicated: frozenset[str] = frozenset()
    placed: dict[str, Placement] = field(default_factory=dict)

    @classmethod
    def offline(cls, pools: Mapping[str, AdapterPoolSpec]) -> Fleet:
        """The pools of a file."""
        return cls(pools, {name: _least(spec) for name, spec in pools.items()})

    @classmethod
    def live(cls, pools: Mapping[str, AdapterPoolSpec], cluster: Cluster) -> Fleet:
        """What the cluster holds, with the pools of a file in the place of those of the same name. Raises CliError."""
        specs: dict[str, AdapterPoolSpec] = {}
        sizes: dict[str, Mapping[LaneName, int]] = {}
        dedicated = set()
        for obj in cluster.all("adapterpools"):
            name = str(obj["metadata"]["name"])
            try:
                specs[name] = AdapterPoolSpec.model_validate(obj.get("spec"))
            except ValidationError:
                continue  # the operator places nobody on what it cannot read
            sizes[name] = _present(obj) or _least(specs[name])
            if any(owner.get("kind") == "Tenant" for owner in obj["metadata"].get("ownerReferences") or []):
                dedicated.add(name)
        for name, spec in pools.items():
            specs[name] = spec
            sizes.setdefault(name, _least(spec))
        placed = {
            str(obj["metadata"]["name"]): found
            for obj in cluster.all("tenants")
            if (found := from_status(obj)).pools
        }
        return cls(specs, sizes, frozenset(dedicated), placed)

    def explain(self, name: str, spec: TenantSpec, weight: int) -> list[str]:
        """Sentences: the pool of each model, then the replicas in each pool and why these."""
        before = self.placed.get(name, NOWHERE)
        found = place_tenant(self, name, spec, weight, before)
        # What is placed stays, whatever this sees less of the replicas than the operator does.
        pools = {pool: before.pools.get(pool, placed) for pool, placed in found.placement.pools.items()}
        self.placed[name] = Placement(found.placement.models, pools)
        notes = []
        for model in spec.models:
            if problem := found.objections.get(model.name):
                notes.append(f"Tenant {name}: model {model.name} has no place: {problem}")
            else:
                notes.append(
                    f"Tenant {name}: model {model.name} on pool {found.placement.models[model.name]}"
                )
        for pool, placed in sorted(pools.items()):
            if placed.lanes:
                verb = "runs on" if pool in before.pools else "would run on"
                notes.append(f"Tenant {name}: {verb} {', '.join(placed.replicas)} ({placed.reason})")
        left = sorted(set(before.pools) - set(pools))
        if left and pools:
            notes.append(
                f"Tenant {name}: would leave pool {', '.join(left)} once the new place serves all of it"
            )
        if found.too_large and not found.objections:
            notes.append(f"Tenant {name}: Stalled/TooLarge, {found.too_large}")
        return notes

    # the view

    def candidates(self, tenant: str) -> Sequence[Candidate]:
        return [
            Candidate(
                name=name,
                spec=spec,
                lanes=tuple(self.sizes[name].get(lane.name, 0) for lane in spec.lanes),
                tenants=sum(name in found.pools for other, found in self.placed.items() if other != tenant),
                dedicated=name in self.dedicated,
            )
            for name, spec in sorted(self.pools.items())
        ]

    def lane(self, pool: str, lane: LaneName, held: Sequence[str]) -> Sequence[Replica]:
        return [Replica(names.replica_pod(pool, lane, i)) for i in range(self.sizes[pool].get(lane, 0))]

    def loads(self, pool: str, lane: LaneName, tenant: str) -> Mapping[str, Load]:
        return load_of(
            (there.load, there.lanes.get(lane, ()))
            for other, placement in self.placed.items()
            if other != tenant and (there := placement.pools.get(pool)) is not None
        )

    def pinned_pages(self, pool: str, tenant: str) -> int:
        return 0


def _least(spec: AdapterPoolSpec) -> dict[LaneName, int]:
    return {lane.name: lane.replicas.min for lane in spec.lanes}


def _present(pool: Obj) -> dict[LaneName, int]:
    """The replicas of each lane by the pool's status; empty when nobody looked yet."""
    lanes = (pool.get("status") or {}).get("lanes") or []
    return {LaneName(lane["name"]): int(lane.get("replicas", 0)) for lane in lanes}
