"""A lane's number of replicas, between the operator and a real HorizontalPodAutoscaler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cluster import binaries, process
from tenantry.cluster import ADAPTER_POOL, POD_DISRUPTION_BUDGET, STATEFUL_SET, TENANT, Key, Obj
from tenantry.desired.scaling import holders

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver

OWN = "tenantry"


@pytest.fixture
def autoscaling(apiserver: Any, tmp_path: Path) -> Iterator[None]:
    """Kubernetes' own HPA controller. Without metrics it still keeps its bounds, which is all that is needed here."""
    found = binaries.ensure(binaries.CONTROL_PLANE)
    run = tmp_path / "autoscaling"
    process.spawn(
        [
            str(found["kube-controller-manager"]),
            *(
                f"--{use}kubeconfig={apiserver.kubeconfig}"
                for use in ("", "authentication-", "authorization-")
            ),
            "--controllers=horizontal-pod-autoscaler-controller",
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--leader-elect=false",
            "--secure-port=0",
        ],
        run=run,
        part="autoscaler",
        log=run / "log",
        die_with_parent=True,
    )
    try:
        yield
    finally:
        process.end_all(run)


def workload_of(lab: Lab, pool: str) -> Key:
    return Key(lab.config.release_namespace, f"{lab.name(pool)}-fast")


async def live(lab: Lab, pool: str) -> Obj:
    return await lab.client.get(STATEFUL_SET, workload_of(lab, pool)) or {"metadata": {}, "spec": {}}


def hpa(lab: Lab, pool: str, low: int, high: int) -> Obj:
    key = workload_of(lab, pool)
    resource = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": key.name, "namespace": key.namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": key.name},
            "minReplicas": low,
            "maxReplicas": high,
            "metrics": [{"type": "Resource", "resource": resource}],
        },
    }


async def scale(lab: Lab, pool: str, count: int, manager: str) -> None:
    """As KEDA and `kubectl scale` do."""
    key = workload_of(lab, pool)
    await lab.client.transport.request(
        "PATCH",
        STATEFUL_SET.path(key.namespace, key.name, "scale"),
        query={"fieldManager": manager},
        body={"spec": {"replicas": count}},
        content_type="application/merge-patch+json",
    )


async def test_an_hpa_has_the_number_to_itself_and_gives_it_back(
    lab: Lab, until: Any, apiserver: Any, autoscaling: None
) -> None:
    await lab.start()
    upgrade = {"canarySeconds": 0, "drainSeconds": 4}
    await lab.pool("auto", lanes=[{"name": "fast", "replicas": {"min": 1, "max": 5}}], upgrade=upgrade)

    async def handed_over() -> bool:
        found = await live(lab, "auto")
        return bool(found["spec"]) and OWN not in dict(holders(found))

    await until(handed_over)
    assert (await live(lab, "auto"))["spec"]["replicas"] == 1, "giving up the field reset it"

    async def count() -> int:
        return int((await live(lab, "auto"))["spec"]["replicas"])

    apiserver.kubectl("apply", "-f", "-", text=json.dumps(hpa(lab, "auto", 3, 5)))
    await until(count, 3, seconds=60.0)
    # the operator writes the same object meanwhile, for other reasons, and leaves the number alone
    await lab.edit(ADAPTER_POOL, "auto", {"upgrade": {"maxUnavailable": 2}, "engine": {"maxModelLen": 4096}})

    async def budget() -> Any:
        found = await lab.client.get(POD_DISRUPTION_BUDGET, workload_of(lab, "auto")) or {}
        return found.get("spec", {}).get("maxUnavailable")

    await until(budget, 2)
    assert await count() == 3
    apiserver.kubectl("apply", "-f", "-", text=json.dumps(hpa(lab, "auto", 1, 2)))
    await until(count, 2, seconds=60.0)
    await lab.until(ADAPTER_POOL, "auto", "Scaled", "True", "Autoscaler")

    key = workload_of(lab, "auto")
    apiserver.kubectl("-n", key.namespace, "delete", "hpa", key.name, "--wait")
    await lab.edit(ADAPTER_POOL, "auto", {"lanes": [{"name": "fast", "replicas": {"min": 4}}]})
    await until(count, 4)
    assert holders(await live(lab, "auto"))[0][0] == OWN
    await lab.until(ADAPTER_POOL, "auto", "Scaled", "True", "Fixed")


async def test_a_hand_is_put_right_and_whoever_insists_is_not_fought(lab: Lab, until: Any) -> None:
    await lab.start()
    await lab.pool("fixed", upgrade={"canarySeconds": 0, "drainSeconds": 0})
    await lab.until(ADAPTER_POOL, "fixed", "Ready", "True")

    async def count() -> int:
        return int((await live(lab, "fixed"))["spec"]["replicas"])

    await scale(lab, "fixed", 0, "keda")
    await until(count, 2)
    insisted = 0

    async def left_alone() -> bool:
        nonlocal insisted
        if await count() == 2:
            insisted += 1
            await scale(lab, "fixed", 1, "keda")
        return bool((await lab.condition(ADAPTER_POOL, "fixed", "Scaled")).get("status") == "False")

    await until(left_alone)
    assert 2 <= insisted <= 8
    assert "keda" in (await lab.condition(ADAPTER_POOL, "fixed", "Scaled"))["message"]
    assert await count() == 1
    # another spec, another chance
    await lab.edit(ADAPTER_POOL, "fixed", {"lanes": [{"name": "fast", "replicas": {"min": 3}, "slots": 8}]})
    await until(count, 3)
    await lab.until(ADAPTER_POOL, "fixed", "Scaled", "True", "Fixed")


async def test_fewer_replicas_only_when_their_tenants_have_moved_and_ended(lab: Lab, until: Any) -> None:
    await lab.start()
    await lab.pool(
        "less",
        lanes=[{"name": "fast", "replicas": {"min": 3}, "slots": 8}],
        placement={"replicasPerTenant": 1},
        upgrade={"canarySeconds": 0, "drainSeconds": 60},
    )
    await lab.until(ADAPTER_POOL, "less", "Degraded", "False", "AllReady")
    tenants = [f"t{n}" for n in range(6)]
    for tenant in tenants:
        await lab.tenant(tenant)
    for tenant in tenants:
        await lab.until(TENANT, tenant, "Ready", "True")

    async def routed() -> dict[str, list[str]]:
        found = {}
        for tenant in tenants:
            pools = (await lab.route(tenant)).get("pools", [])
            found[tenant] = [r for p in pools for lane in p["lanes"] for r in lane["replicas"]]
        return found

    last = [f"{lab.name('less')}-fast-{n}" for n in (1, 2)]
    assert any(set(there) & set(last) for there in (await routed()).values())
    lab.fleet.engines[last[1]].requests = 1
    await lab.edit(ADAPTER_POOL, "less", {"lanes": [{"name": "fast", "replicas": {"min": 1}, "slots": 8}]})

    async def drained() -> bool:
        return all(lab.fleet.engines[name].drained for name in last)

    await until(drained)
    home = f"{lab.name('less')}-fast-0"
    assert all(there == [home] for there in (await routed()).values()), "it drained before its tenants moved"
    assert (await live(lab, "less"))["spec"]["replicas"] == 3, "a request still runs"
    lab.fleet.engines[last[1]].requests = 0

    async def count() -> int:
        return int((await live(lab, "less"))["spec"]["replicas"])

    await until(count, 1)
