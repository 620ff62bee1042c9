"""Where a Tenant is placed, as its status tells it: what the operator starts from and what `tenantry plan` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tenantry.api import names
from tenantry.api.pool import LaneName

from .load import Load

Obj = dict[str, Any]


@dataclass(frozen=True)
class Placed:
    """A tenant's place in one pool. `adapters` are registered, `pages` pinned, on each of its replicas there."""

    weight: int
    lanes: Mapping[LaneName, tuple[str, ...]]
    reason: str = ""
    adapters: int = 0
    pages: int = 0

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(sorted({replica for lane in self.lanes.values() for replica in lane}))

    @property
    def load(self) -> Load:
        """On each of its replicas."""
        return Load(self.weight, 1, self.adapters, self.pages)


@dataclass(frozen=True)
class Placement:
    """`models` maps aliases to pools."""

    models: Mapping[str, str] = field(default_factory=dict)
    pools: Mapping[str, Placed] = field(default_factory=dict)


NOWHERE = Placement()


def from_status(tenant: Obj) -> Placement:
    """Replicas carry their lane in their name. What is pinned is not in a status: replicas will tell."""
    status = tenant.get("status") or {}
    route = status.get("route") or {}
    weight = int(route.get("weight", 1))
    models = {model["name"]: model["pool"] for model in route.get("models") or []}
    pools = {}
    for entry in status.get("placement") or []:
        pool, replicas = entry["pool"], entry.get("replicas") or []
        lanes = {
            lane: tuple(r for r in replicas if r.startswith(f"{names.lane_workload(pool, lane)}-"))
            for lane in LaneName
        }
        pools[pool] = Placed(
            weight,
            {lane: found for lane, found in lanes.items() if found},
            entry.get("reason", ""),
            _adapters(tenant, pool, models),
        )
    return Placement(models, pools)


def _adapters(tenant: Obj, pool: str, routed: Mapping[str, str]) -> int:
    """Adapters that the spec asks for there; an alias that no route places yet may become any pool's."""
    models = [model for model in (tenant.get("spec") or {}).get("models") or [] if isinstance(model, dict)]
    refs = [model.get("adapterRef") for model in models if routed.get(str(model.get("name")), pool) == pool]
    return len({(ref.get("namespace"), ref.get("name")) for ref in refs if isinstance(ref, dict)})
