"""Tenants on a real API server: placed, routed, explained, withdrawn; a broken one stops no other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tenantry.cluster import ADAPTER_POOL, CONFIG_MAP, NAMESPACE, POD, TENANT, Key
from tenantry.evidence.report import POOL_PREFIX

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver


async def test_a_free_tenant_is_placed_routed_and_ready(lab: Lab) -> None:
    await lab.start()
    await lab.tenant("acme")
    await lab.until(TENANT, "acme", "Stalled", "True", "NoPool")
    await lab.settled_pool("shared")
    await lab.until(TENANT, "acme", "Ready", "True", "Serving")
    await lab.until(TENANT, "acme", "Reconciling", "False")
    status = (await lab.get(TENANT, "acme") or {})["status"]
    pool = await lab.get(ADAPTER_POOL, "shared") or {}
    replicas = [f"{lab.name('shared')}-fast-{i}" for i in range(2)]
    assert status["tier"] == "Free"
    assert status["endpoint"] == {"url": "http://gateway.example/v1", "models": ["chat"]}
    [placement] = status["placement"]
    assert placement["replicas"] == replicas
    assert placement["reason"] == "the only pool that fits; lane fast: all 2 replicas"
    route = status["route"]
    assert route["limits"]["requestsPerMinute"] == 60
    assert route["models"] == [
        {
            "name": "chat",
            "pool": lab.name("shared"),
            "targets": [{"servedName": f"tiny-{lab.suffix}", "digest": "", "weight": 100}],
        }
    ]
    [routed] = route["pools"]
    assert (routed["uid"], routed["namespace"]) == (pool["metadata"]["uid"], lab.config.release_namespace)
    [lane] = routed["lanes"]
    assert (lane["service"], lane["replicas"]) == (f"{lab.name('shared')}-fast", replicas)
    assert not any(entry["state"] == "Enforced" for entry in status["isolation"])


async def test_a_changed_limit_reaches_the_route(lab: Lab, until: Any) -> None:
    await lab.start()
    await lab.settled_pool("shared")
    await lab.tenant("acme")
    await lab.until(TENANT, "acme", "Ready", "True")
    await lab.edit(TENANT, "acme", {"limits": {"maxInFlight": 7}})

    async def limit() -> Any:
        return (await lab.route("acme"))["limits"]["maxInFlight"]

    await until(limit, 7)


async def test_an_edit_above_the_ceiling_is_refused_and_the_earlier_spec_serves_on(lab: Lab) -> None:
    await lab.start()
    await lab.settled_pool("shared")
    await lab.tenant("acme")
    await lab.until(TENANT, "acme", "Ready", "True", "Serving")
    route = await lab.route("acme")
    await lab.edit(TENANT, "acme", {"limits": {"maxInFlight": 41}})
    stalled = await lab.until(TENANT, "acme", "Stalled", "True", "InvalidSpec")
    assert stalled["message"].startswith("`limits.maxInFlight` must be at most 40")
    assert await lab.route("acme") == route
    await lab.edit(TENANT, "acme", {"limits": {"maxInFlight": 40}})
    await lab.until(TENANT, "acme", "Stalled", "False")
    await lab.until(TENANT, "acme", "Ready", "True", "Serving")


async def test_no_pool_for_the_tier_says_which_pools_there_are(lab: Lab) -> None:
    await lab.start()
    await lab.pool("shared", tiers=["Smb"])
    await lab.tenant("acme")
    stalled = await lab.until(TENANT, "acme", "Stalled", "True", "NoPool")
    assert f"`{lab.name('shared')}` admits Smb only" in stalled["message"]
    ready = await lab.condition(TENANT, "acme", "Ready")
    assert ready["status"] == "False"
    await lab.edit(TENANT, "acme", {"models": [{**lab.model("chat"), "poolRef": "nowhere"}]})
    await lab.until(TENANT, "acme", "Ready", "False")
    placed = await lab.until(TENANT, "acme", "Placed", "False")
    assert placed is not None


async def test_zero_ready_pods_means_not_ready_at_once_and_the_route_stays(lab: Lab) -> None:
    await lab.start()
    await lab.pool("shared", lanes=[{"name": "fast"}])
    await lab.tenant("acme")
    await lab.until(TENANT, "acme", "Ready", "True")
    route = await lab.route("acme")
    lab.unready.add(f"{lab.name('shared')}-fast-0")
    await lab.until(TENANT, "acme", "Ready", "False", "NoReplicaReady")
    assert await lab.route("acme") == route
    lab.unready.clear()
    await lab.until(TENANT, "acme", "Ready", "True")


async def test_regulated_is_accepted_stalled_and_served_by_nothing(lab: Lab) -> None:
    await lab.start()
    await lab.pool("all", tiers=["Free", "MidMarket", "Enterprise", "Regulated"])
    await lab.tenant("vault", tier="Regulated", dedicated={"poolTemplateRef": "gold"})
    stalled = await lab.until(TENANT, "vault", "Stalled", "True", "AttestationNotAvailable")
    assert "nothing less" in stalled["message"]
    status = (await lab.get(TENANT, "vault") or {})["status"]
    assert "route" not in status
    assert "placement" not in status or status["placement"] == []
    assert await lab.client.get(NAMESPACE, Key("", f"tenant-{lab.name('vault')}")) is None
    assert {entry["state"] for entry in status["isolation"]} == {"NotProvided"}


async def test_suspend_and_resume(lab: Lab) -> None:
    await lab.start()
    await lab.pool("shared")
    await lab.tenant("acme", suspend=True)
    await lab.until(TENANT, "acme", "Suspended", "True")
    await lab.until(TENANT, "acme", "Ready", "False", "Suspended")
    await lab.edit(TENANT, "acme", {"suspend": False})
    await lab.until(TENANT, "acme", "Suspended", "False")
    await lab.until(TENANT, "acme", "Ready", "True")


async def test_a_poison_object_stops_no_other(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = await lab.start()
    poisoned = lab.name("poison")
    sane = operator.world.tenant_spec

    def crash(tenant: Any) -> Any:
        if tenant["metadata"]["name"] == poisoned:
            raise RuntimeError("poison")
        return sane(tenant)

    monkeypatch.setattr(operator.world, "tenant_spec", crash)
    await lab.tenant("poison")
    await lab.pool("shared")
    for number in range(5):
        await lab.tenant(f"t{number}")
    for number in range(5):
        await lab.until(TENANT, f"t{number}", "Ready", "True")
    monkeypatch.undo()
    await lab.until(TENANT, "poison", "Ready", "True")


async def test_idle_costs_nothing(lab: Lab, until: Any) -> None:
    operator = await lab.start()
    await lab.settled_pool("shared")
    for number in range(3):
        await lab.tenant(f"t{number}")
    for number in range(3):
        await lab.until(TENANT, f"t{number}", "Reconciling", "False")
    await lab.until(ADAPTER_POOL, "shared", "Reconciling", "False")

    async def counted() -> int:
        status = (await lab.get(ADAPTER_POOL, "shared") or {})["status"]
        return int(status.get("tenants", 0))

    await until(counted, 3)
    report = Key(lab.config.release_namespace, f"{POOL_PREFIX}{lab.name('shared')}")
    await until(lambda: lab.client.get(CONFIG_MAP, report))
    await until(lambda: _idle(operator))
    sent: list[str] = []
    transport = operator.world.setup.client.transport
    original = transport.request

    async def spy(method: str, path: str, **options: Any) -> Any:
        sent.append(f"{method} {path}")
        return await original(method, path, **options)

    transport.request = spy  # type: ignore[method-assign]
    for number in range(3):
        operator.world.setup.enqueue("tenant", Key("", lab.name(f"t{number}")))
    operator.world.setup.enqueue("pool", Key("", lab.name("shared")))
    assert operator.hub is not None
    await until(lambda: _idle(operator))
    assert sent == []


async def _idle(operator: Any) -> bool:
    return all(queue.idle() for queue in operator.hub.queues.values())


async def test_moving_to_another_pool_is_make_before_break(lab: Lab, until: Any) -> None:
    await lab.start()
    await lab.pool("old", lanes=[{"name": "fast"}])
    await lab.tenant("acme")
    await lab.until(TENANT, "acme", "Ready", "True")
    lab.unready.add(f"{lab.name('new')}-fast-0")
    await lab.pool("new", lanes=[{"name": "fast"}])
    await lab.edit(TENANT, "acme", {"models": [{**lab.model("chat"), "poolRef": lab.name("new")}]})
    await lab.until(TENANT, "acme", "Reconciling", "True", "Moving")
    assert [pool["name"] for pool in (await lab.route("acme"))["pools"]] == [lab.name("old")]
    assert (await lab.condition(TENANT, "acme", "Ready"))["status"] == "True"
    lab.unready.clear()
    await lab.until(TENANT, "acme", "Reconciling", "False")
    assert [pool["name"] for pool in (await lab.route("acme"))["pools"]] == [lab.name("new")]


async def test_a_pool_restart_by_hand_rewrites_no_tenant(lab: Lab, until: Any) -> None:
    await lab.start()
    await lab.settled_pool("shared")
    await lab.tenant("acme")
    await lab.until(TENANT, "acme", "Reconciling", "False")
    before = (await lab.get(TENANT, "acme") or {})["metadata"]["resourceVersion"]
    pod = Key(lab.config.release_namespace, f"{lab.name('shared')}-fast-0")
    old = await lab.client.get(POD, pod) or {}
    await lab.remove(POD, pod)

    async def back() -> bool:
        new = await lab.client.get(POD, pod) or {}
        conditions = (new.get("status") or {}).get("conditions") or []
        ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)
        return ready and bool(new["metadata"]["uid"] != old["metadata"]["uid"])

    await until(back)
    await lab.until(ADAPTER_POOL, "shared", "Degraded", "False")
    assert (await lab.get(TENANT, "acme") or {})["metadata"]["resourceVersion"] == before
