"""Routes: only what is served, only where it is loaded, make before break. Isolation: no claim without a look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tenantry.api import AdapterPoolSpec, OperatorConfig, Route, TenantSpec, Tier
from tenantry.api.pool import LaneName
from tenantry.api.tenant import LanePreference
from tenantry.desired import conditions, isolation, route
from tenantry.desired.limits import effective_limits

DIGEST = "sha256:" + "b" * 64


def build(
    spec: TenantSpec, pool: AdapterPoolSpec, config: OperatorConfig, **served: route.Served
) -> Route | None:
    limits = effective_limits(spec.limits, config.tiers[spec.tier])
    placed = route.PlacedPool("lora", "uid", "ns", pool, {LaneName.FAST: ("lora-fast-1", "lora-fast-0")})
    return route.build(spec, limits, 1, [placed], served)


def two_models() -> TenantSpec:
    models = [
        {"name": "chat", "baseModel": "tiny"},
        {"name": "tone", "baseModel": "tiny", "adapterRef": {"namespace": "ml", "name": "tone"}},
    ]
    return TenantSpec.model_validate({"tier": "MidMarket", "models": models, "adapterNamespaces": ["ml"]})


def test_a_model_that_nothing_serves_is_not_listed(
    pool_spec: AdapterPoolSpec, config: OperatorConfig
) -> None:
    spec = two_models()
    found = build(spec, pool_spec, config, chat=route.Served("lora", "tiny"))
    assert found is not None
    assert [model.name for model in found.models] == ["chat"]
    assert build(spec, pool_spec, config) is None


def test_route_names_services_and_sorted_replicas(pool_spec: AdapterPoolSpec, config: OperatorConfig) -> None:
    tone = route.Served("lora", "ml.tone--1.0.0-bbbbbbbbbbbb", DIGEST)
    found = build(two_models(), pool_spec, config, chat=route.Served("lora", "tiny"), tone=tone)
    assert found is not None
    [pool] = found.pools
    [lane] = pool.lanes
    assert (lane.service, lane.replicas, lane.max_input_tokens) == (
        "lora-fast",
        ["lora-fast-0", "lora-fast-1"],
        512,
    )
    assert found.models[1].targets[0].digest == DIGEST
    assert route.names_on(found, "lora", "lora-fast-1") == {tone.name: DIGEST}
    assert route.names_on(found, "lora", "lora-fast-2") == {}
    assert Route.model_validate(found.wire()) == found


def test_lane_preference_falls_back_to_what_the_pool_has(pool_spec: AdapterPoolSpec) -> None:
    fast_only = pool_spec.model_copy(update={"lanes": pool_spec.lanes[:1]})
    assert route.lanes_for(LanePreference.BULK, pool_spec) == [LaneName.BULK]
    assert route.lanes_for(LanePreference.BULK, fast_only) == [LaneName.FAST]
    assert route.lanes_for(LanePreference.AUTO, pool_spec) == [LaneName.FAST, LaneName.BULK]


replicas = st.sets(st.sampled_from([f"r{i}" for i in range(6)]))


@given(replicas, replicas, replicas, replicas)
def test_moving_keeps_the_old_replicas_until_every_new_one_is_loaded(
    assigned: set[str], loaded: set[str], previous: set[str], existing: set[str]
) -> None:
    chosen = set(route.routable(sorted(assigned), loaded, previous, existing))
    if assigned <= loaded:
        assert chosen == assigned
    else:
        assert chosen == (previous & existing) | (assigned & loaded)


def test_restart_of_a_replica_rewrites_nothing() -> None:
    both = ("r0", "r1")
    assert route.routable(both, {"r1"}, both, both) == both


def test_nothing_is_enforced_without_an_observation() -> None:
    for tier in Tier:
        for entry in isolation.guarantees(tier, rendered=True, seen={}):
            assert entry["state"] in ("Configured", "NotProvided")


def test_observations_decide_both_ways() -> None:
    seen = {
        "AdapterIntegrity": isolation.Observation(True, "2 replicas report it"),
        "DedicatedNodes": isolation.Observation(False, "pod of another namespace"),
        "NetworkIsolation": isolation.Observation(None, "no probe yet"),
    }
    found = {
        e["guarantee"]: e["state"] for e in isolation.guarantees(Tier.ENTERPRISE, rendered=True, seen=seen)
    }
    assert found["AdapterIntegrity"] == "Enforced"
    assert found["DedicatedNodes"] == "NotProvided"
    assert found["NetworkIsolation"] == "Configured"
    shared = {e["guarantee"]: e["state"] for e in isolation.guarantees(Tier.FREE, rendered=True, seen=seen)}
    assert shared["DedicatedNodes"] == shared["AdapterIntegrity"] == "NotProvided"


def test_ready_is_unknown_only_while_first_provisioning() -> None:
    def verdict(before: str | None, provisioning: bool) -> str:
        stored = {} if before is None else {"conditions": [{"type": "Ready", "status": before}]}
        return conditions.not_ready(stored, "Why", "", provisioning=provisioning).status

    assert verdict(None, True) == "Unknown"
    assert verdict("Unknown", True) == "Unknown"
    assert verdict(None, False) == "False"
    assert verdict("True", True) == "False"
    assert verdict("False", True) == "False"
