"""What a replica must hold, from objects alone: no cluster, no replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from tenantry.api import OperatorConfig
from tenantry.api.common import Tier
from tenantry.api.config import TierPolicy
from tenantry.api.pool import LaneName
from tenantry.cluster import ADAPTER, ADAPTER_POOL, STATEFUL_SET, TENANT, Key, Obj, Resource
from tenantry.controllers import World, bindings
from tenantry.controllers import wanted as needs_of
from tenantry.controllers.replica import declaration, differs
from tenantry.controllers.wanted import Needs, Wanted
from tenantry.controllers.watches import Watches
from tenantry.engines import AdapterDeclaration, ReplicaReport, Transfer
from tenantry.engines import Fence as EngineFence
from tenantry.engines.base import AdapterReport, AdapterState, Capacity, ModelReport
from tenantry.engines.fetcher import AdapterFacts, ArtifactReport, ArtifactState
from tenantry.placement.stored import Placed, Placement
from tenantry.promotion.facts import Release
from tenantry.runtime.controller import Fence, Setup
from tenantry.runtime.store import Store

SPEC = {
    "tenantRef": "maple",
    "versions": [
        {
            "version": version,
            "digest": "sha256:" + letter * 64,
            "source": "oci://registry.example/x:1",
            "rank": 8,
        }
        for version, letter in (("1.0.0", "a"), ("2.0.0", "b"))
    ],
    "channels": [{"name": "stable", "version": "2.0.0"}],
}
OLD, NEW = "ml.tone--1.0.0-aaaaaaaaaaaa", "ml.tone--2.0.0-bbbbbbbbbbbb"


def obj(kind: str, name: str, spec: Obj, status: Obj | None = None, **meta: Any) -> Obj:
    metadata = {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "generation": 1, **meta}
    group = "apps/v1" if kind == "StatefulSet" else "tenantry.dev/v1alpha1"
    return {"apiVersion": group, "kind": kind, "metadata": metadata, "spec": spec, "status": status or {}}


@pytest.fixture
def world() -> World:
    """A LoRA pool of one replica; a tenant placed on it whose stored route still names the old version."""
    config = OperatorConfig.model_validate(
        {"engineImage": "e:1", "gatewayUrl": "http://g", "fetcherUrl": "http://f", "tiers": {}}
    )
    unused: Any = None
    store = Store()
    world = World(Setup(unused, store, config, unused, None, lambda *_, **__: None, lambda: Fence(1, 1)))
    pool = {
        "baseModel": {"name": "tiny", "source": {"image": {"path": "/m"}}},
        "tiers": ["MidMarket"],
        "lora": {"maxRank": 16},
        "lanes": [{"name": "fast"}],
    }
    store.put(ADAPTER_POOL, obj("AdapterPool", "lora", pool))
    owner = {"kind": "AdapterPool", "name": "lora", "uid": "uid-lora", "controller": True}
    where: Obj = {"namespace": "tenantry-system", "ownerReferences": [owner]}
    store.put(STATEFUL_SET, obj("StatefulSet", "lora-fast", {"replicas": 1}, **where))
    route = {
        "weight": 1,
        "pools": [{"name": "lora", "lanes": [{"name": "fast", "replicas": ["lora-fast-0"]}]}],
        "models": [
            {"name": "tone", "pool": "lora", "targets": [{"servedName": OLD, "digest": "sha256:" + "a" * 64}]}
        ],
    }
    ref = {"namespace": "ml", "name": "tone"}
    spec: Obj = {
        "tier": "MidMarket",
        "models": [{"name": "tone", "baseModel": "tiny", "adapterRef": ref}],
        "adapterNamespaces": ["ml"],
    }
    placement = [{"pool": "lora", "namespace": "tenantry-system", "replicas": ["lora-fast-0"]}]
    tenant = obj("Tenant", "maple", spec, {"placement": placement, "route": route})
    store.put(TENANT, tenant)
    Watches(world).tenant_to_replicas(None, tenant, store)
    store.put(ADAPTER, obj("Adapter", "tone", SPEC, promoted(), namespace="ml"))
    for call in world.setup.first:
        call()
    return world


def promoted() -> Obj:
    active = {"activeVersion": "2.0.0", "activeDigest": "sha256:" + "b" * 64, "activeRank": 8}
    return {"channels": [{"name": "stable", "desiredVersion": "2.0.0", **active}]}


_KEPT: WeakKeyDictionary[World, Needs] = WeakKeyDictionary()


def wanted(world: World) -> dict[str, Wanted]:
    """By one that remembers, which must say what one says that begins now."""
    pool = world.pool("lora")
    assert pool is not None
    found = _KEPT.setdefault(world, Needs(world)).on(pool, "lora-fast-0")
    assert found == Needs(world).on(pool, "lora-fast-0")
    return found


def change(world: World, resource: Resource, key: Key, **parts: Obj) -> None:
    """The object with other parts, as the next event shows it."""
    found = dict(world.store.get(resource, key) or {})
    metadata = found["metadata"]
    version = {"resourceVersion": str(int(metadata["resourceVersion"]) + 1)}
    if "spec" in parts:
        version["generation"] = metadata["generation"] + 1
    found |= parts
    found["metadata"] = {**metadata, **version}
    world.store.put(resource, found)


def test_what_a_stored_route_names_stays_even_when_promotion_is_over(world: World) -> None:
    assert set(wanted(world)) == {OLD, NEW}
    assert wanted(world)[OLD].adapter == bindings.adapter_of(OLD)


def test_a_spec_that_cannot_be_read_takes_nothing_away_that_is_served(world: World) -> None:
    tenant = dict(world.tenant("maple") or {})
    tenant["metadata"] = {**tenant["metadata"], "resourceVersion": "2", "generation": 2}
    tenant["spec"] = {"tier": "Gold"}
    world.store.put(TENANT, tenant)
    assert set(wanted(world)) == {OLD}


def test_a_tenant_that_is_being_deleted_needs_nothing(world: World) -> None:
    tenant = dict(world.tenant("maple") or {})
    tenant["metadata"] = {
        **tenant["metadata"],
        "resourceVersion": "2",
        "deletionTimestamp": "2026-01-01T00:00:00Z",
    }
    world.store.put(TENANT, tenant)
    assert wanted(world) == {}


@pytest.mark.parametrize("name", ["tiny", "ml.tone", "a--b", ""])
def test_names_that_are_no_adapters(name: str) -> None:
    assert bindings.adapter_of(name) is None


def test_a_version_that_takes_over_is_held_beside_the_one_it_follows(world: World) -> None:
    adapter = dict(world.store.get(ADAPTER, Key("ml", "tone")) or {})
    active = {"activeVersion": "1.0.0", "activeDigest": "sha256:" + "a" * 64, "activeRank": 8, "weight": 70}
    rollout = {
        "version": "2.0.0",
        "digest": "sha256:" + "b" * 64,
        "source": "oci://registry.example/x:1",
        "rank": 8,
        "revision": "0",
        "attempt": 1,
        "phase": "Shift",
        "weight": 30,
        "startedAt": "2026-01-01T00:00:00Z",
        "stepStartedAt": "2026-01-01T00:00:00Z",
    }
    adapter["status"] = {"channels": [{"name": "stable", **active}], "rollout": rollout}
    adapter["metadata"] = {**adapter["metadata"], "resourceVersion": "2"}
    world.store.put(ADAPTER, adapter)
    assert {name: entry.urgency for name, entry in wanted(world).items()} == {OLD: 0, NEW: 0}
    adapter["status"] = {"channels": [{"name": "stable", **active}]}
    adapter["metadata"] = {**adapter["metadata"], "resourceVersion": "3"}
    world.store.put(ADAPTER, adapter)
    assert wanted(world)[NEW].urgency == 1, "what has no traffic yet is cut first where a pool is full"


def midmarket(world: World, pins: int) -> None:
    """The tier, with as many pins."""
    limits = {
        "requestsPerMinute": 60, "tokensPerMinute": 1000, "maxInFlight": 4, "maxQueued": 4,
        "maxInputTokens": 100, "maxOutputTokens": 100,
    }  # fmt: skip
    policy = TierPolicy.model_validate({"defaults": limits, "ceilings": limits, "pinnedAdapters": pins})
    world.setup.config.tiers[Tier.MID_MARKET] = policy


@pytest.mark.parametrize(("pins", "held"), [(1, True), (0, False)])
def test_pins_are_those_of_the_spec_within_the_tier(world: World, pins: int, held: bool) -> None:
    midmarket(world, pins)
    model = {"name": "tone", "baseModel": "tiny", "adapterRef": {"namespace": "ml", "name": "tone"}}
    assert not wanted(world)[NEW].pinned
    set_spec(world, TENANT, Key("", "maple"), models=[{**model, "pinned": True}])
    assert wanted(world)[NEW].pinned is held
    assert not wanted(world)[OLD].pinned, "what only a route names goes soon"


def test_what_is_on_its_way_is_not_pinned_and_vllm_pins_nothing(world: World) -> None:
    pool = world.pool("lora")
    assert pool is not None
    entry = Wanted(NEW, "sha256:" + "b" * 64, "uid-maple", pinned=True)
    assert declaration(entry, pool).pinned
    assert not declaration(replace(entry, urgency=1), pool).pinned
    vllm = {"type": "VLLM", "image": "vllm:1", "poolBytes": 1 << 30}
    set_spec(world, ADAPTER_POOL, Key("", "lora"), engine=vllm)
    pool = world.pool("lora")
    assert pool is not None
    assert not declaration(entry, pool).pinned


def test_a_replica_is_told_of_a_pin_that_it_does_not_report() -> None:
    held = AdapterReport(NEW, "sha256:b", AdapterState.RESIDENT, tenant="uid")
    report = ReplicaReport(EngineFence(), True, False, ModelReport("tiny"), Capacity(16, 10, 4), (held,))
    told = AdapterDeclaration(NEW, "sha256:b", "uid", pinned=True)
    assert differs(report, {NEW: told})
    assert not differs(report, {NEW: replace(told, pinned=False)})


def set_spec(world: World, resource: Resource, key: Key, **fields: object) -> None:
    change(world, resource, key, spec={**(world.store.get(resource, key) or {})["spec"], **fields})


def forbid(world: World) -> None:
    set_spec(world, TENANT, Key("", "maple"), adapterNamespaces=["other"])


def lower_the_rank(world: World) -> None:
    set_spec(world, ADAPTER_POOL, Key("", "lora"), lora={"maxRank": 8})
    assert set(wanted(world)) == {OLD, NEW}
    set_spec(world, ADAPTER_POOL, Key("", "lora"), lora={"maxRank": 4})


def find_another_rank(world: World) -> None:
    pool = world.pool("lora")
    assert pool is not None
    adapter = world.store.get(ADAPTER, Key("ml", "tone")) or {}
    spec = world.adapter_spec(adapter)
    asked = bindings.pull(
        Key("ml", "tone"), spec, next(r for r in map(Release.of, spec.versions) if r.version == "2.0.0")
    )
    facts = AdapterFacts(32, "tiny", ("q_proj",))
    transfer = Transfer(asked.digest, ArtifactReport(ArtifactState.VERIFIED), facts)
    world.observations.put_artifact(asked, transfer)


def name_another_tenant(world: World) -> None:
    set_spec(world, ADAPTER, Key("ml", "tone"), tenantRef="oak")


def delete_the_adapter(world: World) -> None:
    world.store.drop(ADAPTER, Key("ml", "tone"))


def serve_the_model_from_another_pool(world: World) -> None:
    placed = Placed(1, {LaneName.FAST: ("lora-fast-0",)})
    world.placements.assume("maple", Placement({"tone": "other"}, {"lora": placed}))


def place_elsewhere(world: World) -> None:
    world.placements.assume(
        "maple", Placement({"tone": "lora"}, {"lora": Placed(1, {LaneName.FAST: ("lora-fast-1",)})})
    )


@pytest.mark.parametrize(
    "happen",
    [
        forbid,
        lower_the_rank,
        find_another_rank,
        name_another_tenant,
        delete_the_adapter,
        place_elsewhere,
        serve_the_model_from_another_pool,
    ],
)
def test_what_is_remembered_follows_whatever_it_depends_on(
    world: World, happen: Callable[[World], None]
) -> None:
    change(world, ADAPTER, Key("ml", "tone"), status={})
    assert set(wanted(world)) == {OLD, NEW}
    happen(world)
    assert set(wanted(world)) == {OLD}


def test_nothing_is_worked_out_twice_while_nothing_changes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(wanted(world)) == {OLD, NEW}

    def never(*_: object) -> None:
        raise AssertionError("worked out again")

    monkeypatch.setattr(needs_of, "_work_out", never)
    pool = world.pool("lora")
    assert pool is not None
    assert set(_KEPT[world].on(pool, "lora-fast-0")) == {OLD, NEW}
