"""Pods of engine type VLLM: what of our own engine's promises their objects must keep."""

from __future__ import annotations

from typing import Any

import pytest
from tenantry.api import AdapterPoolSpec
from tenantry.api.pool import LaneName
from tenantry.desired import container, engine, vllm

PLACE = container.Place("0f0e-pool", "registry.example/engine:1", "IfNotPresent")


@pytest.fixture
def spec(pool_wire: dict[str, Any]) -> AdapterPoolSpec:
    pool_wire["engine"] |= {"type": "VLLM", "image": "registry.example/vllm:1"}
    return AdapterPoolSpec.model_validate(pool_wire)


def pod(spec: AdapterPoolSpec) -> dict[str, Any]:
    facts = engine.PoolFacts(
        name="lora",
        uid="0f0e-pool",
        namespace="tenantry-system",
        image="registry.example/engine:1",
        pull_policy="IfNotPresent",
        region_label="region",
        replicas={LaneName.FAST: 1, LaneName.BULK: 1},
    )
    found: dict[str, Any] = engine.template(spec, facts, spec.lanes[0])["spec"]
    return found


def value(args: list[str], name: str) -> str:
    return args[args.index(name) + 1]


def test_the_agent_stands_in_the_engines_place_and_vllm_is_reached_by_nobody_else(
    spec: AdapterPoolSpec,
) -> None:
    agent, engine_of_vllm = pod(spec)["containers"]
    assert (agent["name"], agent["image"]) == ("engine", "registry.example/engine:1")
    assert [port["name"] for port in agent["ports"]] == ["serve", "admin"]
    assert agent["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert engine_of_vllm["image"] == "registry.example/vllm:1"
    assert value(engine_of_vllm["args"], "--host") == "127.0.0.1"
    assert "ports" not in engine_of_vllm
    assert value(agent["args"], "--vllm") == f"http://127.0.0.1:{value(engine_of_vllm['args'], '--port')}"


def test_both_containers_are_as_restricted_as_our_own(spec: AdapterPoolSpec) -> None:
    for entry in pod(spec)["containers"]:
        assert entry["securityContext"] == container.hardened()
        assert "memory" in entry["resources"]["limits"]
    identity = [
        entry["name"]
        for entry in pod(spec)["containers"]
        if any(mount["name"] == "identity" for mount in entry["volumeMounts"])
    ]
    assert identity == ["engine"], "vLLM has no business with identities"


def test_every_mount_has_its_volume(spec: AdapterPoolSpec) -> None:
    found = pod(spec)
    volumes = {volume["name"] for volume in found["volumes"]}
    assert {mount["name"] for entry in found["containers"] for mount in entry["volumeMounts"]} <= volumes


def test_the_agent_understands_every_argument(spec: AdapterPoolSpec) -> None:
    from tenantry_engine.agent.options import parser

    options = parser().parse_args(vllm.agent_arguments(spec, PLACE, spec.lanes[0]))
    assert (options.slots, options.max_rank, options.audience) == (8, 16, "0f0e-pool")
    assert options.target_modules == "q_proj,v_proj"
    bare = AdapterPoolSpec.model_validate({**spec.wire(), "lora": None})
    assert parser().parse_args(vllm.agent_arguments(bare, PLACE, bare.lanes[0])).no_lora


@pytest.mark.parametrize(("asked", "given"), [(1, "1"), (7, "8"), (64, "64"), (200, "256"), (512, "512")])
def test_vllm_is_started_with_a_rank_that_it_knows(pool_wire: dict[str, Any], asked: int, given: str) -> None:
    pool_wire["engine"] |= {"type": "VLLM", "image": "registry.example/vllm:1", "tensorParallel": 2}
    pool_wire["lora"]["maxRank"] = asked
    found = AdapterPoolSpec.model_validate(pool_wire)
    args = vllm.arguments(found, found.lanes[0])
    assert value(args, "--max-lora-rank") == given
    assert value(args, "--tensor-parallel-size") == "2"


def test_a_pool_without_adapters_cannot_load_any(pool_wire: dict[str, Any]) -> None:
    pool_wire["engine"] |= {"type": "VLLM", "image": "registry.example/vllm:1"}
    del pool_wire["lora"]
    [_, found] = pod(AdapterPoolSpec.model_validate(pool_wire))["containers"]
    assert "--enable-lora" not in found["args"]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in {entry["name"] for entry in found["env"]}
