"""Choosing a pool, and saying why there is none."""

from __future__ import annotations

from typing import Any

from tenantry.api import AdapterPoolSpec, Tier
from tenantry.placement.pools import Candidate, PoolWish, choose


def pool(name: str, *tiers: str, model: str = "tiny", lora: bool = True, **changes: Any) -> Candidate:
    wire: dict[str, Any] = {
        "baseModel": {"name": model, "source": {"image": {"path": "/m"}}},
        "tiers": list(tiers),
        "lanes": [{"name": "fast"}],
    }
    if lora:
        wire["lora"] = {}
    return Candidate(name, AdapterPoolSpec.model_validate(wire), **{"lanes": (2,), **changes})


def wish(tier: Tier = Tier.FREE, adapter: bool = False, pool_ref: str | None = None) -> PoolWish:
    return PoolWish(tier, "tiny", adapter, pool_ref)


def test_the_emptiest_fitting_pool_and_then_it_is_kept() -> None:
    offered = [pool("a", "Free", tenants=9), pool("b", "Free", tenants=3), pool("c", "Smb")]
    assert choose(wish(), offered, None).pool == "b"
    kept = choose(wish(), offered, "a")
    assert (kept.pool, kept.reason) == ("a", "the pool that it has")


def test_every_pool_that_does_not_fit_is_explained() -> None:
    offered = [
        pool("a", "Smb", "MidMarket"),
        pool("b", "Free", model="huge"),
        pool("c", "Free", lora=False),
        pool("d", "Free", deleting=True),
        pool("tenant-oak", "Enterprise", dedicated=True),
    ]
    reason = choose(wish(adapter=True), offered, "d").reason
    assert reason.startswith("no AdapterPool serves tier Free with base model `tiny` and adapters: ")
    assert "`a` admits Smb, MidMarket only" in reason
    assert "`b` serves `huge`" in reason
    assert "`c` has no `lora`, so it serves no adapters" in reason
    assert "`d` is being deleted" in reason
    assert "oak" not in reason, "the name of another tenant is nobody's business"


def test_pool_ref_narrows_and_must_exist() -> None:
    offered = [pool("a", "Free", tenants=9), pool("b", "Free")]
    assert choose(wish(pool_ref="a"), offered, "b").pool == "a"
    assert "`x` (`poolRef`) must exist" in choose(wish(pool_ref="x"), offered, "b").reason


def test_another_tenants_pool_cannot_be_named() -> None:
    theirs = pool("tenant-oak", "Free", "Enterprise", dedicated=True)
    choice = choose(wish(pool_ref="tenant-oak"), [theirs], "tenant-oak")
    assert choice.pool is None
    assert "dedicated to another tenant" in choice.reason


def test_no_pools_at_all() -> None:
    assert choose(wish(), [], None).reason.endswith("there is none yet")


def test_a_pool_with_room_before_an_emptier_one_that_is_full() -> None:
    full = pool("a", "Free", tenants=1000, lanes=(1, 3))
    assert full.has_room is False, "one lane has its 1000 tenants"
    assert pool("c", "Free", tenants=1500, lanes=(3,)).has_room is False, "each tenant takes two seats"
    roomy = pool("c", "Free", tenants=1490, lanes=(3,))
    assert roomy.has_room
    assert full.crowd < roomy.crowd
    assert choose(wish(), [full, roomy], None).pool == "c"
    assert choose(wish(), [pool("a", "Free", lanes=(0,)), pool("b", "Free", tenants=5)], None).pool == "b"
