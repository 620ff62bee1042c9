"""Adapters on a real API server: no traffic before every replica has the bytes, none lost when versions change."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest
from tenantry.api.names import served_name
from tenantry.cluster import ADAPTER, ADAPTER_POOL, EVENT, POD, TENANT, Key
from tenantry.controllers import pods
from tenantry.promotion.retire import GRACE_SECONDS

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver

VERSIONS = {"1.0.0": "a", "2.0.0": "b"}


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def served(lab: Lab, version: str, adapter: str = "tone", versions: dict[str, str] = VERSIONS) -> str:
    return served_name(lab.config.release_namespace, adapter, version, digest(versions[version]))


async def fleet(lab: Lab, *adapters: str, **lora: Any) -> list[str]:
    """A LoRA pool of two replicas and a tenant with one model per adapter and one without; the replicas."""
    await lab.settled_pool("lora", tiers=["MidMarket"], lora={"maxRank": 16, **lora})
    models = [lab.model("chat"), *(lab.model(name, name) for name in adapters)]
    await lab.tenant(
        "maple", tier="MidMarket", models=models, adapterNamespaces=[lab.config.release_namespace]
    )
    return [f"{lab.name('lora')}-fast-{i}" for i in range(2)]


def held(lab: Lab, replica: str) -> set[str]:
    return set(lab.fleet.engines[replica].adapters)


async def test_adapters_load_everywhere_before_the_route_names_them(lab: Lab, until: Any) -> None:
    await lab.start()
    replicas = await fleet(lab, "tone", "triage")
    lab.fleet.held_back.add(digest("a"))
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.adapter("triage", "maple", {"1.0.0": "c"}, "1.0.0")
    await lab.until(ADAPTER, "triage", "Ready", "True", "Serving")
    triage = served(lab, "1.0.0", "triage", {"1.0.0": "c"})
    await until(lambda: lab.served("maple"), {"chat": f"tiny-{lab.suffix}", "triage": triage})
    assert (await lab.condition(ADAPTER, "tone", "Ready"))["status"] == "Unknown"
    assert (await lab.condition(TENANT, "maple", "Ready"))["status"] == "Unknown"

    lab.fleet.held_back.clear()
    await lab.until(ADAPTER, "tone", "Ready", "True")
    await lab.until(TENANT, "maple", "Ready", "True")
    assert (await lab.served("maple"))["tone"] == served(lab, "1.0.0")
    for replica in replicas:
        assert held(lab, replica) == {served(lab, "1.0.0"), triage}
    [channel] = (await lab.get(ADAPTER, "tone") or {})["status"]["channels"]
    assert (channel["activeVersion"], channel["activeDigest"]) == ("1.0.0", digest("a"))
    assert (channel["replicasLoaded"], channel["replicas"]) == (2, 2)
    tenant = (await lab.get(TENANT, "maple") or {})["status"]
    integrity = {entry["guarantee"]: entry["state"] for entry in tenant["isolation"]}
    assert integrity["AdapterIntegrity"] == "Enforced", "the engines reported the digests"
    assert integrity["FairShare"] == "Configured"


async def test_three_promotions_never_leave_a_routed_name_undeclared(lab: Lab, until: Any) -> None:
    await lab.start()
    replicas = await fleet(lab, "tone")
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(TENANT, "maple", "Ready", "True")
    broken: list[str] = []

    async def watchdog() -> None:
        """What a gateway would meet: each routed name is held by each routed replica."""
        while True:
            route = await lab.route("maple")
            names = [t["servedName"] for m in route["models"] for t in m["targets"] if t["digest"]]
            for lane in route["pools"][0]["lanes"]:
                for replica in lane["replicas"]:
                    broken.extend(name for name in names if name not in held(lab, replica))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watchdog())
    for version in ("2.0.0", "1.0.0", "2.0.0"):
        await lab.edit(ADAPTER, "tone", {"channels": [{"name": "stable", "version": version}]})
        await until(lambda v=version: _serves(lab, served(lab, v)))
    switched = time.monotonic()
    await until(lambda: _holds(lab, replicas, {served(lab, "2.0.0")}))
    assert time.monotonic() - switched > GRACE_SECONDS - 1, "gateways learn of a route a moment later"
    watching.cancel()
    assert broken == []


async def _serves(lab: Lab, name: str) -> bool:
    return (await lab.served("maple")).get("tone") == name


async def _holds(lab: Lab, replicas: list[str], names: set[str]) -> bool:
    return all(held(lab, replica) == names for replica in replicas)


@pytest.mark.parametrize(
    "fault", ["DigestMismatch", "SourceUnavailable", "BaseModelMismatch", "RankTooLarge"]
)
async def test_a_bad_version_stalls_with_its_reason_while_all_others_serve(
    lab: Lab, fault: str, until: Any
) -> None:
    await lab.start()
    await fleet(lab, "tone", "triage")
    await lab.adapter("tone", "maple", {"1.0.0": "a"}, "1.0.0")
    await lab.adapter("triage", "maple", {"1.0.0": "c"}, "1.0.0")
    await lab.until(TENANT, "maple", "Ready", "True")
    before = await lab.served("maple")
    rank = 8
    if fault == "BaseModelMismatch":
        for engine in lab.fleet.engines.values():
            engine.broken[digest("e")] = fault
    elif fault == "RankTooLarge":
        rank = 64
    else:
        lab.fleet.refused[digest("e")] = (fault, "as the test wants")
    bad = {"version": "2.0.0", "digest": digest("e"), "source": "oci://registry.example/tone:2", "rank": rank}
    good = (await lab.get(ADAPTER, "tone") or {})["spec"]["versions"]
    change = {"versions": [*good, bad], "channels": [{"name": "stable", "version": "2.0.0"}]}
    await lab.edit(ADAPTER, "tone", change)
    stalled = await lab.until(ADAPTER, "tone", "Stalled", "True", fault)
    assert stalled["message"]
    assert (await lab.condition(ADAPTER, "tone", "Ready"))["status"] == "True"
    assert (await lab.condition(TENANT, "maple", "Ready"))["status"] == "True"
    assert await lab.served("maple") == before
    if fault == "RankTooLarge":
        assert not any(
            "2.0.0" in name for e in lab.fleet.engines.values() for told in e.declared for name in told
        )

    await lab.edit(ADAPTER, "tone", {"channels": [{"name": "stable", "version": "1.0.0"}]})
    await lab.until(ADAPTER, "tone", "Stalled", "False")


async def test_the_fetcher_is_asked_on_the_adapters_own_terms(lab: Lab, until: Any) -> None:
    """With the Secret of its namespace and the signers that it names; the condition says who signed."""
    await lab.start()
    await fleet(lab, "tone")
    release = {"version": "1.0.0", "digest": digest("a"), "source": "s3://s3.example/models/tone", "rank": 8}
    verification = {"identities": [{"issuer": "https://issuer.example", "subject": "ci@acme.example"}]}
    await lab.adapter("tone", "maple", {"1.0.0": "a"}, "1.0.0")
    await lab.until(ADAPTER, "tone", "ArtifactsVerified", "True", "DigestMatches")
    change = {
        "versions": [release | {"version": "2.0.0", "digest": digest("b"), "secretRef": "bucket"}],
        "channels": [{"name": "stable", "version": "2.0.0"}],
        "verification": verification,
    }
    await lab.edit(ADAPTER, "tone", change)
    verified = await lab.until(ADAPTER, "tone", "ArtifactsVerified", "True", "SignatureVerified")
    assert verified["message"].endswith("signed by key `release`")
    await lab.until(ADAPTER, "tone", "Ready", "True")
    asked = [body for body in lab.fleet.transfers if body["digest"] == digest("b")]
    assert any(body["replicas"] for body in asked), "pushed, too"
    for body in asked:
        assert (body["namespace"], body["secretRef"]) == (lab.config.release_namespace, "bucket")
        assert body["verification"] == {"policy": "Required", **verification}
    await until(lambda: _active_secret(lab), "bucket")


async def _active_secret(lab: Lab) -> str | None:
    channels = ((await lab.get(ADAPTER, "tone") or {}).get("status") or {}).get("channels") or [{}]
    found = channels[0].get("activeSecretRef")
    return None if found is None else str(found)


async def test_what_is_not_signed_as_asked_is_not_served_or_is_told(lab: Lab, until: Any) -> None:
    await lab.start()
    replicas = await fleet(lab, "tone")
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(TENANT, "maple", "Ready", "True")
    # Replicas hold the very bytes already, by another way: that proves the digest, and no signature.
    for replica in replicas:
        lab.fleet.engines[replica].blobs.add(digest("b"))
    lab.fleet.held_back.add(digest("b"))
    change = {"verification": {"keyRef": "release"}, "channels": [{"name": "stable", "version": "2.0.0"}]}
    await lab.edit(ADAPTER, "tone", change)
    await until(lambda: _holds(lab, replicas, {served(lab, "1.0.0"), served(lab, "2.0.0")}))
    await lab.until(ADAPTER, "tone", "Reconciling", "True", "Verifying")
    assert (await lab.served("maple"))["tone"] == served(lab, "1.0.0")

    lab.fleet.held_back.clear()
    lab.fleet.refused[digest("b")] = ("SignatureInvalid", "it was made with another key")
    await lab.until(ADAPTER, "tone", "Stalled", "True", "SignatureInvalid")
    assert (await lab.condition(ADAPTER, "tone", "ArtifactsVerified"))["status"] == "False"
    assert (await lab.condition(ADAPTER, "tone", "Ready"))["status"] == "True"
    assert (await lab.served("maple"))["tone"] == served(lab, "1.0.0")

    lab.fleet.refused.clear()
    lab.fleet.signatures[digest("b")] = {
        "verified": False,
        "reason": "SignatureMissing",
        "message": "there is none",
    }
    await lab.edit(ADAPTER, "tone", {"verification": {"keyRef": "release", "policy": "Warn"}})
    told = await lab.until(ADAPTER, "tone", "ArtifactsVerified", "True", "SignatureMissing")
    assert "not signed as asked: there is none" in told["message"]
    await until(lambda: _serves(lab, served(lab, "2.0.0")))


async def test_a_registry_outage_heals_by_itself(lab: Lab) -> None:
    await lab.start()
    await fleet(lab, "tone")
    lab.fleet.refused[digest("a")] = ("SourceUnavailable", "503")
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(ADAPTER, "tone", "Stalled", "True", "SourceUnavailable")
    stalled = await lab.until(TENANT, "maple", "Stalled", "True", "AdapterStalled")
    assert "SourceUnavailable: 503" in stalled["message"]
    lab.fleet.refused.clear()
    await lab.until(ADAPTER, "tone", "Ready", "True")
    await lab.until(TENANT, "maple", "Ready", "True")


async def test_moving_an_adapter_to_another_pool_is_make_before_break(lab: Lab, until: Any) -> None:
    await lab.start()
    await fleet(lab, "tone")
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(TENANT, "maple", "Ready", "True")
    lab.fleet.held_back.add(digest("a"))
    await lab.settled_pool("next", tiers=["MidMarket"], lora={}, lanes=[{"name": "fast"}])
    await lab.edit(TENANT, "maple", {"models": [{**lab.model("tone", "tone"), "poolRef": lab.name("next")}]})
    await lab.until(TENANT, "maple", "Reconciling", "True", "Moving")
    await until(lambda: _told(lab, f"{lab.name('next')}-fast-0", served(lab, "1.0.0")))
    assert [pool["name"] for pool in (await lab.route("maple"))["pools"]] == [lab.name("lora")]
    lab.fleet.held_back.clear()
    await lab.until(TENANT, "maple", "Reconciling", "False")
    assert [pool["name"] for pool in (await lab.route("maple"))["pools"]] == [lab.name("next")]
    await until(lambda: _holds(lab, [f"{lab.name('lora')}-fast-{i}" for i in range(2)], set()))


async def _told(lab: Lab, replica: str, name: str) -> bool:
    return name in held(lab, replica)


async def test_an_operator_crash_in_the_middle_resumes(lab: Lab, until: Any) -> None:
    await lab.start()
    replicas = await fleet(lab, "tone")
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(TENANT, "maple", "Ready", "True")
    lab.fleet.held_back.add(digest("b"))
    await lab.edit(ADAPTER, "tone", {"channels": [{"name": "stable", "version": "2.0.0"}]})
    await lab.until(ADAPTER, "tone", "Reconciling", "True")
    await lab.stop()
    versions = [
        v for v in (await lab.get(ADAPTER, "tone") or {})["spec"]["versions"] if v["version"] == "2.0.0"
    ]
    await lab.edit(ADAPTER, "tone", {"versions": versions})  # Git drops the version that is still active
    for replica in replicas:
        lab.fleet.engines[replica].declared.clear()
    await lab.start()
    await lab.until(ADAPTER, "tone", "Reconciling", "True", "Verifying")
    assert (await lab.served("maple"))["tone"] == served(lab, "1.0.0")
    for replica in replicas:
        for told in lab.fleet.engines[replica].declared:
            assert served(lab, "1.0.0") in told, "a restart took the active version away"
    lab.fleet.held_back.clear()
    await until(lambda: _serves(lab, served(lab, "2.0.0")))


async def test_a_restarted_replica_is_told_again_at_once(lab: Lab, until: Any) -> None:
    await lab.start()
    replicas = await fleet(lab, "tone")
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(TENANT, "maple", "Ready", "True")
    engine = lab.fleet.engines[replicas[0]]
    engine.adapters, engine.blobs, engine.fence = {}, set(), (0, 0)
    pod = await lab.client.get(POD, Key(lab.config.release_namespace, replicas[0])) or {}
    await lab.set_pod(pod, ready=True, container="containerd://another")
    await until(lambda: _holds(lab, replicas[:1], {served(lab, "1.0.0")}), seconds=5.0)
    await until(lambda: _loaded(lab), 2)


async def _loaded(lab: Lab) -> int:
    [channel] = (await lab.get(ADAPTER, "tone") or {})["status"]["channels"]
    return int(channel.get("replicasLoaded", 0))


async def test_zero_ready_replicas_means_not_ready_and_it_comes_back(lab: Lab) -> None:
    await lab.start()
    replicas = await fleet(lab, "tone")
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(ADAPTER, "tone", "Ready", "True")
    lab.unready.update(replicas)
    await lab.until(ADAPTER, "tone", "Ready", "False", "NoReplicaReady")
    lab.unready.clear()
    await lab.until(ADAPTER, "tone", "Ready", "True")


async def test_adapter_first_then_tenant_then_pool(lab: Lab) -> None:
    await lab.start()
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(ADAPTER, "tone", "Stalled", "True", "TenantNotFound")
    models = [lab.model("tone", "tone")]
    await lab.tenant(
        "maple", tier="MidMarket", models=models, adapterNamespaces=[lab.config.release_namespace]
    )
    await lab.until(TENANT, "maple", "Stalled", "True", "NoPool")
    await lab.pool("lora", tiers=["MidMarket"], lora={})
    await lab.until(ADAPTER, "tone", "Ready", "True")
    await lab.until(TENANT, "maple", "Ready", "True")


async def test_one_commit_brings_adapter_and_tenant_in_any_order_and_nothing_is_said_to_be_wrong(
    lab: Lab, until: Any
) -> None:
    await lab.start()
    await lab.settled_pool("lora", tiers=["MidMarket"], lora={"maxRank": 16})
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await until(lambda: asyncio.sleep(0, Key(lab.config.release_namespace, "tone") in store_keys(lab)))
    models = [lab.model("tone", "tone")]
    await lab.tenant(
        "maple", tier="MidMarket", models=models, adapterNamespaces=[lab.config.release_namespace]
    )
    await lab.until(ADAPTER, "tone", "Ready", "True")
    await lab.until(TENANT, "maple", "Ready", "True")
    events = [event async for event in lab.client.list(EVENT, namespace=lab.config.release_namespace)]
    about = [event["reason"] for event in events if event["regarding"]["name"] == "tone"]
    assert "TenantNotFound" not in about


def store_keys(lab: Lab) -> set[Key]:
    """Adapters that the operator knows of."""
    assert lab.operator is not None
    return set(lab.operator.world.store.keys(ADAPTER))


async def test_another_operator_writes_to_no_tenant_and_no_adapter(lab: Lab, until: Any) -> None:
    await lab.start()
    pool = {
        "tiers": ["MidMarket"],
        "lora": {"maxRank": 16},
        "lanes": [{"name": "fast", "replicas": {"min": 3}}],
    }
    await lab.settled_pool("lora", **pool)
    home = lab.config.release_namespace
    names = [f"maple{number}" for number in range(6)]
    for name in names:
        await lab.adapter(name, name, VERSIONS, "1.0.0")
        await lab.tenant(name, tier="MidMarket", models=[lab.model("tone", name)], adapterNamespaces=[home])
    for name in names:
        await lab.until(TENANT, name, "Ready", "True")
        await lab.until(ADAPTER, name, "Ready", "True")
    await until(lambda: asyncio.sleep(0, idle(lab)))

    async def versions() -> dict[str, str]:
        found = {}
        for kind in (TENANT, ADAPTER):
            for name in names:
                found[f"{kind.plural}/{name}"] = (await lab.get(kind, name) or {})["metadata"][
                    "resourceVersion"
                ]
        return found

    before = await versions()
    await lab.stop()
    operator = await lab.start()
    replicas = [f"{lab.name('lora')}-fast-{number}" for number in range(3)]
    await until(lambda: asyncio.sleep(0, all(observed(lab, replica) for replica in replicas)))
    for name in names:  # once more, now that all is known
        operator.hub.enqueue("adapter", lab.key(ADAPTER, name))
        operator.hub.enqueue("tenant", lab.key(TENANT, name))
    await until(lambda: asyncio.sleep(0, idle(lab)))
    assert await versions() == before


def idle(lab: Lab) -> bool:
    """Whether the operator has nothing to do."""
    assert lab.operator is not None
    return all(queue.idle() for queue in lab.operator.hub.queues.values())


def observed(lab: Lab, replica: str) -> bool:
    """Whether the operator has heard the replica's pod out."""
    assert lab.operator is not None
    world = lab.operator.world
    pool = world.pool(lab.name("lora"))
    pod = world.pod(pool, replica) if pool is not None else None
    if pod is None:
        return False
    return world.observations.get(Key(lab.name("lora"), replica), pods.incarnation(pod)) is not None


