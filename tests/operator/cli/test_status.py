"""`status` and `why` against a real API server, and in words for what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tenantry.cli.status import describe, explain

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
    text, troubled = explain(tenant(*GOOD), [])
    assert (troubled, "nothing is in its way" in text) == (False, True)


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
    text, troubled = explain(
        bad, [("AdapterPool p", pool), ("Adapter acme-ml/tone", None), ("AdapterPool new", {"metadata": {}})]
    )
    assert troubled
    assert text.splitlines() == [
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
    finally:
        apiserver.kubectl("delete", "tenant", "cli-status", "--wait=false")


def test_without_a_cluster(tmp_path: Path) -> None:
    done = run(tmp_path / "none", "status", "acme")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "`KUBECONFIG`" in done.stderr
