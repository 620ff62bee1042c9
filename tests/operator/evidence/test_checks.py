"""Each check from both sides: what it takes to hold, and everything that breaks it."""

from __future__ import annotations

from typing import Any

import pytest
from tenantry.api import names
from tenantry.desired import network, nodes
from tenantry.evidence import checks
from tenantry.evidence.checks import Refusal, Separation

AT = 1000.0
Obj = dict[str, Any]


def node(name: str = "n1", tenant: str = "oak", uid: str = "u1") -> Obj:
    meta = {
        "name": name,
        "labels": {names.NODE_TENANT_LABEL: tenant},
        "annotations": {nodes.UID_ANNOTATION: uid},
    }
    taints = [{"key": names.NODE_TAINT, "value": tenant, "effect": effect} for effect in nodes.EFFECTS]
    return {"metadata": meta, "spec": {"taints": taints}}


def pod(where: str, name: str = "p", on: str | None = "n1", phase: str = "Running") -> Obj:
    return {
        "metadata": {"namespace": where, "name": name},
        "spec": {"nodeName": on},
        "status": {"phase": phase},
    }


def test_taints_must_stand_on_every_node_of_the_very_tenant() -> None:
    assert checks.taints("oak", "u1", [node(), node("n2")], AT).holds
    assert checks.taints("oak", "u1", [], AT).holds is None
    bare = node("n2")
    bare["spec"]["taints"].pop()
    found = checks.taints("oak", "u1", [node(), bare], AT)
    assert (found.holds, found.reason) == (False, "the taint is missing on node `n2`")
    assert checks.taints("oak", "of another life", [node()], AT).holds is False


def test_a_node_that_karpenter_still_keeps_closed_breaks_nothing() -> None:
    joining = node("n2")
    joining["spec"]["taints"] = [{"key": "karpenter.sh/unregistered", "effect": "NoExecute"}]
    assert checks.taints("oak", "u1", [joining], AT).holds is None
    assert checks.taints("oak", "u1", [node(), joining], AT).holds
    joining["spec"]["taints"][0]["effect"] = "NoSchedule"
    assert checks.taints("oak", "u1", [node(), joining], AT).holds is False


@pytest.mark.parametrize(
    ("pods", "holds", "words"),
    [
        ([pod("tenant-oak"), pod("kube-system", "proxy")], True, "no foreign pod"),
        ([pod("tenant-oak"), pod("default", "intruder")], False, "`default/intruder`"),
        ([pod("tenant-elm", "x")], False, "`tenant-elm/x`"),
        ([pod("default", "ended", phase="Succeeded"), pod("default", "elsewhere", on="n9")], True, ""),
        ([pod("tenant-oak", "stray", on="n9")], False, "outside its nodes: `tenant-oak/stray`"),
        ([pod("tenant-oak", "waiting", on=None)], True, ""),
    ],
)
def test_neighbours(pods: list[Obj], holds: bool, words: str) -> None:
    found = checks.neighbours("tenant-oak", ["n1"], pods, ["kube-system"], AT)
    assert found.holds is holds
    assert words in found.reason


def test_admission_without_its_policies_is_no_proof() -> None:
    policy = {"spec": {"failurePolicy": "Fail"}}
    binding = {"spec": {"validationActions": ["Deny"]}}
    assert checks.admission(["a"], {"a": (policy, binding)}, AT).holds
    for weak in (
        (None, binding),
        (policy, None),
        ({"spec": {"failurePolicy": "Ignore"}}, binding),
        (policy, {"spec": {"validationActions": ["Audit"]}}),
    ):
        found = checks.admission(["a"], {"a": weak}, AT)
        assert (found.holds, found.blind) == (None, False), "it is seen that nothing keeps it so"
        assert "`a`" in found.reason
    assert checks.admission([], {}, AT).holds is None


def test_hardening_needs_the_label_and_the_refusal() -> None:
    space = {"metadata": {"labels": {checks.PSA_LABEL: "restricted"}}}
    refused = "violates PodSecurity restricted"
    assert checks.hardening(space, 403, refused, AT).holds
    assert checks.hardening(space, 201, "", AT).holds is False
    assert checks.hardening({"metadata": {}}, 403, refused, AT).holds is False
    assert checks.hardening(space, 403, "exceeded quota", AT).blind, (
        "a refusal for another reason proves nothing"
    )
    assert checks.hardening(space, 0, "", AT).blind


HARD = {"pods": "20", "requests.memory": "512Gi"}


def quota(hard: Obj = HARD, **used: str) -> Obj:
    status = {"hard": hard, "used": {"pods": "3", "requests.memory": "1536Mi", **used}}
    return {"spec": {"hard": hard}, "status": status}


def test_the_quota_must_be_there_whole_and_kept() -> None:
    assert checks.quota(quota(), HARD, AT).holds
    assert checks.quota(quota({"pods": "20", "requests.memory": "524288Mi"}), HARD, AT).holds, (
        "the same amount"
    )
    assert checks.quota(None, HARD, AT).holds is False
    assert checks.quota(quota({"pods": "2000", "requests.memory": "512Gi"}), HARD, AT).holds is False
    assert checks.quota(quota(pods="21"), HARD, AT).holds is False
    narrowed = quota()
    narrowed["spec"]["scopes"] = ["BestEffort"]
    assert checks.quota(narrowed, HARD, AT).holds is False
    assert checks.quota({"spec": {"hard": HARD}}, HARD, AT).blind


