"""What counts as a closed network: a refusal only beside a control that is open, at the same time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tenantry.evidence import network, probe
from tenantry.evidence.findings import Finding
from tenantry.evidence.network import Inside, Kind, Target

API = Target(Kind.API, "10.96.0.1", 443)
DNS = Target(Kind.DNS, "10.96.0.10", 53, query=True)
POD = Target(Kind.POD, "10.244.1.7", 8080)
SERVICE = Target(Kind.SERVICE, "10.96.7.7", 8080)
META = Target(Kind.METADATA, "169.254.169.254", 80)
OUTSIDE = Target(Kind.OUTSIDE, "203.0.113.7", 443)
TARGETS = [API, DNS, POD, SERVICE, META, OUTSIDE]
OPEN = {target.id: "open" for target in (API, DNS, POD, SERVICE, OUTSIDE)} | {META.id: "timeout"}
ALLOWED, CLOSED = probe.PORTS


def inside(node: str = "n1", reached: Mapping[str, str] | None = None, **more: Any) -> Inside:
    outcomes = {target.id: "timeout" for target in TARGETS} | dict(reached or {})
    facts: dict[str, Any] = {"accepted": {ALLOWED: 2}, "knocked": {ALLOWED: "open", CLOSED: "timeout"}}
    return Inside(node, "6.1.0", outcomes, **(facts | more))


def judge(*probes: Inside, control: Mapping[str, str] = OPEN, egress: tuple[str, ...] = ()) -> Finding:
    return network.judge(TARGETS, probes, control=control, ports=probe.PORTS, egress=egress, at=1.0)


def test_refused_inside_and_open_outside_is_proof() -> None:
    found = judge(inside(), inside("n2"))
    assert found.holds
    for kind in network.REQUIRED:
        assert kind.value in found.reason
    assert "metadata" not in found.reason, "nothing answers there, so its refusal is told as a fact only"
    assert any("169.254.169.254:80: timeout; from an ordinary pod: timeout" in fact for fact in found.facts)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.kind.value)
def test_whatever_is_reached_breaks_it_on_any_node(target: Target) -> None:
    found = judge(inside(), inside("n2", {target.id: "open"}))
    assert (found.holds, target.kind.value in found.reason) == (False, True)


def test_a_port_that_no_policy_opens_must_be_closed_to_other_namespaces() -> None:
    found = judge(inside(knocked={ALLOWED: "open", CLOSED: "open"}))
    assert found.holds is False
    assert "from another namespace" in found.reason


@pytest.mark.parametrize("target", [API, DNS, POD, SERVICE], ids=lambda target: target.kind.value)
def test_a_refusal_proves_nothing_where_nobody_is_let_in(target: Target) -> None:
    found = judge(inside(), control=OPEN | {target.id: "refused"})
    assert (found.holds, found.blind) == (None, True)
    assert target.kind.value in found.reason


@pytest.mark.parametrize(
    "dead",
    [
        inside(accepted={ALLOWED: 0}),
        inside(knocked={ALLOWED: "timeout", CLOSED: "timeout"}),
        Inside("n1", fault="its pod was deleted by somebody"),
    ],
    ids=["saw nobody come", "could not be reached", "did not tell"],
)
def test_a_probe_that_sees_nothing_where_it_may_proves_nothing(dead: Inside) -> None:
    found = judge(inside("n0"), dead)
    assert (found.holds, found.blind) == (None, True)
    assert "`n1`" in found.reason


def test_what_the_tenant_may_reach_is_no_breach() -> None:
    reached = {OUTSIDE.id: "open"}
    assert judge(inside(reached=reached), egress=("203.0.113.0/24",)).holds
    assert judge(inside(reached=reached), egress=("198.51.100.0/24",)).holds is False


def test_no_probe_and_no_target_prove_nothing() -> None:
    assert judge().blind
    untold = Inside("n1", "6.1.0", {}, {ALLOWED: 1}, {ALLOWED: "open", CLOSED: "timeout"})
    assert judge(untold).blind, "a probe that tried nothing"


@pytest.mark.parametrize(
    "words", ["", "{", "[]", '{"kernel": "x"}', '{"kernel": "x", "reached": 1, "accepted": {}}', "[" * 9999]
)
def test_last_words_that_cannot_be_read_are_a_fault(words: str) -> None:
    assert network.parse("n1", words, {}).fault


def test_last_words_are_bounded() -> None:
    words = json.dumps({"kernel": "k" * 999, "reached": {"a" * 999: "o" * 999}, "accepted": {"8001": 1}})
    read = network.parse("n1", words, {8001: "open"})
    assert (len(read.kernel), read.accepted, read.fault) == (128, {8001: 1}, "")
    assert [(len(key), len(value)) for key, value in read.reached.items()] == [(200, 40)]


def test_the_probe_s_pod_may_do_nothing() -> None:
    pod = probe.pod(
        "oak", "p", "n1", image="i:1", pull_policy="Never", runtime_class="gvisor", targets=TARGETS
    )
    spec = pod["spec"]
    [container] = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == probe.DEADLINE_SECONDS
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    assert "volumes" not in spec
    assert "nodeName" not in spec, "a scheduler places it, so that taints count"
    assert spec["runtimeClassName"] == "gvisor", "it must see what the engines see"
    assert probe.service_account("oak")["automountServiceAccountToken"] is False
    assert len(container["args"][0]) < 2000
