"""Placing one tenant of a shared tier: a pool for each model, replicas in each lane of it, and why there.

The operator and `tenantry plan` call this very function; they differ only in what they can see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tenantry.api import TenantSpec
from tenantry.api.pool import LaneName
from tenantry.api.tenant import TenantModel
from tenantry.desired.route import lanes_for

from .load import Limits, Load, Wish
from .pools import Candidate, PoolWish, choose
from .reasons import why_here
from .replicas import Assignment, Replica, place
from .stored import Placed, Placement


class View(Protocol):
    """What is known of pools and of the tenants on them."""

    def candidates(self, tenant: str) -> Sequence[Candidate]:
        """Every pool; the tenant itself is not counted."""
        ...

    def lane(self, pool: str, lane: LaneName, held: Sequence[str]) -> Sequence[Replica]:
        """The replicas of a lane on which a tenant that is on `held` may be."""
        ...

    def loads(self, pool: str, lane: LaneName, tenant: str) -> Mapping[str, Load]:
        """What all other tenants put on each replica of a lane."""
        ...

    def pinned_pages(self, pool: str, tenant: str) -> int:
        """Pages that pinned adapters of the tenant hold on one of its replicas, as far as replicas told."""
        ...


@dataclass(frozen=True)
class Placing:
    """The placement, and for each model without a place the reason. `too_large` says whose replicas are too small."""

    placement: Placement
    objections: Mapping[str, str] = field(default_factory=dict)
    too_large: str = ""


def place_tenant(view: View, name: str, spec: TenantSpec, weight: int, previous: Placement) -> Placing:
    """Where the tenant belongs now, given where it is."""
    offered = {candidate.name: candidate for candidate in view.candidates(name)}
    held = sorted(pool for pool, placed in previous.pools.items() if placed.lanes)
    models: dict[str, str] = {}
    objections: dict[str, str] = {}
    why: dict[str, str] = {}
    for model in spec.models:
        need = PoolWish(spec.tier, model.base_model, model.adapter_ref is not None, model.pool_ref)
        before = previous.models.get(model.name)
        before = before if before in held else next(iter(held), None)
        choice = choose(need, list(offered.values()), before)
        if choice.pool is None:
            objections[model.name] = choice.reason
        else:
            models[model.name] = choice.pool
            why.setdefault(choice.pool, choice.reason)
    placed: dict[str, Placed] = {}
    too_large = ""
    for pool, reason in sorted(why.items()):
        adapters = {_ref(model) for model in spec.models if models.get(model.name) == pool} - {None}
        pages = view.pinned_pages(pool, name) if adapters else 0
        count = offered[pool].spec.placement.replicas_per_tenant
        wish = Wish(name, weight, count, len(adapters), pages)
        lanes = _lanes(view, offered[pool], spec, wish, previous.pools.get(pool))
        placed[pool] = _placed(wish, lanes, reason, previous.pools.get(pool))
        too_large = too_large or next(
            (f"pool `{pool}`: {a.reason}" for a in lanes.values() if a.too_large), ""
        )
    for alias, pool in models.items():
        if not placed[pool].lanes:
            objections[alias] = f"pool `{pool}`: {placed[pool].reason}"
    return Placing(Placement(models, placed), objections, too_large)


def _lanes(
    view: View, pool: Candidate, spec: TenantSpec, wish: Wish, before: Placed | None
) -> dict[LaneName, Assignment]:
    """What each lane that the tenant uses gives it."""
    rules = pool.spec
    registered = rules.lora.max_registered if rules.lora is not None else 0
    limits = Limits(_most_tenants(pool, before), registered)
    found = {}
    for lane in lanes_for(spec.lane, rules):
        held = before.lanes.get(lane, ()) if before is not None else ()
        loads = view.loads(pool.name, lane, wish.tenant)
        found[lane] = place(wish, view.lane(pool.name, lane, held), loads, held, limits)
    return found


def _most_tenants(pool: Candidate, before: Placed | None) -> int:
    """Headroom is for tenants whose replica is lost or leaves, not for newcomers."""
    rules = pool.spec.placement
    held = before is not None and bool(before.lanes)
    return max(1, rules.max_tenants_per_replica * (100 if held else 100 - rules.headroom_percent) // 100)


def _placed(
    wish: Wish, lanes: Mapping[LaneName, Assignment], pool_reason: str, before: Placed | None
) -> Placed:
    """Says why the tenant came there, not that it stayed: as long as nothing moves, nothing is to be written anew."""
    seats = {lane: assignment.replicas for lane, assignment in lanes.items() if assignment.replicas}
    reason = why_here(pool_reason, {lane.value: assignment.reason for lane, assignment in lanes.items()})
    if before is not None and seats and (before.lanes, before.weight) == (seats, wish.weight):
        reason = before.reason or reason
    return Placed(wish.weight, seats, reason, wish.adapters, wish.pages)


def _ref(model: TenantModel) -> tuple[str, str] | None:
    ref = model.adapter_ref
    return None if ref is None else (ref.namespace, ref.name)
