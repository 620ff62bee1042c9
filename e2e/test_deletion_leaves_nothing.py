"""Deleting a tenant, an adapter or a pool leaves nothing: objects, node labels and taints, residency, routes."""

from __future__ import annotations

from stack import promises
from stack.install import ADAPTERS, DEDICATED_NODE, Stack
from stack.kube import eventually, is_ready


def test_an_adapter_leaves_the_replicas_and_the_routes(stack: Stack) -> None:
    maple = stack.client("maple")
    assert maple.ask("triage", "hello").status == 200

    def settled() -> bool:
        """An earlier version is held until requests that may still name it have ended."""
        return set(promises.registered(stack, "lora").values()) == {len(ADAPTERS)}

    eventually("every replica holds what is active and nothing else", settled, seconds=120)
    before = promises.registered(stack, "lora")
    stack.kube.run("delete", "adapter", "triage", "-n", "maple-ml", "--wait=true")
    try:
        eventually("the route is gone", lambda: maple.ask("triage", "hello").status in (404, 503), seconds=60)
        fewer = {pod: count - 1 for pod, count in before.items()}
        eventually("no replica knows it", lambda: promises.registered(stack, "lora") == fewer, seconds=90)
        assert maple.ask("tone", "hello").status == 200
    finally:
        stack.apply_text(stack.adapter_text("triage"))
        stack.kube.wait("triage is back", "adapter", "triage", "maple-ml", until=is_ready, seconds=120)


def test_a_dedicated_tenant_gives_everything_back(stack: Stack) -> None:
    tenant = stack.kube.get("tenant", "oak")
    assert tenant is not None
    stack.kube.run("delete", "tenant", "oak", "--wait=true", "--timeout=240s", seconds=260)
    try:
        eventually(
            "its namespace is gone", lambda: stack.kube.get("namespace", "tenant-oak") is None, seconds=120
        )
        assert stack.kube.get("adapterpool", "tenant-oak") is None
        assert stack.client("oak").ask("chat", "hello").status == 401
        assert promises.claims(stack, DEDICATED_NODE) == []
    finally:
        stack.kube.apply(stack.tenant("oak"))
        stack.kube.wait("oak is back", "tenant", "oak", until=is_ready, seconds=240)


def test_a_pool_takes_its_workloads_along(stack: Stack) -> None:
    pool = {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "AdapterPool",
        "metadata": {"name": "spare"},
        "spec": {
            "baseModel": {"name": "spare-model", "source": {"image": {"path": "/models/smollm2-135m"}}},
            "tiers": ["Free"],
            "lanes": [{"name": "fast", "replicas": {"min": 0}}],
        },
    }
    stack.kube.apply(pool)
    where = ("-n", stack.namespace, "-l", "tenantry.dev/pool=spare")
    eventually("its StatefulSet is there", lambda: bool(stack.kube.find("statefulsets", *where)), seconds=60)
    stack.kube.run("delete", "adapterpool", "spare", "--wait=true")
    kinds = "statefulsets,services,poddisruptionbudgets,pods"
    eventually("nothing of it is left", lambda: not stack.kube.find(kinds, *where), seconds=60)
