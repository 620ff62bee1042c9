"""Upgrades of a pool on a real API server: canaries, drains, rollback, and nothing that nobody asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tenantry.cluster import ADAPTER_POOL, POD, STATEFUL_SET, TENANT, Key, Obj
from tenantry.desired import engine, revision

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver

OLD, BAD = "registry.example/own:1", "registry.example/own:2"
QUICK = {"canarySeconds": 0, "drainSeconds": 4}


def replicas(lab: Lab, pool: str, count: int) -> list[str]:
    return [f"{lab.name(pool)}-fast-{n}" for n in range(count)]


async def pod(lab: Lab, name: str) -> Obj:
    return await lab.client.get(POD, Key(lab.config.release_namespace, name)) or {"metadata": {}, "spec": {}}


async def images(lab: Lab, names: list[str]) -> list[str]:
    found = [await pod(lab, name) for name in names]
    return [one["spec"]["containers"][0]["image"] if one["spec"] else "" for one in found]


async def uids(lab: Lab, names: list[str]) -> dict[str, str]:
    return {name: (await pod(lab, name))["metadata"].get("uid", "") for name in names}


async def settled(lab: Lab, pool: str, until: Any) -> None:
    """The pool's revision counts as the one to go back to."""
    workload = Key(lab.config.release_namespace, f"{lab.name(pool)}-fast")

    async def probe() -> bool:
        history = revision.read(await lab.client.get(STATEFUL_SET, workload))
        return history.current is not None and not history.rolling

    await until(probe)


async def test_one_pod_at_a_time_after_its_requests_have_ended(lab: Lab, until: Any) -> None:
    await lab.start()
    await lab.pool("roll", upgrade=QUICK | {"drainSeconds": 60})
    await settled(lab, "roll", until)
    names = replicas(lab, "roll", 2)
    old, engines = await uids(lab, names), dict(lab.fleet.engines)
    busy = engines[names[1]]
    busy.requests = 1
    await lab.edit(ADAPTER_POOL, "roll", {"engine": {"maxModelLen": 4096}})

    async def drained() -> bool:
        return busy.drained

    await until(drained)
    away: set[str] = set()

    async def replaced() -> bool:
        drained = [name for name in names if engines[name].drained]
        now = await uids(lab, names)
        draining = [name for name in drained if now[name] == old[name]]
        assert len(draining) <= 1, "more than maxUnavailable at once"
        if busy.requests:
            assert now == old, "a pod was ended while a request ran on it"
            away.add("waited")
            busy.requests = 0
        return all(now[name] not in (old[name], "") for name in names)

    await until(replaced, seconds=60.0)
    assert away == {"waited"}
    assert all(engines[name].drained for name in names)
    await lab.until(ADAPTER_POOL, "roll", "Reconciling", "False", "Settled")


async def test_a_canary_that_fails_takes_the_revision_back_until_the_spec_changes(
    lab: Lab, until: Any
) -> None:
    await lab.start()
    await lab.pool("bad", engine={"image": OLD}, upgrade=QUICK)
    await settled(lab, "bad", until)
    names = replicas(lab, "bad", 2)
    first = await uids(lab, names)
    lab.crashing.add(BAD)
    await lab.edit(ADAPTER_POOL, "bad", {"engine": {"image": BAD}})
    stalled = await lab.until(ADAPTER_POOL, "bad", "Stalled", "True", "UpgradeFailed")
    assert "ended 3 times" in stalled["message"]
    await lab.until(ADAPTER_POOL, "bad", "Reconciling", "False")
    assert await images(lab, names) == [OLD, OLD]
    assert (await uids(lab, names))[names[0]] == first[names[0]], "it served all the time"
    assert (await lab.condition(ADAPTER_POOL, "bad", "RolledBack"))["status"] == "True"
    await lab.until(ADAPTER_POOL, "bad", "Ready", "True")

    # neither a restart nor an edit that changes no pod tries it again
    now = await uids(lab, names)
    await lab.stop()
    await lab.start()
    await lab.edit(ADAPTER_POOL, "bad", {"placement": {"maxTenantsPerReplica": 7}})

    async def observed() -> int:
        return int((await lab.get(ADAPTER_POOL, "bad") or {})["status"]["observedGeneration"])

    await until(observed, 3)
    assert (await lab.condition(ADAPTER_POOL, "bad", "Stalled"))["reason"] == "UpgradeFailed"
    assert await uids(lab, names) == now

    lab.crashing.clear()
    await lab.edit(ADAPTER_POOL, "bad", {"upgrade": {"retryToken": "repaired"}})

    async def on_the_new_one() -> bool:
        return await images(lab, names) == [BAD, BAD]

    await until(on_the_new_one, seconds=60.0)
    await lab.until(ADAPTER_POOL, "bad", "Stalled", "False")
    assert (await lab.condition(ADAPTER_POOL, "bad", "RolledBack"))["status"] == "False"


