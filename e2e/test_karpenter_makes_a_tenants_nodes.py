"""Karpenter makes a tenant's nodes: its own before anything can run there, with its pods alone, gone with it."""

from __future__ import annotations

import time

import pytest
from stack import karpenter, promises
from stack.install import MODEL, Stack
from stack.kube import JsonObject, condition, eventually

NAME, SPACE = "fir", "tenant-fir"
TENANT: JsonObject = {
    "apiVersion": "tenantry.dev/v1alpha1",
    "kind": "Tenant",
    "metadata": {"name": NAME},
    "spec": {
        "tier": "Enterprise",
        "models": [{"name": "chat", "baseModel": MODEL}],
        "dedicated": {"poolTemplateRef": "dedicated", "replicas": 1},
        "isolation": {"nodePoolTemplateRef": karpenter.TEMPLATE, "nodes": 1},
    },
}
UNREGISTERED = "karpenter.sh/unregistered"


def test_a_node_is_the_tenant_s_from_its_first_moment_and_goes_with_it(stack: Stack, seen: list[str]) -> None:
    if not stack.own_cluster:
        pytest.fail("Karpenter runs on this machine and must be the cluster's only one: unset KUBECONFIG")
    kube = stack.kube

    def made() -> list[JsonObject]:
        return kube.find("nodes", "-l", f"karpenter.sh/nodepool={SPACE}")

    def said() -> str:
        return str(condition(kube.get("tenant", NAME), "Reconciling").get("message"))

    with karpenter.offered(stack), karpenter.watching(kube) as nodes:
        start = time.monotonic()
        kube.apply(TENANT)
        try:
            eventually("Karpenter makes a node", lambda: bool(made()), said=said)
            pod = kube.wait(
                "the tenant's engine is placed", "pod", f"{SPACE}-fast-0", SPACE, until=_is_placed
            )
            placed = time.monotonic() - start
            uid = (kube.get("tenant", NAME) or {})["metadata"]["uid"]
            names = {node["metadata"]["name"] for node in made()}
            assert (pod or {})["spec"]["nodeName"] in names
            for name in names:
                assert nodes.states[name], "the watch saw it come"
                assert [state for state in nodes.states[name] if not _is_held(state, uid)] == []

            _refused(stack, SPACE)
            spaces = {
                pod["metadata"]["namespace"]
                for name in names
                for pod in kube.find("pods", "-A", f"--field-selector=spec.nodeName={name}")
            }
            assert spaces == {SPACE}
        finally:
            kube.run("delete", "tenant", NAME, "--wait=true", "--timeout=240s", seconds=260)
        assert kube.get("nodepool", SPACE) is None
        assert made() == []
        assert kube.find("nodeclaims") == []
        assert kube.get("namespace", SPACE) is None
    seen.append(f"Karpenter: the engine was placed on a new node of the tenant's own after {placed:.0f} s")


def _is_placed(pod: JsonObject | None) -> bool:
    return bool((pod or {}).get("spec", {}).get("nodeName"))


def _is_held(node: JsonObject, uid: str) -> bool:
    """Whether the node says whose it is, and nothing else may run there: by our taints, or by Karpenter's before."""
    meta = node["metadata"]
    told = (
        meta["labels"].get("tenantry.node-restriction.kubernetes.io/tenant"),
        meta.get("annotations", {}).get("tenantry.dev/tenant-uid"),
    )
    taints = {(t["key"], t.get("value"), t["effect"]) for t in node["spec"].get("taints") or []}
    ours = {("tenantry.dev/tenant", NAME, effect) for effect in ("NoSchedule", "NoExecute")}
    closed = ours <= taints or any(key == UNREGISTERED and effect == "NoExecute" for key, _, effect in taints)
    return told == (NAME, uid) and closed


def _refused(stack: Stack, pool: str) -> None:
    """A pod of nobody that asks for just these nodes waits for ever."""
    pod = promises.probe_pod("stranger", "default", nodeSelector={"karpenter.sh/nodepool": pool})
    stack.kube.apply(pod)
    try:
        found = stack.kube.wait(
            "the scheduler refuses a stranger",
            "pod",
            "stranger",
            "default",
            until=lambda found: condition(found, "PodScheduled").get("status") == "False",
            seconds=60,
        )
        assert "untolerated taint" in condition(found, "PodScheduled")["message"]
    finally:
        stack.kube.run("delete", "pod", "stranger", "-n", "default", "--wait=true", "--timeout=60s")
