"""What goes away unasked or in the wrong order: adapters, pools, namespaces, the operator itself."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from tenantry.api import names
from tenantry.api.names import served_name
from tenantry.cluster import (
    ADAPTER,
    ADAPTER_POOL,
    CONFIG_MAP,
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_QUOTA,
    STATEFUL_SET,
    TENANT,
    Key,
    Obj,
    Resource,
)
from tenantry.controllers import replica
from tenantry.runtime.controller import Context, Result

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver

DIGEST = "sha256:" + "a" * 64
ROOTS = ((TENANT, "maple"), (ADAPTER, "tone"), (ADAPTER_POOL, "lora"))
LORA = {"tiers": ["MidMarket"], "lora": {"maxRank": 16}, "lanes": [{"name": "fast", "replicas": {"min": 2}}]}


async def served(lab: Lab) -> None:
    """A MidMarket tenant that is answered by an adapter."""
    await lab.settled_pool("lora", **LORA)
    where = lab.config.release_namespace
    models = [lab.model("tone", "tone")]
    await lab.tenant("maple", tier="MidMarket", models=models, adapterNamespaces=[where])
    await lab.adapter("tone", "maple", {"1.0.0": "a"}, "1.0.0")
    for resource, name in ROOTS:
        await lab.until(resource, name, "Ready", "True")
        await lab.until(resource, name, "Reconciling", "False")


async def conditions(lab: Lab) -> dict[str, tuple[str, str]]:
    """Every condition of every root."""
    return {
        f"{resource.kind} {entry['type']}": (entry["status"], entry["reason"])
        for resource, name in ROOTS
        for entry in ((await lab.get(resource, name) or {}).get("status") or {}).get("conditions") or []
    }


async def gone(lab: Lab, resource: Resource, key: Key) -> bool:
    return await lab.client.get(resource, key) is None


async def test_what_replicas_forget_without_a_sign_is_found_at_the_next_look(
    lab: Lab, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No pod changes and no event comes; statuses tell the truth meanwhile, and all of it returns."""
    monkeypatch.setattr(replica, "STEADY_SECONDS", 3.0)
    looks: list[float] = []
    look = replica.ReplicaReconciler._reconcile

    async def noted(self: replica.ReplicaReconciler, key: Key, ctx: Context) -> Result:
        looks.append(time.monotonic())
        return await look(self, key, ctx)

    monkeypatch.setattr(replica.ReplicaReconciler, "_reconcile", noted)
    await lab.start()
    await served(lab)
    # Whatever the beginning set off is over: from here on only time leads to a look.
    await until(lambda: asyncio.sleep(0, time.monotonic() - looks[-1] > 1.5))
    engines = [lab.fleet.engines[f"{lab.name('lora')}-fast-{number}"] for number in range(2)]
    name = served_name(lab.config.release_namespace, "tone", "1.0.0", DIGEST)
    before = await conditions(lab)
    lab.fleet.held_back.add(DIGEST)
    for engine in engines:
        engine.adapters, engine.blobs = {}, set()
    await lab.until(ADAPTER, "tone", "Loaded", "False")
    await lab.until(ADAPTER, "tone", "Ready", "False", "NoReplicaReady")
    await until(lambda: told(lab, name), True)
    lab.fleet.held_back.clear()
    await until(lambda: conditions(lab), before)
    assert all(set(engine.adapters) == {name} and engine.blobs == {DIGEST} for engine in engines)


async def told(lab: Lab, name: str) -> bool:
    """Whether every replica was told again."""
    return all(set(engine.adapters) == {name} for engine in lab.fleet.engines.values())


async def test_a_pool_that_goes_before_its_tenants_is_missed_by_each_of_them_and_holds_nobody(
    lab: Lab, until: Any
) -> None:
    await lab.start()
    await served(lab)
    before = await conditions(lab)
    await lab.remove(ADAPTER_POOL, lab.key(ADAPTER_POOL, "lora"))
    stalled = await lab.until(TENANT, "maple", "Stalled", "True", "NoPool")
    assert f"tiny-{lab.suffix}" in stalled["message"]
    await lab.until(TENANT, "maple", "Ready", "False")
    await lab.until(ADAPTER, "tone", "Ready", "False")
    await lab.pool("lora", **LORA)  # while the garbage collector may not have got to what the first one made
    await until(lambda: conditions(lab), before, seconds=90.0)

    await lab.remove(ADAPTER_POOL, lab.key(ADAPTER_POOL, "lora"))
    for resource, name in ((ADAPTER, "tone"), (TENANT, "maple")):
        await lab.remove(resource, lab.key(resource, name))
        assert await gone(lab, resource, lab.key(resource, name)), "nothing waits for replicas that are gone"


