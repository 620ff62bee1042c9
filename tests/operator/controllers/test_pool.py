"""AdapterPool on a real API server: made, repaired, never taken from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tenantry.cluster import ADAPTER_POOL, POD_DISRUPTION_BUDGET, SERVICE, STATEFUL_SET, Key

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver


async def test_a_pool_comes_up_and_its_drift_is_repaired(lab: Lab, until: Any) -> None:
    await lab.start()
    await lab.pool("shared")
    await lab.until(ADAPTER_POOL, "shared", "Ready", "True", "Serving")
    workload = Key(lab.config.release_namespace, f"{lab.name('shared')}-fast")
    lane = {
        "name": "fast",
        "statefulSet": workload.name,
        "replicas": 2,
        "readyReplicas": 2,
        "updatedReplicas": 2,
    }
    await until(lambda: field(lab, ADAPTER_POOL, lab.key(ADAPTER_POOL, "shared"), "status", "lanes"), [lane])
    assert (await lab.get(ADAPTER_POOL, "shared") or {})["status"]["observedGeneration"] == 1

    await lab.client.merge_patch(
        STATEFUL_SET, workload, {"spec": {"updateStrategy": {"type": "RollingUpdate"}}}
    )
    await until(lambda: field(lab, STATEFUL_SET, workload, "spec", "updateStrategy", "type"), "OnDelete")
    await lab.client.merge_patch(STATEFUL_SET, workload, {"spec": {"replicas": 0}})
    await until(lambda: field(lab, STATEFUL_SET, workload, "spec", "replicas"), 2)
    for resource in (SERVICE, POD_DISRUPTION_BUDGET):
        await lab.remove(resource, workload)
        await until(lambda r=resource: lab.client.get(r, workload))


async def field(lab: Lab, resource: Any, key: Key, *path: str) -> Any:
    value: Any = await lab.client.get(resource, key)
    for part in path:
        value = (value or {}).get(part)
    return value


async def test_what_belongs_to_others_is_never_taken_over(lab: Lab) -> None:
    taken = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{lab.name('mine')}-fast", "namespace": lab.config.release_namespace},
        "spec": {"ports": [{"port": 80}]},
    }
    theirs = await lab.client.create(taken)
    await lab.start()
    await lab.pool("mine")
    stalled = await lab.until(ADAPTER_POOL, "mine", "Stalled", "True", "NameTaken")
    assert taken["metadata"]["name"] in stalled["message"]
    after = await lab.client.get(SERVICE, Key(lab.config.release_namespace, taken["metadata"]["name"]))
    assert after is not None
    assert after["spec"] == theirs["spec"]


async def test_a_removed_lane_leaves_nothing(lab: Lab, until: Any) -> None:
    await lab.start()
    await lab.pool("lanes", lanes=[{"name": "fast"}, {"name": "bulk"}])
    await lab.until(ADAPTER_POOL, "lanes", "Ready", "True")
    bulk = Key(lab.config.release_namespace, f"{lab.name('lanes')}-bulk")
    await lab.edit(ADAPTER_POOL, "lanes", {"lanes": [{"name": "fast"}]})
    for resource in (STATEFUL_SET, SERVICE, POD_DISRUPTION_BUDGET):
        await until(lambda r=resource: gone(lab, r, bulk))


async def gone(lab: Lab, resource: Any, key: Key) -> bool:
    return await lab.client.get(resource, key) is None