@pytest.mark.parametrize(
    ("text", "number"), [("20", 20), ("250m", 0.25), ("1Ki", 1024), ("2k", 2000), ("1.5Gi", 1.5 * 2**30)]
)
def test_amounts(text: str, number: float) -> None:
    assert checks.amount(text) == pytest.approx(number)


def test_policies_must_be_ours_and_no_more() -> None:
    wanted = network.policies("tenant-oak", "oak", "tenantry-system", ["203.0.113.0/24"])
    live = [
        {"metadata": p["metadata"], "spec": {**p["spec"], "ingress": p["spec"].get("ingress", [])}}
        for p in wanted
    ]
    assert checks.policies(wanted, live, AT).holds
    assert checks.policies(wanted, live[:-1], AT).holds is False
    opened = {
        "metadata": {"name": "debug"},
        "spec": {"podSelector": {}, "egress": [{}], "policyTypes": ["Egress"]},
    }
    found = checks.policies(wanted, [*live, opened], AT)
    assert (found.holds, "`debug`" in found.reason) == (False, True)
    for change in (
        {"ingress": [{}]},
        {"podSelector": {"matchLabels": {"x": "y"}}},
        {"policyTypes": ["Ingress"]},
    ):
        changed = {**live[0], "spec": {**live[0]["spec"], **change}}
        assert checks.policies(wanted, [changed, *live[1:]], AT).holds is False, change


def counts(*tenants: str, crossed: int = 0) -> Separation:
    return Separation(frozenset(tenants), len(tenants), 100, 40, crossed)


def test_separation_and_process_need_every_replica_s_word() -> None:
    assert checks.separation({"r0": counts("u1"), "r1": counts("u2")}, AT).holds
    crossed = checks.separation({"r0": counts("u1"), "r1": counts("u2", crossed=16)}, AT)
    assert (crossed.holds, "`r1`" in crossed.reason) == (False, True)
    assert checks.separation({"r0": counts("u1"), "r1": None}, AT).blind
    assert checks.separation({}, AT).blind

    assert checks.process("u1", {"r0": counts("u1"), "r1": counts()}, {}, AT).holds
    assert checks.process("u1", {"r0": counts("u1", "u2")}, {}, AT).holds is False
    assert checks.process("u1", {"r0": counts()}, {"r0": frozenset({"u2"})}, AT).holds is False, "its adapter"
    assert checks.process("u1", {"r0": None}, {}, AT).blind


def test_digests_of_the_page_table() -> None:
    wanted = [("tone", "sha256:a")]
    assert checks.integrity(wanted, {"r0": {"tone": "sha256:a"}}, AT).holds
    other = checks.integrity(wanted, {"r0": {"tone": "sha256:a"}, "r1": {"tone": "sha256:b"}}, AT)
    assert (other.holds, "tone on r1" in other.reason) == (False, True)
    assert checks.integrity(wanted, {"r0": {}}, AT).blind
    assert checks.integrity(wanted, {"r0": None}, AT).blind
    assert checks.integrity([], {"r0": {}}, AT).holds is None
    assert checks.tables_read({"r0": {}}, AT).holds
    assert checks.tables_read({"r0": {}, "r1": None}, AT).blind


def test_a_kernel_must_be_seen_to_be_another() -> None:
    assert checks.kernel("n1", "gvisor", "6.1.0", "4.19.0-gvisor", AT).holds
    assert checks.kernel("n1", "gvisor", "6.1.0", "6.1.0", AT).holds is False, (
        "the class's name proves nothing"
    )
    assert checks.kernel("n1", None, "6.1.0", "6.1.0", AT).holds is False
    assert checks.kernel("n1", "gvisor", "", "4.19.0-gvisor", AT).blind


def refusal(name: str, status: int = 404, text: str = "`model` must be one of yours; `{}` is not") -> Refusal:
    return Refusal(name, status, text.format(name))


def test_a_stranger_must_not_tell_others_models_from_none() -> None:
    unknown = refusal("unknown-1")
    assert checks.door(1, [refusal("tone"), refusal("a.tone--1")], unknown, AT).holds
    for leak in (
        refusal("tone", 200, ""),
        refusal("tone", 403),
        refusal("tone", 404, "`{}` belongs to another"),
    ):
        found = checks.door(1, [leak, refusal("a.tone--1")], unknown, AT)
        assert (found.holds, "`tone`" in found.reason) == (False, True)
    assert checks.door(0, [refusal("tone")], unknown, AT).blind, (
        "a key that opens nothing is refused everywhere"
    )
    assert checks.door(1, [refusal("tone")], refusal("unknown-1", 401), AT).blind
    assert checks.door(1, [], unknown, AT).holds is None
    for busy in (429, 503):
        found = checks.door(1, [refusal("tone", busy, "later")], unknown, AT)
        assert found.blind, "a limit that was reached, or a gateway that fails, tells nothing of the model"
