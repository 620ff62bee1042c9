"""What a pool says of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tenantry.api import AdapterPoolSpec
from tenantry.desired.conditions import stall
from tenantry.desired.pool_status import LaneView, refused, verdicts

WHOLE = LaneView("fast", "lora-fast", replicas=2, ready=2, updated=2, outdated=0)


def told(spec: AdapterPoolSpec, *lanes: LaneView, stored: Any = None, halted: Any = None) -> dict[str, str]:
    found = verdicts(stored or {}, spec, lanes, halted)
    assert len({verdict.type for verdict in found}) == len(found)
    return {verdict.type: f"{verdict.status} {verdict.reason}" for verdict in found}


def test_a_whole_pool(pool_spec: AdapterPoolSpec) -> None:
    assert told(pool_spec, WHOLE) == {
        "Ready": "True Serving",
        "Reconciling": "False Settled",
        "Stalled": "False Settled",
        "Degraded": "False AllReady",
        "RolledBack": "False NoFailure",
        "TemplateCurrent": "True AsAsked",
        "Scaled": "True Fixed",
    }


def test_an_upgrade_shows_and_the_pool_stays_ready(pool_spec: AdapterPoolSpec) -> None:
    rolling = told(pool_spec, replace(WHOLE, updated=1, outdated=1, ready=1))
    assert (rolling["Reconciling"], rolling["Ready"]) == ("True Rolling", "True Serving")
    proving = told(pool_spec, replace(WHOLE, rolling=True))
    assert proving["Reconciling"] == "True Proving"


def test_a_failed_upgrade_is_stalled_serves_on_and_says_what_to_do(pool_spec: AdapterPoolSpec) -> None:
    failed = replace(WHOLE, failure="lora-fast-1: its containers ended 3 times", kept=True)
    said = told(pool_spec, failed)
    assert (said["Stalled"], said["Ready"], said["RolledBack"]) == (
        "True UpgradeFailed",
        "True Serving",
        "True UpgradeFailed",
    )
    assert said["TemplateCurrent"] == "False RolledBack"
    assert told(pool_spec, replace(failed, outdated=1))["Reconciling"] == "True RollingBack"
    between = told(pool_spec, replace(failed, ready=1, updated=1))
    assert (between["Reconciling"], between["Stalled"]) == ("True Starting", "True UpgradeFailed")
    message = next(v.message for v in verdicts({}, pool_spec, [failed], None) if v.type == "Stalled")
    assert "retryToken" in message


def test_no_replica_no_readiness(pool_spec: AdapterPoolSpec) -> None:
    none = replace(WHOLE, ready=0, updated=0)
    assert told(pool_spec, none)["Ready"] == "Unknown NoReplicaReady"
    was_ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    assert told(pool_spec, none, stored=was_ready)["Ready"] == "False NoReplicaReady"
    assert told(pool_spec, replace(none, replicas=0))["Ready"] == "False ScaledToZero"


def test_vllm_says_what_it_lacks(pool_wire: dict[str, Any]) -> None:
    pool_wire["engine"] |= {"type": "VLLM", "image": "registry.example/vllm:1"}
    spec = AdapterPoolSpec.model_validate(pool_wire)
    found = next(verdict for verdict in verdicts({}, spec, [WHOLE], None) if verdict.type == "Guaranteed")
    assert (found.status, found.reason) == ("False", "EngineLacks")
    assert "fair shares" in found.message


def test_a_name_that_is_taken_halts_everything(pool_spec: AdapterPoolSpec) -> None:
    assert told(pool_spec, WHOLE, halted=stall("NameTaken", "x"))["Ready"] == "False NameTaken"
    assert {verdict.type for verdict in refused({}, "why")} == {"Ready", "Reconciling", "Stalled"}
