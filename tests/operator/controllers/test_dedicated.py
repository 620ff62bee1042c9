"""Enterprise tenants on a real API server: fenced in before the first pod, and gone without a trace."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from tenantry.api import names
from tenantry.cluster import (
    ADAPTER_POOL,
    CONFIG_MAP,
    LIMIT_RANGE,
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_QUOTA,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    SERVICE_CIDR,
    STATEFUL_SET,
    TENANT,
    Key,
)
from tenantry.controllers import tenant

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver


async def node(lab: Lab, name: str, **labels: str) -> str:
    meta = {
        "name": lab.name(name),
        "labels": {names.CLAIMABLE_LABEL: "true", "lab": lab.suffix, **labels},
    }
    await lab.make({"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {"taints": [GPU]}})
    return lab.name(name)


GPU = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}


async def oak(lab: Lab, **isolation: Any) -> str:
    """An Enterprise tenant; its namespace."""
    wanted = {"nodeSelector": {"lab": lab.suffix}, "egress": ["203.0.113.0/24"], **isolation}
    await lab.tenant(
        "oak", tier="Enterprise", dedicated={"poolTemplateRef": "gold", "replicas": 2}, isolation=wanted
    )
    return f"tenant-{lab.name('oak')}"


async def gone(lab: Lab, resource: Any, key: Key) -> bool:
    return await lab.client.get(resource, key) is None


async def test_everything_stands_around_the_pods_and_nothing_is_left_after(lab: Lab, until: Any) -> None:
    await lab.start()
    await node(lab, "n1")
    where = await oak(lab)
    await lab.until(TENANT, "oak", "Ready", "True", "Serving")

    space = await lab.client.get(NAMESPACE, Key("", where)) or {}
    labels = space["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert labels[names.NAMESPACE_LABEL] == lab.name("oak")
    for resource, name in (
        (RESOURCE_QUOTA, "tenantry"),
        (LIMIT_RANGE, "tenantry"),
        (SERVICE_ACCOUNT, "tenantry-engine"),
        (ROLE_BINDING, "tenantry-operator"),
        (NETWORK_POLICY, "tenantry-default-deny"),
        (NETWORK_POLICY, "tenantry-ingress"),
        (NETWORK_POLICY, "tenantry-egress"),
        (CONFIG_MAP, names.IDENTITY_CONFIGMAP),
    ):
        assert await lab.client.get(resource, Key(where, name)) is not None, name
    taken = await lab.client.get(NODE, Key("", lab.name("n1"))) or {}
    assert taken["metadata"]["labels"][names.NODE_TENANT_LABEL] == lab.name("oak")
    effects = {t["effect"] for t in taken["spec"]["taints"] if t["key"] == names.NODE_TAINT}
    assert effects == {"NoSchedule", "NoExecute"}
    pool = await lab.client.get(ADAPTER_POOL, Key("", where)) or {}
    assert pool["metadata"]["ownerReferences"][0]["kind"] == "Tenant"
    workload = await lab.client.get(STATEFUL_SET, Key(where, f"{where}-fast")) or {}
    assert workload["spec"]["replicas"] == 2
    status = (await lab.get(TENANT, "oak") or {})["status"]
    assert [entry["namespace"] for entry in status["placement"]] == [where]
    claims = {entry["guarantee"]: entry["state"] for entry in status["isolation"]}
    assert claims["NetworkIsolation"] == claims["DedicatedNodes"] == "Configured", "nobody has looked yet"
    assert (await lab.condition(TENANT, "oak", "NetworkIsolated"))["status"] == "Unknown"

    await lab.client.merge_patch(NETWORK_POLICY, Key(where, "tenantry-default-deny"),
                                 {"spec": {"podSelector": {"matchLabels": {"x": "y"}}}})  # fmt: skip
    await lab.remove(NETWORK_POLICY, Key(where, "tenantry-ingress"))

    async def repaired() -> bool:
        deny = await lab.client.get(NETWORK_POLICY, Key(where, "tenantry-default-deny")) or {}
        ingress = await lab.client.get(NETWORK_POLICY, Key(where, "tenantry-ingress"))
        return deny["spec"]["podSelector"] == {} and ingress is not None

    await until(repaired)
    await lab.edit(TENANT, "oak", {"isolation": {"egress": []}})
    await until(lambda: gone(lab, NETWORK_POLICY, Key(where, "tenantry-egress")))

    await lab.remove(TENANT, lab.key(TENANT, "oak"))
    await until(lambda: gone(lab, TENANT, lab.key(TENANT, "oak")), seconds=60.0)
    assert await gone(lab, NAMESPACE, Key("", where))
    assert await gone(lab, ADAPTER_POOL, Key("", where))
    freed = await lab.client.get(NODE, Key("", lab.name("n1"))) or {}
    assert names.NODE_TENANT_LABEL not in freed["metadata"]["labels"]
    assert "tenantry.dev/tenant-uid" not in freed["metadata"].get("annotations", {})
    assert [taint for taint in freed["spec"]["taints"] if taint["key"] != "node.kubernetes.io/not-ready"] == [
        GPU
    ]


async def test_engines_go_before_the_namespace_and_a_block_is_said(
    lab: Lab, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lab.start()
    await node(lab, "n1")
    where = await oak(lab)
    await lab.until(TENANT, "oak", "Ready", "True")
    pod = Key(where, f"{where}-fast-0")
    await lab.client.merge_patch(POD, pod, {"metadata": {"finalizers": ["tests.example/hold"]}})
    await lab.remove(TENANT, lab.key(TENANT, "oak"))
    reconciling = await lab.until(TENANT, "oak", "Ready", "False", "Deleting")
    assert "being deleted" in reconciling["message"]

    async def waiting() -> bool:
        condition = await lab.condition(TENANT, "oak", "Reconciling")
        return "1 pods" in str(condition.get("message"))

    await until(waiting)
    space = await lab.client.get(NAMESPACE, Key("", where)) or {}
    assert "deletionTimestamp" not in space["metadata"], "policies must stand while a pod runs"
    assert "route" not in ((await lab.get(TENANT, "oak") or {})["status"])
    monkeypatch.setattr(tenant, "DELETION_DEADLINE_SECONDS", 0.0)
    blocked = await lab.until(TENANT, "oak", "Stalled", "True", "DeletionBlocked")
    assert f"1 pods (`{pod.name}`, held by finalizer `tests.example/hold`" in blocked["message"]
    command = """kubectl patch tenant {} --type=merge -p '{{"metadata":{{"finalizers":null}}}}'"""
    assert command.format(lab.name("oak")) in blocked["message"]
    await lab.client.merge_patch(POD, pod, {"metadata": {"finalizers": None}})
    await until(lambda: gone(lab, TENANT, lab.key(TENANT, "oak")), seconds=60.0)


async def test_without_an_operator_the_written_command_lets_everything_go(lab: Lab, until: Any) -> None:
    """Nothing but the Tenant waits for the operator: no namespace, and nothing in it."""
    await lab.start()
    await node(lab, "n1")
    where = await oak(lab)
    await lab.until(TENANT, "oak", "Ready", "True")
    await lab.stop()
    await lab.remove(TENANT, lab.key(TENANT, "oak"))
    assert not await gone(lab, TENANT, lab.key(TENANT, "oak"))
    await lab.client.merge_patch(TENANT, lab.key(TENANT, "oak"), {"metadata": {"finalizers": None}})
    for resource, name in ((TENANT, lab.name("oak")), (ADAPTER_POOL, where), (NAMESPACE, where)):
        await until(partial(gone, lab, resource, Key("", name)), seconds=60.0)


async def test_nodes_are_claimed_once_and_shortage_is_said(lab: Lab, until: Any) -> None:
    await lab.start()
    await node(lab, "n1", zone="a")
    await oak(lab, nodes=2)

    async def short() -> bool:
        waiting = await lab.condition(TENANT, "oak", "Reconciling")
        return "1 of 2 nodes missing" in str(waiting.get("message"))

    await until(short)
    await node(lab, "n2")
    await lab.until(TENANT, "oak", "Ready", "True")
    for name in ("n1", "n2"):
        taken = await lab.client.get(NODE, Key("", lab.name(name))) or {}
        assert taken["metadata"]["labels"][names.NODE_TENANT_LABEL] == lab.name("oak")


async def test_a_namespace_of_somebody_else_is_neither_used_nor_deleted(lab: Lab, until: Any) -> None:
    where = f"tenant-{lab.name('oak')}"
    await lab.make({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": where}})
    await lab.start()
    await node(lab, "n1")
    await oak(lab)
    stalled = await lab.until(TENANT, "oak", "Stalled", "True", "NameTaken")
    assert where in stalled["message"]
    assert await lab.client.get(NETWORK_POLICY, Key(where, "tenantry-default-deny")) is None
    await lab.remove(TENANT, lab.key(TENANT, "oak"))
    await until(lambda: gone(lab, TENANT, lab.key(TENANT, "oak")))
    space = await lab.client.get(NAMESPACE, Key("", where)) or {}
    assert "deletionTimestamp" not in space["metadata"]


async def test_egress_into_the_cluster_is_refused_with_the_reason(lab: Lab) -> None:
    await lab.make(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": lab.name("net")},
            "spec": {"podCIDR": "10.244.77.0/24", "podCIDRs": ["10.244.77.0/24"]},
        }
    )
    await lab.start()
    where = await oak(lab, egress=["10.244.0.0/16"])
    stalled = await lab.until(TENANT, "oak", "Stalled", "True", "InvalidSpec")
    assert "`isolation.egress[0]` must not overlap the pods of node" in stalled["message"]
    assert await gone(lab, NAMESPACE, Key("", where))
    assert "finalizers" not in (await lab.get(TENANT, "oak") or {})["metadata"]


async def test_a_node_given_to_an_earlier_tenant_of_that_name_is_not_released(lab: Lab, until: Any) -> None:
    name = await node(lab, "n1")
    await lab.client.merge_patch(
        NODE,
        Key("", name),
        {
            "metadata": {
                "labels": {names.NODE_TENANT_LABEL: lab.name("oak")},
                "annotations": {"tenantry.dev/tenant-uid": "of-another-life"},
            }
        },
    )
    await lab.start()
    await oak(lab)
    await lab.until(TENANT, "oak", "Reconciling", "True", "Provisioning")
    await lab.remove(TENANT, lab.key(TENANT, "oak"))
    await until(lambda: gone(lab, TENANT, lab.key(TENANT, "oak")), seconds=60.0)
    kept = await lab.client.get(NODE, Key("", name)) or {}
    assert kept["metadata"]["annotations"]["tenantry.dev/tenant-uid"] == "of-another-life"


async def test_moving_down_serves_on_and_then_empties_the_old_place(lab: Lab, until: Any) -> None:
    await lab.start()
    await node(lab, "n1")
    where = await oak(lab)
    await lab.until(TENANT, "oak", "Ready", "True")
    await lab.edit(TENANT, "oak", {"tier": "Free", "dedicated": None, "isolation": None})
    await lab.until(TENANT, "oak", "Stalled", "True", "NoPool")
    assert (await lab.route("oak"))["pools"][0]["name"] == where, "served on until there is another place"
    await lab.settled_pool("shared")
    await until(lambda: gone(lab, NAMESPACE, Key("", where)), seconds=60.0)
    assert (await lab.route("oak"))["pools"][0]["name"] == lab.name("shared")

    async def free() -> bool:
        return "finalizers" not in (await lab.get(TENANT, "oak") or {})["metadata"]

    await until(free)
    freed = await lab.client.get(NODE, Key("", lab.name("n1"))) or {}
    assert names.NODE_TENANT_LABEL not in freed["metadata"]["labels"]


async def test_egress_into_the_clusters_services_is_refused_with_the_reason(lab: Lab) -> None:
    """By the API server's own list of their ranges, without a word in the configuration."""
    [cidr] = [entry async for entry in lab.client.list(SERVICE_CIDR)]
    await lab.start()
    await oak(lab, egress=[cidr["spec"]["cidrs"][0]])
    stalled = await lab.until(TENANT, "oak", "Stalled", "True", "InvalidSpec")
    assert "`isolation.egress[0]` must not overlap the cluster's Services" in stalled["message"]


