"""The engine fleet of a pool as objects: golden files, and the promises that must survive any edit of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from tenantry.api import AdapterPoolSpec
from tenantry.api.pool import LaneName
from tenantry.desired import container, engine

GOLDEN = Path(__file__).parent / "golden"
PLACE = container.Place("0f0e-pool", "registry.example/engine:1", "IfNotPresent")


def facts(**changes: Any) -> engine.PoolFacts:
    values: dict[str, Any] = {
        "name": "lora",
        "uid": "0f0e-pool",
        "namespace": "tenantry-system",
        "image": "registry.example/engine:1",
        "pull_policy": "IfNotPresent",
        "region_label": "topology.kubernetes.io/region",
        "replicas": {LaneName.FAST: 2, LaneName.BULK: 1},
        **changes,
    }
    return engine.PoolFacts(**values)


def check(name: str, objects: list[dict[str, Any]]) -> None:
    """Compare with the golden file; `rm` it and run again to write it anew."""
    path = GOLDEN / name
    if not path.exists():
        path.write_text(yaml.safe_dump_all(objects, sort_keys=False))
        pytest.fail(f"{path} was missing and has been written: read it and commit it")
    assert list(yaml.safe_load_all(path.read_text())) == objects


def pods(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [obj["spec"]["template"]["spec"] for obj in objects if obj["kind"] == "StatefulSet"]


def test_shared_pool_golden(pool_spec: AdapterPoolSpec) -> None:
    check("lora-pool.yaml", engine.render(pool_spec, facts()))


def test_dedicated_pool_golden(pool_spec: AdapterPoolSpec) -> None:
    dedicated = facts(name="tenant-oak", namespace="tenant-oak", dedicated=engine.DedicatedTo("oak", "north"))
    check("dedicated-pool.yaml", engine.render(pool_spec, dedicated))


def test_gated_pool_golden(pool_spec: AdapterPoolSpec) -> None:
    to = engine.DedicatedTo("oak", None, "kata", "registry.example/operator:1", attested=True)
    check(
        "gated-pool.yaml",
        engine.render(pool_spec, facts(name="tenant-oak", namespace="tenant-oak", dedicated=to)),
    )


def test_the_gate_and_the_engine_understand_every_argument(pool_spec: AdapterPoolSpec) -> None:
    from tenantry.attestation.door import parser as gates_parser
    from tenantry_engine.options import parser

    for attested in (True, False):
        to = engine.DedicatedTo("oak", None, None, "gate:1", attested=attested)
        pod = pods(engine.render(pool_spec, facts(dedicated=to)))[0]
        [gate] = pod["initContainers"]
        options = gates_parser().parse_args(gate["args"])
        assert (options.audience, options.port, options.policy is not None) == ("0f0e-pool", 8002, attested)
        check_command = gate["startupProbe"]["exec"]["command"]
        assert gates_parser().parse_args(check_command[1:]).check
        found = parser().parse_args(pod["containers"][0]["args"])
        assert str(found.tls_dir) == "/run/tenantry"
        assert (str(found.lease) if found.lease else None) == ("/run/tenantry/lease" if attested else None)
        assert found.health_port == 8003


def test_rendering_is_deterministic(pool_spec: AdapterPoolSpec) -> None:
    assert engine.render(pool_spec, facts()) == engine.render(pool_spec, facts())


@pytest.mark.parametrize("gate", [None, "registry.example/operator:1"])
def test_pods_satisfy_the_restricted_standard(pool_spec: AdapterPoolSpec, gate: str | None) -> None:
    dedicated = engine.DedicatedTo("oak", None, None, gate, attested=True)
    for pod in pods(engine.render(pool_spec, facts(dedicated=dedicated))):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for entry in [*pod["containers"], *pod.get("initContainers", [])]:
            context = entry["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert "memory" in entry["resources"]["limits"]
        assert not any("hostPath" in volume for volume in pod["volumes"])


def test_dedicated_pods_carry_taint_toleration_and_required_affinity(pool_spec: AdapterPoolSpec) -> None:
    objects = engine.render(pool_spec, facts(dedicated=engine.DedicatedTo("oak", None)))
    for pod in pods(objects):
        assert {"key": "tenantry.dev/tenant", "operator": "Equal", "value": "oak"} in pod["tolerations"]
        terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        [term] = terms["nodeSelectorTerms"]
        assert term["matchExpressions"] == [
            {"key": "tenantry.node-restriction.kubernetes.io/tenant", "operator": "In", "values": ["oak"]}
        ]


def test_shared_pods_never_tolerate_a_tenants_taint(pool_spec: AdapterPoolSpec) -> None:
    for pod in pods(engine.render(pool_spec, facts())):
        assert "tolerations" not in pod
        assert "affinity" not in pod


def test_a_pool_without_lora_says_so_to_the_engine(pool_wire: dict[str, Any]) -> None:
    del pool_wire["lora"]
    spec = AdapterPoolSpec.model_validate(pool_wire)
    args = container.arguments(spec, PLACE, spec.lanes[0])
    assert "--no-lora" in args
    assert "--max-rank" not in args


def test_the_engine_understands_every_argument(pool_spec: AdapterPoolSpec) -> None:
    from tenantry_engine.config import configure
    from tenantry_engine.options import parser

    options = parser().parse_args(container.arguments(pool_spec, PLACE, pool_spec.lanes[0]))
    config = configure(options)
    assert options.host == "0.0.0.0"
    assert (config.slots, config.pool_bytes, config.model_name) == (8, 67108864, "tiny")
    assert config.lora is not None
    assert (config.lora.max_rank, config.lora.target_modules) == (16, ("q_proj", "v_proj"))


def test_a_model_on_a_claim_is_mounted_read_only(pool_wire: dict[str, Any]) -> None:
    pool_wire["baseModel"]["source"] = {"pvc": {"claimName": "weights", "path": "llama/8b"}}
    pool_wire["baseModel"]["digest"] = "sha256:" + "a" * 64
    spec = AdapterPoolSpec.model_validate(pool_wire)
    pod = pods(engine.render(spec, facts()))[0]
    args = pod["containers"][0]["args"]
    assert args[args.index("--model") + 1] == "/model/llama/8b"
    assert args[args.index("--model-digest") + 1] == "sha256:" + "a" * 64
    assert {"name": "model", "mountPath": "/model", "readOnly": True} in pod["containers"][0]["volumeMounts"]


def test_a_model_that_is_an_image_is_mounted_read_only(pool_wire: dict[str, Any]) -> None:
    reference = "registry.example/llama@sha256:" + "a" * 64
    pool_wire["baseModel"]["source"] = {"imageVolume": {"reference": reference, "path": "8b"}}
    pod = pods(engine.render(AdapterPoolSpec.model_validate(pool_wire), facts()))[0]
    args = pod["containers"][0]["args"]
    assert args[args.index("--model") + 1] == "/model/8b"
    assert {"name": "model", "mountPath": "/model", "readOnly": True} in pod["containers"][0]["volumeMounts"]
    volume = {"name": "model", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}}
    assert volume in pod["volumes"]
    pool_wire["baseModel"]["source"]["imageVolume"]["reference"] = "registry.example/llama:latest"
    with pytest.raises(ValueError, match="reference"):
        AdapterPoolSpec.model_validate(pool_wire)


def test_accelerators_are_requested_and_limited(pool_wire: dict[str, Any]) -> None:
    pool_wire["engine"]["resources"] |= {"accelerator": "nvidia.com/gpu", "acceleratorCount": 2}
    pod = pods(engine.render(AdapterPoolSpec.model_validate(pool_wire), facts()))[0]
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "2"


def test_the_engine_gets_its_device_and_its_parts(pool_wire: dict[str, Any]) -> None:
    from tenantry_engine.config import configure
    from tenantry_engine.options import parser

    pool_wire["engine"] |= {"tensorParallel": 2}
    pool_wire["engine"]["resources"] |= {"accelerator": "nvidia.com/gpu", "acceleratorCount": 2}
    spec = AdapterPoolSpec.model_validate(pool_wire)
    config = configure(parser().parse_args(container.arguments(spec, PLACE, spec.lanes[0])))
    assert (config.device, config.tensor_parallel_size) == ("cuda", 2)


def test_pods_spread_over_nodes_and_zones_or_as_the_pool_says(pool_wire: dict[str, Any]) -> None:
    pod = pods(engine.render(AdapterPoolSpec.model_validate(pool_wire), facts()))[0]
    keys = [entry["topologyKey"] for entry in pod["topologySpreadConstraints"]]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    pool_wire["scheduling"] = {
        "topologySpread": [{"topologyKey": "rack", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}]
    }
    [entry] = pods(engine.render(AdapterPoolSpec.model_validate(pool_wire), facts()))[0][
        "topologySpreadConstraints"
    ]
    selector = {"matchLabels": engine.selector("lora", LaneName.FAST)}
    assert entry == {
        "topologyKey": "rack",
        "maxSkew": 2,
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": selector,
    }


def test_replicas_that_are_not_ours_are_not_sent(pool_spec: AdapterPoolSpec) -> None:
    objects = engine.render(pool_spec, facts(replicas={LaneName.FAST: None, LaneName.BULK: 1}))
    sent = [obj["spec"].get("replicas") for obj in objects if obj["kind"] == "StatefulSet"]
    assert sent == [None, 1]


def test_every_field_of_engine_and_lora_changes_the_pod(pool_wire: dict[str, Any]) -> None:
    """A field that does nothing would be a promise that nobody keeps."""
    before = engine.template(AdapterPoolSpec.model_validate(pool_wire), facts(), _lane(pool_wire))
    changes: list[tuple[tuple[str, ...], Any]] = [
        (("engine", "type"), "VLLM"),
        (("engine", "image"), "registry.example/other:2"),
        (("engine", "dtype"), "float32"),
        (("engine", "maxModelLen"), 4096),
        (("engine", "poolBytes"), 1 << 27),
        (("engine", "tensorParallel"), 2),
        (("engine", "resources", "cpu"), "2"),
        (("engine", "resources", "memory"), "4Gi"),
        (("lora", "maxRank"), 32),
        (("lora", "maxRegistered"), 50),
        (("lora", "targetModules"), ["q_proj"]),
        (("baseModel", "digest"), "sha256:" + "a" * 64),
        (("scheduling", "nodeSelector"), {"a": "b"}),
        (("scheduling", "priorityClassName"), "high"),
        (("scheduling", "tolerations"), [{"key": "gpu", "operator": "Exists"}]),
    ]
    for path, value in changes:
        wire = copy.deepcopy(pool_wire)
        at = wire
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value
        spec = AdapterPoolSpec.model_validate(wire)
        assert engine.template(spec, facts(), spec.lanes[0]) != before, path


def _lane(wire: dict[str, Any]) -> Any:
    return AdapterPoolSpec.model_validate(wire).lanes[0]
