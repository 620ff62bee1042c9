"""Who owns a namespace, or may create Tenants, reaches nothing of another tenant and nothing that no admin offers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tenantry.api import names
from tenantry.cluster import (
    ADAPTER,
    ADAPTER_POOL,
    NAMESPACE,
    NODE,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    STATEFUL_SET,
    TENANT,
    Invalid,
    Key,
    Obj,
    Resource,
)

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver

LORA = {"tiers": ["MidMarket"], "lora": {"maxRank": 16}}
A, E = "a", "e"


async def victim(lab: Lab) -> None:
    """A MidMarket tenant whose adapter `tone` serves."""
    await lab.settled_pool("lora", **LORA)
    where = lab.config.release_namespace
    models = [lab.model("chat", "tone")]
    await lab.tenant("victim", tier="MidMarket", models=models, adapterNamespaces=[where])
    await lab.adapter("tone", "victim", {"1.0.0": A}, "1.0.0")
    await lab.until(TENANT, "victim", "Ready", "True", "Serving")


async def hostile(lab: Lab) -> str:
    """Somebody else's namespace."""
    name = f"hostile-{lab.suffix}"
    await lab.make({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


async def evil_adapter(lab: Lab, namespace: str, name: str, tenant: str) -> Key:
    """An Adapter with bytes of the attacker's own."""
    entry = {
        "version": "1.0.0",
        "digest": f"sha256:{E * 64}",
        "source": "oci://registry.example/evil:1",
        "rank": 8,
    }
    spec = {
        "tenantRef": lab.name(tenant),
        "versions": [entry],
        "channels": [{"name": "stable", "version": "1.0.0"}],
    }
    meta = {"name": name, "namespace": namespace}
    body = {"apiVersion": "tenantry.dev/v1alpha1", "kind": "Adapter", "metadata": meta, "spec": spec}
    await lab.make(body)
    return Key(namespace, name)


async def stalled(lab: Lab, resource: Resource, key: Key) -> Obj:
    obj = await lab.client.get(resource, key) or {}
    conditions = (obj.get("status") or {}).get("conditions") or []
    found: Obj = next((c for c in conditions if c["type"] == "Stalled" and c["status"] == "True"), {})
    return found


async def test_an_adapter_of_a_namespace_that_is_not_listed_never_reaches_the_tenant(
    lab: Lab, until: Any
) -> None:
    """Same name, the victim's own `tenantRef`: neither fetched nor declared, and the route is as it was."""
    await lab.start()
    await victim(lab)
    route = await lab.route("victim")
    key = await evil_adapter(lab, await hostile(lab), "tone", "victim")

    async def reason() -> Any:
        return (await stalled(lab, ADAPTER, key)).get("reason")

    await until(reason, "NotBound")
    why = await stalled(lab, ADAPTER, key)
    assert "must list namespace" in why["message"]
    assert await lab.route("victim") == route
    engines = lab.fleet.engines.values()
    assert not any(key.namespace in name for engine in engines for told in engine.declared for name in told)
    assert not any(f"sha256:{E * 64}" in engine.blobs for engine in engines), "nothing of it was even fetched"


async def test_a_tenant_cannot_use_the_adapter_of_another(lab: Lab) -> None:
    """Listing the victim's namespace is not enough: the adapter names its tenant, for life."""
    await lab.start()
    await victim(lab)
    where = lab.config.release_namespace
    models = [lab.model("chat", "tone")]
    await lab.tenant("mallory", tier="MidMarket", models=models, adapterNamespaces=[where])
    found = await lab.until(TENANT, "mallory", "Stalled", "True", "AdapterNotBound")
    assert "belongs to another tenant" in found["message"]
    assert (await lab.route("mallory")).get("models") in (None, [])
    assert set(await lab.served("victim")) == {"chat"}


async def test_the_same_alias_and_the_same_key_are_two_tenants_own(lab: Lab) -> None:
    """An alias is looked up within the tenant; a key names its tenant, so a copied hash opens nothing."""
    await lab.start()
    await victim(lab)
    await lab.settled_pool("shared", lanes=[{"name": "fast"}])
    hashed = {"name": "ci", "sha256": "b" * 64}
    await lab.edit(TENANT, "victim", {"auth": {"apiKeys": [hashed]}})
    await lab.tenant("mallory", auth={"apiKeys": [hashed]})
    await lab.until(TENANT, "mallory", "Ready", "True")
    mine, theirs = await lab.served("mallory"), await lab.served("victim")
    assert set(mine) == set(theirs) == {"chat"}
    assert mine["chat"] == f"tiny-{lab.suffix}"
    assert theirs["chat"].startswith(f"{lab.config.release_namespace}.tone--1.0.0-")


async def test_who_may_create_tenants_reaches_no_node_template_or_network_that_is_not_offered(
    lab: Lab, until: Any
) -> None:
    await lab.start()
    meta = {"name": lab.name("private"), "labels": {"lab": lab.suffix}}
    await lab.make({"apiVersion": "v1", "kind": "Node", "metadata": meta})
    wanted = {
        "tier": "Enterprise",
        "dedicated": {"poolTemplateRef": "gold"},
        "isolation": {"nodeSelector": {"lab": lab.suffix}},
    }
    await lab.tenant("grab", **wanted)

    async def short() -> bool:
        waiting = await lab.condition(TENANT, "grab", "Reconciling")
        return "1 of 1 nodes missing" in str(waiting.get("message"))

    await until(short, True)
    node = await lab.client.get(NODE, Key("", lab.name("private"))) or {}
    assert names.NODE_TENANT_LABEL not in node["metadata"]["labels"]
    assert all(taint["key"] != names.NODE_TAINT for taint in node["spec"].get("taints") or [])
    await lab.tenant("other", **{**wanted, "dedicated": {"poolTemplateRef": "platinum"}})
    refused = await lab.until(TENANT, "other", "Stalled", "True", "InvalidSpec")
    assert "`dedicated.poolTemplateRef` must be a template offered" in refused["message"]
    with pytest.raises(Invalid, match="`egress` must not touch link-local"):
        await lab.tenant("net", **{**wanted, "isolation": {"egress": ["0.0.0.0/0"]}})
    for number, cidr in enumerate(("100.100.100.200/32", "fd00:ec2::254/128")):
        await lab.tenant(f"net{number}", **{**wanted, "isolation": {"egress": [cidr]}})
        refused = await lab.until(TENANT, f"net{number}", "Stalled", "True", "InvalidSpec")
        assert "must not overlap a metadata service" in refused["message"]
        assert await lab.client.get(NAMESPACE, Key("", f"tenant-{lab.name(f'net{number}')}")) is None


async def test_an_object_of_the_same_name_is_never_adopted(lab: Lab, until: Any) -> None:
    """Of every kind that a pool makes, and of the pool that a dedicated tenant derives."""
    where = lab.config.release_namespace
    label = {"app.kubernetes.io/managed-by": "tenantry"}  # a label proves nothing
    meta = {"namespace": where, "labels": label}
    selector = {"matchLabels": {"a": "b"}}
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "x:1"}]}}
    theirs: dict[Resource, Obj] = {
        STATEFUL_SET: {"replicas": 0, "serviceName": "x", "selector": selector, "template": template},
        SERVICE: {"ports": [{"port": 80}], "selector": {"a": "b"}},
        POD_DISRUPTION_BUDGET: {"maxUnavailable": 1, "selector": selector},
    }
    names_of = {resource: lab.name(f"p{number}") for number, resource in enumerate(theirs)}
    for resource, spec in theirs.items():
        head = {"apiVersion": resource.api_version, "kind": resource.kind}
        await lab.make({**head, "metadata": {**meta, "name": f"{names_of[resource]}-fast"}, "spec": spec})
    derived = f"tenant-{lab.name('oak')}"
    model = {"name": "other", "source": {"image": {"path": "/m"}}}
    pool = {"baseModel": model, "tiers": ["Enterprise"], "lanes": [{"name": "fast"}]}
    head = {"apiVersion": "tenantry.dev/v1alpha1", "kind": "AdapterPool", "metadata": {"name": derived}}
    await lab.make({**head, "spec": pool})
    await lab.start()
    before = {
        resource: await lab.client.get(resource, Key(where, f"{name}-fast"))
        for resource, name in names_of.items()
    }
    for number in range(len(theirs)):
        await lab.pool(f"p{number}", lanes=[{"name": "fast"}])
    node = {"name": lab.name("n"), "labels": {names.CLAIMABLE_LABEL: "true", "lab": lab.suffix}}
    await lab.make({"apiVersion": "v1", "kind": "Node", "metadata": node})
    isolation = {"nodeSelector": {"lab": lab.suffix}}
    await lab.tenant("oak", tier="Enterprise", dedicated={"poolTemplateRef": "gold"}, isolation=isolation)
    for resource, name in names_of.items():
        number = int(name[1])
        taken = await lab.until(ADAPTER_POOL, f"p{number}", "Stalled", "True", "NameTaken")
        assert f"{resource.kind} `{where}/{name}-fast` must not exist yet" in taken["message"]
    taken = await lab.until(TENANT, "oak", "Stalled", "True", "NameTaken")
    assert f"AdapterPool `{derived}` must not exist yet" in taken["message"]

    await asyncio.gather(*(lab.remove(ADAPTER_POOL, Key("", lab.name(f"p{n}"))) for n in range(len(theirs))))
    await lab.remove(TENANT, lab.key(TENANT, "oak"))

    async def gone() -> bool:
        return await lab.get(TENANT, "oak") is None

    await until(gone, True, seconds=60.0)
    kept = await lab.client.get(ADAPTER_POOL, Key("", derived)) or {}
    assert kept["spec"]["baseModel"]["name"] == "other"
    assert "deletionTimestamp" not in kept["metadata"]
    for resource, name in names_of.items():
        live = await lab.client.get(resource, Key(where, f"{name}-fast")) or {}
        assert live["metadata"]["uid"] == (before[resource] or {})["metadata"]["uid"]
        assert live["spec"] == (before[resource] or {})["spec"]