async def test_what_the_cluster_takes_later_is_closed_at_once(lab: Lab, until: Any) -> None:
    await lab.start()
    await node(lab, "n1")
    where = await oak(lab, egress=["203.0.113.0/24", "198.51.100.0/24"])
    await lab.until(TENANT, "oak", "Ready", "True")

    async def opened() -> list[str]:
        policy = await lab.client.get(NETWORK_POLICY, Key(where, "tenantry-egress")) or {}
        to = [peer for rule in policy.get("spec", {}).get("egress", []) for peer in rule["to"]]
        return [peer["ipBlock"]["cidr"] for peer in to]

    assert await opened() == ["198.51.100.0/24", "203.0.113.0/24"]
    await lab.make(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": lab.name("newcomer")},
            "spec": {"podCIDR": "203.0.113.64/26", "podCIDRs": ["203.0.113.64/26"]},
        }
    )
    stalled = await lab.until(TENANT, "oak", "Stalled", "True", "InvalidSpec")
    assert "the pods of node" in stalled["message"]
    await until(opened, ["198.51.100.0/24"])
    await lab.until(TENANT, "oak", "Ready", "True", "ServesEarlierSpec")


async def test_a_cordon_by_others_is_respected(lab: Lab, until: Any) -> None:
    """Nothing is claimed there, nothing given up for it, and it stands after the node was given back."""
    await lab.start()
    name = await node(lab, "n1")
    await lab.client.merge_patch(NODE, Key("", name), {"spec": {"unschedulable": True}})
    await oak(lab)

    async def short() -> bool:
        waiting = await lab.condition(TENANT, "oak", "Reconciling")
        return "1 of 1 nodes missing" in str(waiting.get("message"))

    await until(short)
    await lab.client.merge_patch(NODE, Key("", name), {"spec": {"unschedulable": None}})
    await lab.until(TENANT, "oak", "Ready", "True")
    await lab.client.merge_patch(NODE, Key("", name), {"spec": {"unschedulable": True}})
    await lab.remove(TENANT, lab.key(TENANT, "oak"))
    await until(lambda: gone(lab, TENANT, lab.key(TENANT, "oak")), seconds=60.0)
    freed = await lab.client.get(NODE, Key("", name)) or {}
    assert freed["spec"]["unschedulable"] is True
    assert names.NODE_TENANT_LABEL not in freed["metadata"]["labels"]
