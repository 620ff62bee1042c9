"""Which pool serves a model of a tenant in a shared tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenantry.api.common import Tier
from tenantry.api.pool import AdapterPoolSpec


@dataclass(frozen=True)
class Candidate:
    """A pool as placement sees it. `tenants` counts the others that are placed there.

    `lanes`: replicas of each lane.
    """

    name: str
    spec: AdapterPoolSpec
    lanes: tuple[int, ...]
    tenants: int = 0
    dedicated: bool = False
    deleting: bool = False

    @property
    def crowd(self) -> float:
        """Tenants per replica."""
        replicas = sum(self.lanes)
        return self.tenants / replicas if replicas else float("inf")

    @property
    def has_room(self) -> bool:
        """Whether every lane has a seat left for one tenant more, by the number of tenants alone."""
        rules = self.spec.placement
        return all(
            (self.tenants + 1) * min(rules.replicas_per_tenant, replicas)
            <= replicas * rules.max_tenants_per_replica
            for replicas in self.lanes
        ) and any(self.lanes)


@dataclass(frozen=True)
class PoolWish:
    """What a model needs."""

    tier: Tier
    base_model: str
    adapter: bool
    pool_ref: str | None = None


@dataclass(frozen=True)
class Choice:
    """The pool, or None with the reason why none fits."""

    pool: str | None
    reason: str


def choose(wish: PoolWish, candidates: Sequence[Candidate], previous: str | None) -> Choice:
    """The pool that the tenant has already, if it still fits; else the one with the fewest tenants per replica."""
    verdicts = {pool.name: _objection(wish, pool) for pool in candidates if _named(wish, pool)}
    fitting = [pool for pool in candidates if pool.name in verdicts and verdicts[pool.name] is None]
    if not fitting:
        return Choice(None, _why_none(wish, verdicts))
    if wish.pool_ref is not None:
        return Choice(wish.pool_ref, "named by `poolRef`")
    kept = next((pool for pool in fitting if pool.name == previous), None)
    if kept is not None:
        return Choice(kept.name, "the pool that it has")
    best = min(fitting, key=lambda pool: (not pool.has_room, pool.crowd, pool.name))
    if len(fitting) == 1:
        return Choice(best.name, "the only pool that fits")
    return Choice(best.name, f"the emptiest of {len(fitting)} pools that fit")


def _named(wish: PoolWish, pool: Candidate) -> bool:
    return wish.pool_ref is None or wish.pool_ref == pool.name


def _objection(wish: PoolWish, pool: Candidate) -> str | None:
    if pool.dedicated:
        return "is dedicated to another tenant"
    if pool.deleting:
        return "is being deleted"
    if wish.tier not in pool.spec.tiers:
        admitted = ", ".join(tier.value for tier in pool.spec.tiers)
        return f"admits {admitted} only"
    if wish.base_model != pool.spec.base_model.name:
        return f"serves `{pool.spec.base_model.name}`"
    if wish.adapter and pool.spec.lora is None:
        return "has no `lora`, so it serves no adapters"
    return None


def _why_none(wish: PoolWish, verdicts: dict[str, str | None]) -> str:
    need = f"tier {wish.tier.value} with base model `{wish.base_model}`" + (
        " and adapters" if wish.adapter else ""
    )
    if not verdicts and wish.pool_ref is not None:
        return f"AdapterPool `{wish.pool_ref}` (`poolRef`) must exist: create it or remove `poolRef`"
    shared = {name: text for name, text in verdicts.items() if text and not text.startswith("is dedicated")}
    listed = [f"`{name}` {text}" for name, text in sorted(shared.items())]
    if wish.pool_ref is not None and not listed:
        return f"AdapterPool `{wish.pool_ref}` (`poolRef`) is dedicated to another tenant: name a shared one"
    tail = f": {'; '.join(listed[:5])}" if listed else ": there is none yet"
    return f"no AdapterPool serves {need}{tail}"