async def test_without_the_operator_nothing_shared_holds_up_a_deletion(lab: Lab, until: Any) -> None:
    """Uninstalled first, by mistake: Adapters, pools and shared tenants go, and so do the namespaces they lie in."""
    await lab.start()
    await served(lab)
    await lab.stop()
    for resource, name in ROOTS:
        assert "finalizers" not in (await lab.get(resource, name) or {})["metadata"]
    where = lab.config.release_namespace
    await lab.remove(NAMESPACE, Key("", where))  # with the Adapter, the engines and their pods in it
    await until(lambda: gone(lab, NAMESPACE, Key("", where)), seconds=60.0)
    for resource in (TENANT, ADAPTER_POOL):
        name = "maple" if resource == TENANT else "lora"
        await lab.remove(resource, lab.key(resource, name))
        assert await gone(lab, resource, lab.key(resource, name))


async def node(lab: Lab, name: str) -> None:
    labels = {names.CLAIMABLE_LABEL: "true", "lab": lab.suffix}
    await lab.make(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": lab.name(name), "labels": labels}}
    )


async def dedicated(lab: Lab) -> Obj:
    isolation = {"nodeSelector": {"lab": lab.suffix}}
    return await lab.tenant(
        "oak", tier="Enterprise", dedicated={"poolTemplateRef": "gold"}, isolation=isolation
    )


async def oak(lab: Lab) -> str:
    """A dedicated tenant that is served; its namespace."""
    await node(lab, "n1")
    await dedicated(lab)
    await lab.until(TENANT, "oak", "Ready", "True", "Serving")
    return names.tenant_namespace(lab.name("oak"))


async def test_a_tenants_namespace_that_goes_before_the_tenant(lab: Lab, until: Any) -> None:
    """While the tenant lives it is made anew with all its fences; while the tenant goes, both end."""
    await lab.start()
    where = await oak(lab)
    first = (await lab.client.get(NAMESPACE, Key("", where)) or {})["metadata"]["uid"]
    await lab.remove(NAMESPACE, Key("", where))

    async def anew() -> bool:
        found = await lab.client.get(NAMESPACE, Key("", where)) or {"metadata": {"uid": first}}
        return bool(found["metadata"]["uid"] != first)

    await until(anew, seconds=60.0)
    for resource, name in (
        (CONFIG_MAP, names.IDENTITY_CONFIGMAP),
        (RESOURCE_QUOTA, "tenantry"),
        (NETWORK_POLICY, "tenantry-default-deny"),
        (STATEFUL_SET, f"{where}-fast"),
        (POD, f"{where}-fast-0"),
    ):
        await until(lambda r=resource, n=name: lab.client.get(r, Key(where, n)))
    await lab.until(TENANT, "oak", "Ready", "True", "Serving")

    pod = Key(where, f"{where}-fast-0")
    await lab.client.merge_patch(POD, pod, {"metadata": {"finalizers": ["tests.example/hold"]}})
    await lab.remove(NAMESPACE, Key("", where))
    await lab.remove(TENANT, lab.key(TENANT, "oak"))
    await lab.until(TENANT, "oak", "Ready", "False", "Deleting")
    await lab.client.merge_patch(POD, pod, {"metadata": {"finalizers": None}})
    await until(lambda: gone(lab, TENANT, lab.key(TENANT, "oak")), seconds=60.0)
    assert await gone(lab, NAMESPACE, Key("", where))
    freed = await lab.client.get(NODE, Key("", lab.name("n1"))) or {}
    assert names.NODE_TENANT_LABEL not in freed["metadata"]["labels"]


async def test_whoever_has_the_name_of_a_tenant_that_was_forced_away_gets_a_place_of_its_own(
    lab: Lab, until: Any
) -> None:
    """Its finalizer was taken off by hand: nothing of the first one is adopted, and nothing is in the way for ever."""
    await lab.start()
    where = await oak(lab)
    space, pool = Key("", where), Key("", names.dedicated_pool(lab.name("oak")))
    first = {
        resource: await lab.client.get(resource, key)
        for resource, key in ((NAMESPACE, space), (ADAPTER_POOL, pool))
    }
    await lab.stop()
    await lab.remove(TENANT, lab.key(TENANT, "oak"))
    await lab.client.merge_patch(TENANT, lab.key(TENANT, "oak"), {"metadata": {"finalizers": None}})
    assert await gone(lab, TENANT, lab.key(TENANT, "oak"))
    again = await dedicated(lab)
    await node(lab, "n2")
    await lab.start()

    async def ready() -> Any:
        return (await lab.condition(TENANT, "oak", "Ready")).get("status")

    # The garbage collector finds what lost its owner, in its own time.
    await until(ready, "True", seconds=120.0)
    for resource, old in first.items():
        made = await lab.client.get(resource, space if resource == NAMESPACE else pool) or {}
        assert made["metadata"]["uid"] != (old or {})["metadata"]["uid"]
        assert made["metadata"]["ownerReferences"][0]["uid"] == again["metadata"]["uid"]
    claims = {}
    for name in ("n1", "n2"):
        found = await lab.client.get(NODE, Key("", lab.name(name))) or {}
        claims[name] = found["metadata"]["annotations"]["tenantry.dev/tenant-uid"]
    assert claims["n2"] == again["metadata"]["uid"]
    assert claims["n1"] != claims["n2"], "a claim is the tenant's that made it, until somebody has looked"
