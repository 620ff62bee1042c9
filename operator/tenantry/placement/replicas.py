"""Bounded-load rendezvous hashing of tenants onto the replicas of a lane.

Every tenant ranks the replicas by a hash of (tenant, replica) and takes the first `count` of them (Thaler and
Ravishankar, 1998). No replica takes more than `BOUND` times the mean load while another has room (Mirrokni, Thorup,
Zadimoghaddam, 2018). What a tenant has, it keeps: it moves only when its replica is gone, overloaded, or when a
replica of its own ranking stands clearly emptier, so that a joining replica draws its fair share and nothing flaps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

BOUND: Final = 1.25
PULL: Final = 0.8


@dataclass(frozen=True)
class Load:
    """What others put on a replica: the sum of their weights and their number."""

    weight: int = 0
    tenants: int = 0


@dataclass(frozen=True)
class Assignment:
    """`replicas` sorted by name; empty when nothing has room."""

    replicas: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Wish:
    """One tenant to place on a lane."""

    tenant: str
    weight: int
    count: int


@lru_cache(maxsize=1 << 16)
def _score(tenant: str, replica: str) -> int:
    key = f"{len(tenant)}:{tenant}{replica}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


def ranking(tenant: str, replicas: Sequence[str]) -> list[str]:
    """The replicas in the tenant's own order."""
    return sorted(replicas, key=lambda replica: (-_score(tenant, replica), replica))


def place(
    wish: Wish,
    replicas: Sequence[str],
    loads: Mapping[str, Load],
    previous: Sequence[str],
    max_tenants: int,
) -> Assignment:
    """Replicas for one tenant, given what all *other* tenants put on each replica."""
    others = {replica: loads.get(replica, Load()) for replica in replicas}
    order = [r for r in ranking(wish.tenant, replicas) if others[r].tenants < max_tenants]
    if not order:
        return Assignment((), _no_room(len(replicas), max_tenants))
    count = min(wish.count, len(order))
    total = sum(load.weight for load in others.values()) + wish.weight * count
    cap = max(BOUND * total / len(replicas), wish.weight)

    def fits(replica: str) -> bool:
        return others[replica].weight + wish.weight <= cap

    def emptiest(candidates: list[str]) -> str:
        return min(candidates, key=lambda replica: (others[replica].weight, order.index(replica)))

    kept = [r for r in order if r in previous][:count]
    for replica in [r for r in kept if not fits(r)]:
        free = [r for r in order if r not in kept and fits(r)]
        if free and others[free[0]].weight < others[replica].weight:
            kept[kept.index(replica)] = free[0]
    natural = order[:count]
    for replica in natural:
        strangers = [r for r in kept if r not in natural]
        if replica in kept or len(kept) < count or not strangers:
            continue
        worst = max(strangers, key=lambda r: (others[r].weight, order.index(r)))
        if others[replica].weight + wish.weight <= PULL * (others[worst].weight + wish.weight):
            kept[kept.index(worst)] = replica
    while len(kept) < count:
        left = [r for r in order if r not in kept]
        kept.append(next((r for r in left if fits(r)), None) or emptiest(left))
    return Assignment(tuple(sorted(kept)), _reason(kept, previous, natural, wish.count, len(replicas)))


def place_all(
    wishes: Sequence[Wish],
    replicas: Sequence[str],
    previous: Mapping[str, Sequence[str]],
    max_tenants: int,
) -> dict[str, Assignment]:
    """Every tenant in turn, by name: what the controllers do one key at a time."""
    current: dict[str, tuple[str, ...]] = {
        wish.tenant: tuple(r for r in previous.get(wish.tenant, ()) if r in replicas) for wish in wishes
    }
    result = {}
    for wish in sorted(wishes, key=lambda wish: wish.tenant):
        loads = load_of(
            {other.tenant: (other.weight, current[other.tenant]) for other in wishes}, wish.tenant
        )
        result[wish.tenant] = place(wish, replicas, loads, current[wish.tenant], max_tenants)
        current[wish.tenant] = result[wish.tenant].replicas
    return result


def load_of(placed: Mapping[str, tuple[int, Sequence[str]]], without: str | None = None) -> dict[str, Load]:
    """Load per replica of (weight, replicas) per tenant, one of them left out."""
    loads: dict[str, Load] = {}
    for tenant, (weight, replicas) in placed.items():
        if tenant == without:
            continue
        for replica in replicas:
            before = loads.get(replica, Load())
            loads[replica] = Load(before.weight + weight, before.tenants + 1)
    return loads


def _no_room(replicas: int, max_tenants: int) -> str:
    if replicas == 0:
        return "the pool has no replicas"
    return f"each of the pool's {replicas} replicas has {max_tenants} tenants already: add replicas"


def _reason(
    chosen: Sequence[str], previous: Sequence[str], natural: Sequence[str], wanted: int, replicas: int
) -> str:
    text = f"{len(chosen)} of {replicas} replicas"
    if len(chosen) < wanted:
        text += f" ({wanted} wanted)"
    if previous and set(chosen) == set(previous):
        return f"{text}, kept"
    if set(chosen) == set(natural):
        return f"{text}, by hash"
    return f"{text}, by hash and load"
