"""Nodes by NodePool on a real API server. The kind is served; what Karpenter does with it is done by the test."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tenantry.api import names
from tenantry.cluster import NAMESPACE, NODE, NODE_POOL, TENANT, Key

if TYPE_CHECKING:
    from conftest import Lab

    from tests.conftest import ApiServer

pytestmark = pytest.mark.apiserver

KIND = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "nodepools.karpenter.sh"},
    "spec": {
        "group": "karpenter.sh",
        "scope": "Cluster",
        "names": {"kind": "NodePool", "plural": "nodepools", "singular": "nodepool"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}
TEMPLATE = {"template": {"spec": {"requirements": [{"key": "kubernetes.io/arch", "operator": "Exists"}]}}}


def offer(lab: Lab) -> None:
    tiers = dict(lab.config.tiers)
    for tier in [tier for tier in tiers if tier.dedicated]:
        tiers[tier] = tiers[tier].model_copy(update={"node_pool_templates": ["made"]})
    lab.config = lab.config.model_copy(update={"tiers": tiers, "node_pool_templates": {"made": TEMPLATE}})


async def ash(lab: Lab) -> str:
    await lab.tenant(
        "ash",
        tier="Enterprise",
        dedicated={"poolTemplateRef": "gold"},
        isolation={"nodePoolTemplateRef": "made", "region": "north"},
    )
    return names.tenant_namespace(lab.name("ash"))


async def test_once_karpenter_is_there_made_for_the_tenant_awaited_and_gone_before_the_tenant_is(
    lab: Lab, until: Any, apiserver: ApiServer
) -> None:
    """Without Karpenter the tenant is told; no restart is needed when it comes."""
    offer(lab)
    await lab.start()
    where = await ash(lab)

    async def told() -> bool:
        found = await lab.condition(TENANT, "ash", "Reconciling")
        return "Karpenter must be installed" in str(found.get("message"))

    await until(told)
    apiserver.kubectl("apply", "-f", "-", text=json.dumps(KIND))
    try:
        apiserver.kubectl("wait", "--for=condition=Established", "crd/nodepools.karpenter.sh")
        pool = await until(lambda: lab.client.get(NODE_POOL, Key("", where)))
        made = pool["spec"]["template"]
        assert made["spec"]["requirements"] == [
            {"key": "kubernetes.io/arch", "operator": "Exists"},
            {"key": "topology.kubernetes.io/region", "operator": "In", "values": ["north"]},
        ]

        async def waiting() -> bool:
            found = await lab.condition(TENANT, "ash", "Reconciling")
            return "has no node yet" in str(found.get("message"))

        await until(waiting)
        labels = {**made["metadata"]["labels"], "karpenter.sh/nodepool": where}
        meta = {"name": lab.name("k1"), "labels": labels, "annotations": made["metadata"]["annotations"]}
        await lab.make(
            {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {"taints": made["spec"]["taints"]}}
        )
        await lab.until(TENANT, "ash", "Ready", "True")
        await lab.until(TENANT, "ash", "Reconciling", "False")
        await lab.remove(TENANT, lab.key(TENANT, "ash"))

        async def pool_gone() -> bool:
            return await lab.client.get(NODE_POOL, Key("", where)) is None

        await until(pool_gone, seconds=60.0)
        node = await lab.client.get(NODE, Key("", lab.name("k1"))) or {}
        assert names.NODE_TENANT_LABEL in node["metadata"]["labels"], "never given back: it goes as it is"
        assert [taint for taint in node["spec"]["taints"] if taint["key"] == names.NODE_TAINT]
        assert await lab.client.get(NAMESPACE, Key("", where)) is None, (
            "engines and their namespace went first"
        )
        assert await lab.get(TENANT, "ash") is not None, "the tenant waits for its nodes"
        await lab.remove(NODE, Key("", lab.name("k1")))

        async def gone() -> bool:
            return await lab.get(TENANT, "ash") is None

        await until(gone, seconds=60.0)
    finally:
        await lab.stop()
        apiserver.kubectl("delete", "crd/nodepools.karpenter.sh", "--wait=true")