async def test_consent_withdrawn_or_adapter_deleted_leaves_nothing_on_replicas(lab: Lab, until: Any) -> None:
    await lab.start()
    replicas = await fleet(lab, "tone", "triage")
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.adapter("triage", "maple", {"1.0.0": "c"}, "1.0.0")
    await lab.until(TENANT, "maple", "Ready", "True")
    await lab.remove(ADAPTER, lab.key(ADAPTER, "triage"))
    await until(lambda: _holds(lab, replicas, {served(lab, "1.0.0")}))
    assert set(await lab.served("maple")) == {"chat", "tone"}
    await lab.edit(TENANT, "maple", {"adapterNamespaces": [], "models": [lab.model("chat")]})
    await lab.until(ADAPTER, "tone", "Stalled", "True", "NotBound")
    await until(lambda: _holds(lab, replicas, set()))
    assert set(await lab.served("maple")) == {"chat"}


async def test_a_deleted_tenant_leaves_nothing_on_replicas(lab: Lab, until: Any) -> None:
    await lab.start()
    replicas = await fleet(lab, "tone")
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(TENANT, "maple", "Ready", "True")
    await lab.remove(TENANT, lab.key(TENANT, "maple"))
    await until(lambda: _holds(lab, replicas, set()))
    await lab.until(ADAPTER, "tone", "Stalled", "True", "TenantNotFound")
    pool = lab.key(ADAPTER_POOL, "lora")

    async def tenants() -> int:
        return int(((await lab.client.get(ADAPTER_POOL, pool) or {})["status"]).get("tenants", 0))

    await until(tenants, 0)


