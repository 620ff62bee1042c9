"""NodePools for Karpenter: whatever an admin's template says, the nodes are the tenant's from their first moment."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tenantry.desired import nodepool, nodes

KEY = "tenantry.node-restriction.kubernetes.io/tenant"
taints = st.lists(
    st.fixed_dictionaries(
        {
            "key": st.sampled_from(["gpu", "tenantry.dev/tenant"]),
            "effect": st.sampled_from(["NoSchedule", "NoExecute"]),
            "value": st.sampled_from(["elm", "oak"]),
        }
    ),
    max_size=3,
)


@given(taints, st.dictionaries(st.sampled_from(["team", KEY]), st.just("elm")), st.booleans())
def test_label_annotation_and_taints_stand(
    given_taints: list[dict[str, str]], labels: dict[str, str], bare: bool
) -> None:
    template: dict[str, Any] = {"limits": {"cpu": "64"}}
    if not bare:
        template["template"] = {"metadata": {"labels": labels}, "spec": {"taints": given_taints}}
    before = repr(template)
    pool = nodepool.render("oak", "u1", template, ("region", "north"), {"gpu": "yes"})
    assert repr(template) == before, "the configuration is not touched"
    made = pool["spec"]["template"]
    node = {"metadata": {"name": "n", **made["metadata"]}, "spec": made["spec"]}
    assert nodes.holds(node, "oak", "u1")
    assert nodes.fully_claimed(node, "oak")
    ours = [taint for taint in made["spec"]["taints"] if taint["key"] == "tenantry.dev/tenant"]
    assert {taint["value"] for taint in ours} == {"oak"}
    assert [taint for taint in made["spec"]["taints"] if taint["key"] == "gpu"] == [
        taint for taint in (given_taints if not bare else []) if taint["key"] == "gpu"
    ]
    assert {"key": "region", "operator": "In", "values": ["north"]} in made["spec"]["requirements"]
    assert {"key": "gpu", "operator": "In", "values": ["yes"]} in made["spec"]["requirements"]
    assert pool["spec"]["limits"] == {"cpu": "64"}
