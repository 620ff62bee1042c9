"""Claiming nodes: only offered and free ones, both taints at once, given back exactly as found."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tenantry.desired import nodes

KEY = "tenantry.node-restriction.kubernetes.io/tenant"


def node(
    name: str, *, claimable: bool = True, labels: dict[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    offered = {"tenantry.dev/claimable": "true"} if claimable else {}
    return {"metadata": {"name": name, "labels": {**offered, **(labels or {})}}, "spec": spec}


def claim(count: int = 1, **changes: Any) -> nodes.Claim:
    values: dict[str, Any] = {
        "tenant": "oak",
        "uid": "u1",
        "count": count,
        "region": None,
        "region_label": "region",
        "selector": {},
        **changes,
    }
    return nodes.Claim(**values)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7386, as the API server does it."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def test_takes_free_claimable_nodes_only() -> None:
    found = nodes.plan(
        claim(2),
        [
            node("a", claimable=False),
            node("b", labels={KEY: "elm"}),
            node("c", unschedulable=True),
            node("d", taints=[{"key": "tenantry.dev/tenant", "value": "elm", "effect": "NoExecute"}]),
            node("e"),
        ],
    )
    assert found.take == ("e",)
    assert found.missing == 1
    assert "1 of 2 nodes missing" in found.reason
    assert "tenantry.dev/claimable=true" in found.reason


def test_region_and_selector_narrow() -> None:
    offered = [node("a", labels={"region": "south"}), node("b", labels={"region": "north", "gpu": "yes"})]
    assert nodes.plan(claim(region="north", selector={"gpu": "yes"}), offered).take == ("b",)
    assert nodes.plan(claim(region="west"), offered).take == ()


def test_claim_writes_label_and_both_taints_and_keeps_others() -> None:
    theirs = {"key": "gpu", "effect": "NoSchedule"}
    taken = merged(node("a", taints=[theirs]), nodes.claim_patch(node("a", taints=[theirs]), "oak", "u1"))
    assert nodes.holds(taken, "oak", "u1")
    assert nodes.fully_claimed(taken, "oak")
    assert theirs in taken["spec"]["taints"]


def test_a_half_written_claim_is_completed() -> None:
    taken = merged(node("a"), nodes.claim_patch(node("a"), "oak", "u1"))
    taken["spec"]["taints"] = taken["spec"]["taints"][:1]
    found = nodes.plan(claim(1), [taken, node("b")])
    assert found.take == ("a",)
    assert found.hold == ("a",)


def test_a_node_of_an_earlier_tenant_of_the_same_name_is_not_ours() -> None:
    old = merged(node("a"), nodes.claim_patch(node("a"), "oak", "u0"))
    found = nodes.plan(claim(1), [old])
    assert found.take == found.hold == found.release == ()
    assert found.missing == 1


def test_surplus_is_given_back_unless_pods_run_there() -> None:
    held = [merged(node(name), nodes.claim_patch(node(name), "oak", "u1")) for name in "abc"]
    assert nodes.plan(claim(1), held).release == ("b", "c")
    assert nodes.plan(claim(1), held, busy=frozenset("c")).release == ("a", "b")
    assert nodes.plan(claim(3), held).take == ()


taints = st.lists(
    st.fixed_dictionaries({"key": st.sampled_from(["gpu", "infra"]), "effect": st.just("NoSchedule")}),
    max_size=3,
)


@given(taints, st.dictionaries(st.sampled_from(["zone", "gpu"]), st.just("x")))
def test_claim_and_release_leave_no_trace(given_taints: list[dict[str, str]], labels: dict[str, str]) -> None:
    spec = {"taints": given_taints} if given_taints else {}
    before = node("a", labels=labels, **spec)
    before["metadata"]["annotations"] = {"theirs": "1"}
    untouched = copy.deepcopy(before)
    taken = merged(before, nodes.claim_patch(before, "oak", "u1"))
    assert merged(taken, nodes.release_patch(taken)) == untouched
    assert before == untouched


def test_a_node_is_given_back_without_our_cordon_and_with_everybody_elses() -> None:
    taken = merged(node("a"), nodes.claim_patch(node("a"), "oak", "u1"))
    ours = merged(taken, nodes.cordon_patch("AttestationFailed: x"))
    assert nodes.cordoned_by_us(ours) == "AttestationFailed: x"
    assert merged(ours, nodes.release_patch(ours)) == node("a") | {
        "metadata": {**node("a")["metadata"], "annotations": {}}
    }
    theirs = merged(taken, {"spec": {"unschedulable": True}})
    assert nodes.cordoned_by_us(theirs) is None
    assert merged(theirs, nodes.release_patch(theirs))["spec"]["unschedulable"] is True
    assert nodes.plan(claim(1), [theirs, node("b")]).hold == ("a",), "a cordon takes nothing from the tenant"
    lifted = merged(ours, {"spec": {"unschedulable": None}})
    assert nodes.cordoned_by_us(lifted) is None
    assert nodes.held([ours, theirs, node("b")], "oak", "u1") == ["a", "a"]