async def test_a_pools_limit_never_takes_the_whole_set_down(lab: Lab) -> None:
    await lab.start()
    await fleet(lab, "tone", maxRegistered=1)
    for engine in lab.fleet.engines.values():
        engine.limit = 1
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0")
    await lab.until(ADAPTER, "tone", "Ready", "True")
    await lab.adapter("triage", "maple", {"1.0.0": "c"}, "1.0.0")
    models = [lab.model("chat"), lab.model("tone", "tone"), lab.model("triage", "triage")]
    await lab.edit(TENANT, "maple", {"models": models})
    await lab.until(TENANT, "maple", "Stalled", "True", "TooLarge")
    await lab.until(ADAPTER, "triage", "Stalled", "True", "PoolFull")
    assert (await lab.condition(ADAPTER, "tone", "Ready"))["status"] == "True"


async def test_another_tenants_adapter_cannot_be_used(lab: Lab) -> None:
    await lab.start()
    await fleet(lab, "tone")
    await lab.tenant("other", tier="MidMarket", adapterNamespaces=[lab.config.release_namespace])
    await lab.adapter("tone", "other", VERSIONS, "1.0.0")
    await lab.until(TENANT, "maple", "Stalled", "True", "AdapterNotBound")
    assert set(await lab.served("maple")) == {"chat"}


async def test_create_and_delete_of_one_name_again_and_again(lab: Lab, until: Any) -> None:
    await lab.start()
    replicas = await fleet(lab, "tone")
    for letter in "abcab":
        await lab.adapter("tone", "maple", {"1.0.0": letter}, "1.0.0")
        name = served_name(lab.config.release_namespace, "tone", "1.0.0", digest(letter))
        await until(lambda n=name: _serves(lab, n))
        await lab.remove(ADAPTER, lab.key(ADAPTER, "tone"))
        await until(lambda: _serves(lab, ""), False)
    await until(lambda: _holds(lab, replicas, set()))