async def test_others_follow_only_when_the_canary_answers_with_the_pools_model(lab: Lab, until: Any) -> None:
    """Ready is what Kubernetes sees; that it serves the right model is what the replica itself says."""
    await lab.start()
    await lab.pool("other", engine={"image": OLD}, upgrade=QUICK)
    await settled(lab, "other", until)
    names = replicas(lab, "other", 2)
    lab.foreign.add(BAD)
    await lab.edit(ADAPTER_POOL, "other", {"engine": {"image": BAD}})
    stalled = await lab.until(ADAPTER_POOL, "other", "Stalled", "True", "UpgradeFailed")
    assert "not the pool's base model" in stalled["message"]
    await lab.until(ADAPTER_POOL, "other", "Reconciling", "False")
    await until(lambda: images(lab, names), [OLD, OLD])


async def test_a_new_release_of_the_operator_rolls_nothing(
    lab: Lab, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lab.start()
    await lab.pool("kept", upgrade=QUICK)
    await settled(lab, "kept", until)
    names = replicas(lab, "kept", 2)
    before = await uids(lab, names)
    await lab.stop()
    monkeypatch.setattr(engine, "GRACE_SECONDS", engine.GRACE_SECONDS + 1)
    await lab.start()
    kept = await lab.until(ADAPTER_POOL, "kept", "TemplateCurrent", "False", "KeptFromEarlierRelease")
    assert "retryToken" in kept["message"]
    await lab.edit(ADAPTER_POOL, "kept", {"placement": {"maxTenantsPerReplica": 9}})
    workload = Key(lab.config.release_namespace, f"{lab.name('kept')}-fast")
    await lab.client.merge_patch(
        STATEFUL_SET, workload, {"spec": {"updateStrategy": {"type": "RollingUpdate"}}}
    )

    async def repaired() -> bool:
        live = await lab.client.get(STATEFUL_SET, workload) or {}
        return bool(live["spec"]["updateStrategy"]["type"] == "OnDelete")

    await until(repaired)
    live = await lab.client.get(STATEFUL_SET, workload) or {}
    assert live["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == engine.GRACE_SECONDS - 1
    assert await uids(lab, names) == before

    await lab.edit(ADAPTER_POOL, "kept", {"upgrade": {"retryToken": "take it"}})

    async def rolled() -> bool:
        now = await uids(lab, names)
        return all(now[name] not in (before[name], "") for name in names)

    await until(rolled, seconds=60.0)
    await lab.until(ADAPTER_POOL, "kept", "TemplateCurrent", "True")


async def test_a_tenant_on_one_replica_moves_before_it_drains(lab: Lab, until: Any) -> None:
    await lab.start()
    await lab.pool("move", placement={"replicasPerTenant": 1}, upgrade=QUICK | {"drainSeconds": 30})
    await settled(lab, "move", until)
    await lab.tenant("ann")
    await lab.until(TENANT, "ann", "Ready", "True")

    def routed(route: Obj) -> list[str]:
        return [r for p in route.get("pools", []) for lane in p["lanes"] for r in lane["replicas"]]

    engines = dict(lab.fleet.engines)
    [home] = routed(await lab.route("ann"))
    await lab.edit(ADAPTER_POOL, "move", {"engine": {"maxModelLen": 4096}})
    names = replicas(lab, "move", 2)
    before = await uids(lab, names)

    async def done() -> bool:
        drained = [replica for replica in names if engines[replica].drained]
        there = routed(await lab.route("ann"))
        now = await uids(lab, names)
        for replica in drained:
            if now[replica] == before[replica]:
                assert there != [replica], "it drains while its only tenant has no other replica"
        return all(now[name] not in (before[name], "") for name in names)

    await until(done, seconds=60.0)
    assert engines[home].drained
    await lab.until(TENANT, "ann", "Ready", "True")
