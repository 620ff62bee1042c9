"""`status` and `why` against a real API server, and in words for what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tenantry.cli.output import View
from tenantry.cli.status import describe, findings, overview, sentences, summary

CRDS = Path(__file__).resolve().parents[3] / "crds"
TIME = "2026-01-01T00:00:00Z"


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": TIME}


def tenant(*conditions: dict[str, str], generation: int = 1, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "acme", "generation": generation},
        "spec": {"tier": "MidMarket"},
        "status": {"observedGeneration": 1, "conditions": list(conditions), **status},
    }


GOOD = (
    condition("Ready", "True", "Serving", "1 of 1 models are served"),
    condition("Reconciling", "False", "Settled"),
    condition("Stalled", "False", "Settled"),
    condition("Placed", "True", "Placed"),
    condition("NetworkIsolated", "False", "NotProvided", "tier MidMarket runs on shared pods"),
    condition("Suspended", "False", "NotRequested"),
)


def test_nothing_is_wrong() -> None:
    found = findings(tenant(*GOOD), [])
    assert found == []
    assert "nothing is in its way" in sentences(tenant(*GOOD), found)


def test_the_cause_comes_first_and_all_of_it() -> None:
    bad = tenant(
        condition("Ready", "False", "AdapterStalled", "x"),
        condition("Stalled", "True", "AdapterStalled", "`tone`: Adapter acme-ml/tone: DigestMismatch"),
        condition("Placed", "True", "Placed"),
        generation=2,
    )
    pool = {
        "metadata": {"name": "p", "generation": 1},
        "status": {"conditions": [condition("Ready", "True", "S")]},
    }
    found = findings(
        bad, [("AdapterPool p", pool), ("Adapter acme-ml/tone", None), ("AdapterPool new", {"metadata": {}})]
    )
    assert [entry["condition"] for entry in found] == ["", "Stalled", "Ready", "", ""]
    assert f"x (since {TIME})\n" in sentences(bad, found, wide=True)
    assert sentences(bad, found).splitlines() == [
        "Tenant acme: the operator has not yet acted on the last edit of the spec",
        "Tenant acme: Stalled is True: AdapterStalled: `tone`: Adapter acme-ml/tone: DigestMismatch",
        "Tenant acme: Ready is False: AdapterStalled: x",
        "Adapter acme-ml/tone does not exist: create it, or correct the reference in Tenant acme",
        "AdapterPool new: the operator has not looked at it yet: is it running, and is it the leader?",
    ]


def test_a_tenant_at_a_glance() -> None:
    text = describe(
        tenant(
            *GOOD,
            tier="Smb",
            endpoint={"url": "http://gateway/v1", "models": ["tone"]},
            placement=[{"pool": "lora", "namespace": "ns", "replicas": ["lora-fast-0"], "reason": "kept"}],
            route={"models": [{"name": "tone", "targets": [{"servedName": "a.b--1.0.0-0", "weight": 100}]}]},
            isolation=[{"guarantee": "OwnNodes", "state": "NotProvided", "reason": "r"}],
        )
    )
    for part in (
        "MidMarket (in force: Smb)", "Serving: 1 of 1 models are served", "http://gateway/v1  models: tone",
        "lora in ns: lora-fast-0 (kept)", "tone = a.b--1.0.0-0 (100%)", "OwnNodes",
    ):  # fmt: skip
        assert part in text
    assert "unknown" in describe({"metadata": {"name": "new"}})


MOVING = tenant(
    *GOOD,
    tier="MidMarket",
    leaving=[{"pool": "tenant-acme", "namespace": "tenant-acme", "phase": "Draining", "since": TIME}],
    route={
        "weight": 4,
        "limits": {"maxInFlight": 8, "tokensPerMinute": 100},
        "models": [{"name": "tone", "targets": [{"servedName": "a.b--1.0.0-0", "digest": "sha256:00"}]}],
    },
)


def test_a_place_that_is_left_and_what_only_wide_shows() -> None:
    text, wide = describe(MOVING), describe(MOVING, wide=True)
    assert f"  leaves    tenant-acme in tenant-acme: Draining since {TIME}" in text
    for part in ("sha256:00", "maxInFlight 8", "weight 4", "SINCE", TIME):
        assert part in wide
    assert "sha256:00" not in text


def test_all_tenants_one_a_line_or_as_data() -> None:
    fresh = {"metadata": {"name": "birch", "generation": 1}, "spec": {"tier": "Free"}}
    lines = overview([MOVING, fresh], View.TABLE).splitlines()
    assert lines[0].split() == ["TENANT", "TIER", "READY", "REASON", "POOLS"]
    assert lines[2].split() == ["birch", "Free", "Unknown", "NotSeen", "-"]
    assert overview([MOVING], View.WIDE).splitlines()[1].split()[-2:] == ["100", "0"]
    listed = json.loads(overview([MOVING, fresh], View.JSON))
    assert listed == yaml.safe_load(overview([MOVING, fresh], View.YAML))
    assert [(entry["tenant"], entry["ready"], entry["upToDate"]) for entry in listed] == [
        ("acme", "True", True),
        ("birch", "Unknown", False),
    ]
    assert listed[0] == json.loads(json.dumps(summary(MOVING)))
    assert overview([], View.TABLE) == "no tenants\n"


def run(kubeconfig: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tenantry.cli", *arguments],
        env={"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.apiserver
def test_from_the_api_server(apiserver: Any) -> None:
    for crd in sorted(CRDS.glob("*.yaml")):
        apiserver.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crd))
    apiserver.kubectl("wait", "--for=condition=Established", "crd/tenants.tenantry.dev", "--timeout=30s")
    document = {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": "cli-status"},
        "spec": {
            "tier": "Smb",
            "models": [{"name": "chat", "baseModel": "smollm2-135m", "poolRef": "nowhere"}],
        },
    }
    apiserver.kubectl("apply", "-f", "-", text=json.dumps(document))
    try:
        fresh = run(apiserver.kubeconfig, "status", "cli-status")
        assert fresh.returncode == 0, fresh.stderr
        assert "the operator has not looked at it yet" in fresh.stdout
        found = {
            "status": {"observedGeneration": 1, "conditions": [condition("Ready", "False", "NoPool", "none")]}
        }
        apiserver.kubectl(
            "patch", "tenant", "cli-status", "--subresource=status", "--type=merge", "-p", json.dumps(found)
        )
        told = run(apiserver.kubeconfig, "why", "cli-status")
        assert told.returncode == 1, told.stderr
        assert told.stdout.splitlines() == [
            "Tenant cli-status: Ready is False: NoPool: none",
            "AdapterPool nowhere does not exist: create it, or correct the reference in Tenant cli-status",
        ]
        missing = run(apiserver.kubeconfig, "status", "nobody")
        assert missing.returncode == 2
        assert missing.stderr.count("\n") == 1
        assert "Tenant `nobody` must exist" in missing.stderr
        data = json.loads(run(apiserver.kubeconfig, "why", "cli-status", "-o", "json").stdout)
        assert (data["tenant"], data["served"], len(data["findings"])) == ("cli-status", False, 2)
        rows = run(apiserver.kubeconfig, "status").stdout.splitlines()
        assert any(row.split()[:3] == ["cli-status", "Smb", "False"] for row in rows), rows
        one = yaml.safe_load(run(apiserver.kubeconfig, "status", "cli-status", "-o", "yaml").stdout)
        assert one["conditions"][0]["reason"] == "NoPool"
        none = run(apiserver.kubeconfig, "top", "tenants")
        assert (none.returncode, none.stderr.count("\n")) == (2, 1)
        assert "no gateway runs" in none.stderr
    finally:
        apiserver.kubectl("delete", "tenant", "cli-status", "--wait=false")


def test_without_a_cluster(tmp_path: Path) -> None:
    for command in (["status", "acme"], ["status"], ["why", "acme"], ["top", "tenants"], ["top", "replicas"]):
        done = run(tmp_path / "none", *command)
        assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, ""), command
        assert "`KUBECONFIG`" in done.stderr
