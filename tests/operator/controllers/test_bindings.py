"""What a replica must hold, from objects alone: no cluster, no replicas."""

from __future__ import annotations

from typing import Any

import pytest
from tenantry.api import OperatorConfig
from tenantry.cluster import ADAPTER, ADAPTER_POOL, STATEFUL_SET, TENANT, Obj
from tenantry.controllers import World, bindings
from tenantry.controllers.watches import Watches
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
    where = {"namespace": "tenantry-system", "ownerReferences": [owner]}
    store.put(STATEFUL_SET, obj("StatefulSet", "lora-fast", {"replicas": 1}, **where))
    route = {
        "weight": 1,
        "pools": [{"name": "lora", "lanes": [{"name": "fast", "replicas": ["lora-fast-0"]}]}],
        "models": [
            {"name": "tone", "pool": "lora", "targets": [{"servedName": OLD, "digest": "sha256:" + "a" * 64}]}
        ],
    }
    ref = {"namespace": "ml", "name": "tone"}
    spec = {
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


def wanted(world: World) -> dict[str, bindings.Wanted]:
    pool = world.pool("lora")
    assert pool is not None
    return bindings.wanted_on(world, pool, "lora-fast-0")


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
    adapter = dict(world.store.get(ADAPTER, bindings.Key("ml", "tone")) or {})
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
