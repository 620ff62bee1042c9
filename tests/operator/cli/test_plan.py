"""`tenantry plan` says where tenants would run and why, in the words of their status; with a cluster, as placed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tenantry.api import OperatorConfig
from tenantry.cli.plan import plan

LIMITS = dict.fromkeys(
    ["requestsPerMinute", "tokensPerMinute", "maxInFlight", "maxQueued", "maxInputTokens", "maxOutputTokens"],
    10,
)
CONFIG = OperatorConfig.model_validate(
    {
        "engineImage": "engine:1",
        "gatewayUrl": "http://gateway",
        "fetcherUrl": "http://fetcher",
        "tiers": {
            tier: {"defaults": LIMITS, "ceilings": LIMITS, "maxWeight": 100} for tier in ("Free", "MidMarket")
        },
    }
)


def pool(name: str, replicas: int, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "AdapterPool",
        "metadata": {"name": name},
        "spec": {
            "baseModel": {"name": "tiny", "source": {"image": {"path": "/models/tiny"}}},
            "tiers": ["Free", "MidMarket"],
            "lanes": [{"name": "fast", "replicas": {"min": replicas}}],
            **spec,
        },
    }


def tenant(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name},
        "spec": {"tier": "Free", "models": [{"name": "chat", "baseModel": "tiny"}], **spec},
    }


def notes(*documents: dict[str, Any]) -> list[str]:
    return plan(yaml.safe_dump_all(documents), CONFIG).notes


def test_tenants_of_a_file_are_spread_and_each_is_told_why() -> None:
    found = notes(pool("shared", 4), *(tenant(f"t{i}") for i in range(40)))
    places = [note for note in found if "would run on" in note]
    assert len(places) == 40
    assert all("(the only pool that fits; lane fast: 2 of 4 replicas, " in note for note in places)
    on = [sum(f"shared-fast-{i}" in note.split("(")[0] for note in places) for i in range(4)]
    assert sum(on) == 80
    assert max(on) <= 1.25 * 20
    assert any("next in its hash order after" in note for note in places)


def test_a_tenant_that_is_too_large_is_told_what_to_do() -> None:
    models = [
        {"name": f"m{i}", "baseModel": "tiny", "adapterRef": {"namespace": "ml", "name": f"a{i}"}}
        for i in range(3)
    ]
    whale = tenant("whale", tier="MidMarket", models=models, adapterNamespaces=["ml"])
    found = notes(pool("lora", 2, lora={"maxRegistered": 2}), whale)
    assert (
        "Tenant whale: model m0 has no place: pool `lora`: the only pool that fits; lane fast: its 3 adapters"
        in ("\n".join(found))
    )
    assert "tiers with replicas of their own (Enterprise, Regulated)" in "\n".join(found)


def test_no_pool_of_the_file_fits() -> None:
    [note] = notes(tenant("lonely"))
    assert note == (
        "Tenant lonely: model chat has no place: no AdapterPool serves tier Free with base model `tiny`: "
        "there is none yet"
    )


@pytest.mark.apiserver
def test_with_a_cluster_what_is_placed_is_told_as_placed(apiserver: Any, crds: None, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG.model_dump(mode="json", by_alias=True)))
    base = {"baseModel": {"name": "plan-tiny", "source": {"image": {"path": "/models/tiny"}}}}
    models = [{"name": "chat", "baseModel": "plan-tiny"}]
    objects = [pool("plan-shared", 1, **base), tenant("plan-old", models=models)]
    lane = {"name": "fast", "statefulSet": "plan-shared-fast", "replicas": 3, "readyReplicas": 3}
    place = {
        "pool": "plan-shared",
        "namespace": "tenantry-system",
        "replicas": ["plan-shared-fast-0", "plan-shared-fast-2"],
        "reason": "in its own words",
    }
    statuses = {
        "adapterpool/plan-shared": {"observedGeneration": 1, "lanes": [lane]},
        "tenant/plan-old": {"observedGeneration": 1, "placement": [place]},
    }
    for obj in objects:
        apiserver.kubectl("create", "-f", "-", text=json.dumps(obj))
    try:
        for name, status in statuses.items():
            patch = json.dumps({"status": status})
            apiserver.kubectl("patch", *name.split("/"), "--subresource=status", "--type=merge", "-p", patch)
        file = tmp_path / "tenants.yaml"
        file.write_text(
            yaml.safe_dump_all([tenant(f"plan-{which}", models=models) for which in ("old", "new")])
        )
        command = [sys.executable, "-m", "tenantry.cli", "plan", "--cluster", "-f", str(file)]
        command += ["--config", str(tmp_path / "config.yaml")]
        environment = {**os.environ, "KUBECONFIG": str(apiserver.kubeconfig)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        found = [line.removeprefix("# ") for line in done.stdout.splitlines()]
        assert "Tenant plan-old: runs on plan-shared-fast-0, plan-shared-fast-2 (in its own words)" in found
        [new] = [note for note in found if note.startswith("Tenant plan-new: would run on ")]
        assert "lane fast: 2 of 3 replicas" in new
        assert "plan-shared-fast-1" in new, "the replica on which nobody is"
    finally:
        for name in statuses:
            apiserver.kubectl("delete", *name.split("/"), "--wait=false")
