"""Tier moves on a real API server: make before break in every direction, bounded, resumed, undone."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
from tenantry.api import names
from tenantry.cluster import ADAPTER_POOL, NAMESPACE, POD, TENANT, Key, Obj
from tenantry.controllers import replica
from tenantry.placement import moves

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver

SERVABLE = ("Free", "Smb", "MidMarket", "Enterprise")
PAIRS = list(itertools.permutations(SERVABLE, 2))


async def land(lab: Lab) -> None:
    """A pool for each shared tier, with its replica, and a node for the dedicated one."""
    for tier in SERVABLE[:3]:
        lora = {"lora": {"maxRank": 16}} if tier == "MidMarket" else {}
        await lab.pool(tier.lower(), tiers=[tier], lanes=[{"name": "fast", "slots": 8}], **lora)
    meta = {"name": lab.name("n1"), "labels": {names.CLAIMABLE_LABEL: "true", "lab": lab.suffix}}
    await lab.make({"apiVersion": "v1", "kind": "Node", "metadata": meta})
    for tier in SERVABLE[:3]:
        await lab.until(ADAPTER_POOL, tier.lower(), "Ready", "True")


def tier(lab: Lab, name: str) -> Obj:
    """What an edit of the spec's tier takes along."""
    dedicated = name == "Enterprise"
    return {
        "tier": name,
        "dedicated": {"poolTemplateRef": "gold", "replicas": 1} if dedicated else None,
        "isolation": {"nodeSelector": {"lab": lab.suffix}} if dedicated else None,
    }


def where(lab: Lab, name: str) -> str:
    """The pool that serves the tier."""
    return names.dedicated_pool(lab.name("acme")) if name == "Enterprise" else lab.name(name.lower())


async def serving(lab: Lab) -> list[str]:
    return [pool["name"] for pool in (await lab.route("acme")).get("pools", [])]


async def status(lab: Lab) -> Obj:
    found: Obj = (await lab.get(TENANT, "acme") or {}).get("status") or {}
    return found


async def phases(lab: Lab) -> dict[str, str]:
    return {entry["pool"]: entry["phase"] for entry in (await status(lab)).get("leaving", [])}


async def settled(lab: Lab, name: str) -> None:
    """Wait until all is done that the spec as it is now asks for."""
    generation = (await lab.get(TENANT, "acme") or {})["metadata"]["generation"]
    await lab.until(TENANT, "acme", "Reconciling", "False", "Settled", generation=generation)
    assert (await status(lab))["tier"] == name
    assert await serving(lab) == [where(lab, name)]


async def start(lab: Lab, name: str) -> None:
    await lab.start()
    await land(lab)
    spec = {key: value for key, value in tier(lab, name).items() if value is not None}
    await lab.tenant("acme", **spec)
    await settled(lab, name)


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a test can wait for."""
    monkeypatch.setattr(moves, "SETTLE_SECONDS", 0.0)


async def test_every_pair_of_tiers_flips_at_once_and_empties_the_old_place(
    lab: Lab, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    await start(lab, "Free")
    at = "Free"
    # A walk that takes every pair once: each tier is entered from and left to every other.
    walk = ["Smb", "Free", "MidMarket", "Free", "Enterprise", "Smb", "MidMarket", "Smb", "Enterprise", "MidMarket",
            "Enterprise", "Free"]  # fmt: skip
    assert set(itertools.pairwise(["Free", *walk])) == set(PAIRS)
    for to in walk:
        old = where(lab, at)
        await lab.edit(TENANT, "acme", tier(lab, to))

        async def moved(before: tuple[str, list[str]] = (at, [old]), to: str = to) -> bool:
            now = await status(lab)
            served = [pool["name"] for pool in now["route"]["pools"]]
            assert (now["tier"], served) in (before, (to, [where(lab, to)])), "tier and route flip together"
            return bool(now["tier"] == to)

        await until(moved)
        await settled(lab, to)
        assert await phases(lab) == {}
        live = await lab.client.get(NAMESPACE, Key("", f"tenant-{lab.name('acme')}"))
        assert (live is not None) == (to == "Enterprise")
        at = to


async def test_nothing_is_emptied_before_every_gateway_follows_and_every_request_is_over(
    lab: Lab, until: Any
) -> None:
    await start(lab, "Enterprise")
    uid = (await lab.route("acme"))["pools"][0]["uid"]
    one, two = await lab.gateway("g1", uid), await lab.gateway("g2", uid)
    two.silent = True
    await lab.edit(TENANT, "acme", tier(lab, "Free"))
    waiting = await lab.until(TENANT, "acme", "Reconciling", "True", "Switching")
    assert await serving(lab) == [where(lab, "Free")]
    assert (await status(lab))["tier"] == "Free"
    await until(lambda: says(lab, "gateway `g1` still routes there"))
    one.routes = []
    await until(lambda: says(lab, "gateway `g2` does not answer"))
    two.silent, two.routes, two.requests = False, [], {uid: 2, "elsewhere": 5}
    await lab.until(TENANT, "acme", "Reconciling", "True", "Draining")
    await until(lambda: says(lab, "2 requests are not over"))
    space = Key("", f"tenant-{lab.name('acme')}")
    assert "deletionTimestamp" not in (await lab.client.get(NAMESPACE, space) or {})["metadata"]
    assert waiting["message"].startswith(f"left `{where(lab, 'Enterprise')}`")
    two.requests = {}
    await settled(lab, "Free")
    assert await lab.client.get(NAMESPACE, space) is None


async def says(lab: Lab, text: str) -> bool:
    return text in str((await lab.condition(TENANT, "acme", "Reconciling")).get("message"))


async def test_a_gateway_that_never_follows_and_requests_that_never_end_hold_nobody_for_ever(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(moves, "SWITCH_SECONDS", 1.0)
    monkeypatch.setattr(moves, "DRAIN_SECONDS", 1.0)
    await start(lab, "Enterprise")
    uid = (await lab.route("acme"))["pools"][0]["uid"]
    stuck = await lab.gateway("g1", uid)
    stuck.requests = {uid: 1}
    await lab.edit(TENANT, "acme", tier(lab, "Free"))
    await settled(lab, "Free")


async def test_the_old_place_serves_on_while_the_new_one_cannot(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that never gets ready; from some time on it is called blocked, and it still heals."""
    await start(lab, "Free")
    lab.unready.add(f"{lab.name('smb')}-fast-0")
    await lab.until_unready("smb")
    before = await lab.route("acme")
    await lab.edit(TENANT, "acme", {**tier(lab, "Smb"), "limits": {"maxInFlight": 7}})
    preparing = await lab.until(TENANT, "acme", "Reconciling", "True", "Preparing")
    assert "no replica is ready" in preparing["message"]
    assert "the place of tier Free serves until then" in preparing["message"]
    now = await lab.route("acme")
    assert [now["pools"], now["models"]] == [before["pools"], before["models"]]
    assert (await status(lab))["tier"] == "Free"
    assert (await lab.condition(TENANT, "acme", "Ready"))["status"] == "True"
    monkeypatch.setattr("tenantry.controllers.moving.PREPARE_SECONDS", 0.0)
    await lab.edit(TENANT, "acme", {"limits": {"maxInFlight": 6}})
    await lab.until(TENANT, "acme", "Stalled", "True", "MoveBlocked")
    assert (await lab.condition(TENANT, "acme", "Ready"))["status"] == "True"
    lab.unready.clear()
    await settled(lab, "Smb")
    assert (await lab.route("acme"))["limits"]["maxInFlight"] == 6


async def test_adapters_are_verified_at_the_new_place_first_and_gone_from_the_old_one(
    lab: Lab, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(replica, "STEADY_SECONDS", 3.0)
    await lab.start()
    await land(lab)
    models = [lab.model("chat"), lab.model("tone", "tone")]
    spec = {"models": models, "adapterNamespaces": [lab.config.release_namespace]}
    await lab.tenant("acme", tier="MidMarket", **spec)
    await lab.adapter("tone", "acme", {"1.0.0": "a"}, "1.0.0")
    await settled(lab, "MidMarket")
    old = f"{lab.name('midmarket')}-fast-0"
    held = await lab.served("acme")
    assert list(lab.fleet.engines[old].adapters) == [held["tone"]]
    new = f"{where(lab, 'Enterprise')}-fast-0"
    lab.broken_on[new] = {"sha256:" + "a" * 64: "Corrupt"}
    await lab.edit(TENANT, "acme", tier(lab, "Enterprise"))
    await until(lambda: exists(lab, Key(names.tenant_namespace(lab.name("acme")), new)))
    stalled = await lab.until(TENANT, "acme", "Stalled", "True", "AdapterStalled")
    assert "the place of tier MidMarket serves until then" in stalled["message"]
    assert await serving(lab) == [where(lab, "MidMarket")]
    assert await lab.served("acme") == held
    lab.broken_on.clear()
    lab.fleet.engines[new].broken.clear()
    await settled(lab, "Enterprise")
    assert await lab.served("acme") == held, "the same aliases, the same bytes"
    assert list(lab.fleet.engines[new].adapters) == [held["tone"]]
    assert lab.fleet.engines[old].adapters == {}, "the old replica holds nothing of the tenant"
    base = [lab.model("chat"), lab.model("tone")]
    lab.unready.add(f"{lab.name('free')}-fast-0")
    await lab.until_unready("free")
    await lab.edit(TENANT, "acme", {**tier(lab, "Free"), "models": base, "adapterNamespaces": []})
    await lab.until(TENANT, "acme", "Reconciling", "True", "Preparing")
    assert await lab.served("acme") == held, "a tier without adapters takes none away before it can serve"
    lab.unready.clear()
    await settled(lab, "Free")
    assert set((await lab.served("acme")).values()) == {f"tiny-{lab.suffix}"}


async def exists(lab: Lab, pod: Key) -> bool:
    return await lab.client.get(POD, pod) is not None


async def test_limits_weight_and_keys_move_with_the_route(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    await start(lab, "Free")
    lab.config.tiers[moves_tier("Smb")] = lab.config.tiers[moves_tier("Smb")].model_copy(
        update={"weight": 3, "max_weight": 5}
    )
    key = {"name": "ci", "sha256": "c" * 64}
    lab.unready.add(f"{lab.name('smb')}-fast-0")
    await lab.until_unready("smb")
    edit = {**tier(lab, "Smb"), "limits": {"maxInFlight": 40}, "auth": {"apiKeys": [key]}}
    await lab.edit(TENANT, "acme", edit)
    await lab.until(TENANT, "acme", "Reconciling", "True", "Preparing")
    assert (await lab.route("acme"))["weight"] == 1
    lab.unready.clear()
    await settled(lab, "Smb")
    route = await lab.route("acme")
    assert (route["weight"], route["limits"]["maxInFlight"]) == (3, 40)
    assert (await lab.get(TENANT, "acme") or {})["spec"]["auth"]["apiKeys"] == [key]


def moves_tier(name: str) -> Any:
    from tenantry.api import Tier

    return Tier(name)


async def test_the_spec_changes_again_while_the_tenant_moves(
    lab: Lab, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    await start(lab, "Free")
    new = f"{where(lab, 'Enterprise')}-fast-0"
    lab.unready.add(new)
    await lab.edit(TENANT, "acme", tier(lab, "Enterprise"))
    await until(lambda: exists(lab, Key(names.tenant_namespace(lab.name("acme")), new)))
    await lab.edit(TENANT, "acme", tier(lab, "Free"))  # back, before it served there
    space = Key("", f"tenant-{lab.name('acme')}")

    async def gone() -> bool:
        return await lab.client.get(NAMESPACE, space) is None

    await until(gone, seconds=60.0)
    await settled(lab, "Free")
    await lab.edit(TENANT, "acme", tier(lab, "Enterprise"))
    await until(lambda: exists(lab, Key(names.tenant_namespace(lab.name("acme")), new)))
    await lab.edit(TENANT, "acme", tier(lab, "Smb"))  # to a third
    await until(gone, seconds=60.0)
    await settled(lab, "Smb")
    lab.unready.clear()
    await lab.edit(TENANT, "acme", tier(lab, "Enterprise"))
    await settled(lab, "Enterprise")
    uid = (await lab.route("acme"))["pools"][0]["uid"]
    gateway = await lab.gateway("g1", uid)
    await lab.edit(TENANT, "acme", tier(lab, "Free"))
    await lab.until(TENANT, "acme", "Reconciling", "True", "Switching")
    await lab.edit(TENANT, "acme", tier(lab, "Enterprise"))  # back to a place that was not emptied yet
    await settled(lab, "Enterprise")
    assert (await lab.route("acme"))["pools"][0]["uid"] == uid, "it was never taken down"
    gateway.routes = []


@pytest.mark.parametrize("phase", ["Preparing", "Switching", "Draining", "Emptying"])
async def test_an_operator_that_dies_in_any_phase_is_replaced(
    lab: Lab, until: Any, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    quick(monkeypatch)
    await start(lab, "Enterprise")
    uid = (await lab.route("acme"))["pools"][0]["uid"]
    gateway = await lab.gateway("g1", *([uid] if phase == "Switching" else []))
    gateway.requests = {uid: 1} if phase == "Draining" else {}
    pod = Key(names.tenant_namespace(lab.name("acme")), f"{where(lab, 'Enterprise')}-fast-0")
    if phase == "Emptying":
        await lab.client.merge_patch(POD, pod, {"metadata": {"finalizers": ["tests.example/hold"]}})
    if phase == "Preparing":
        lab.unready.add(f"{lab.name('free')}-fast-0")
        await lab.until_unready("free")
    await lab.edit(TENANT, "acme", tier(lab, "Free"))
    await lab.until(TENANT, "acme", "Reconciling", "True", phase)
    await lab.stop()
    serves = await serving(lab)
    assert serves == [where(lab, "Enterprise" if phase == "Preparing" else "Free")]
    await lab.start()
    await lab.until(TENANT, "acme", "Reconciling", "True", phase)
    assert await serving(lab) == serves
    lab.unready.clear()
    gateway.routes, gateway.requests = [], {}
    if phase == "Emptying":
        await lab.client.merge_patch(POD, pod, {"metadata": {"finalizers": None}})
    await settled(lab, "Free")
    assert await lab.client.get(NAMESPACE, Key("", pod.namespace)) is None


async def test_a_place_that_cannot_be_emptied_is_said_while_the_new_one_serves(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    monkeypatch.setattr(moves, "EMPTY_SECONDS", 1.0)
    await start(lab, "Enterprise")
    pod = Key(names.tenant_namespace(lab.name("acme")), f"{where(lab, 'Enterprise')}-fast-0")
    await lab.client.merge_patch(POD, pod, {"metadata": {"finalizers": ["tests.example/hold"]}})
    await lab.edit(TENANT, "acme", tier(lab, "Free"))
    stalled = await lab.until(TENANT, "acme", "Stalled", "True", "OldPlaceNotEmpty")
    assert "1 pods" in stalled["message"]
    assert (await lab.condition(TENANT, "acme", "Ready"))["status"] == "True"
    await lab.client.merge_patch(POD, pod, {"metadata": {"finalizers": None}})
    await settled(lab, "Free")


async def test_whoever_moves_to_regulated_is_served_by_the_tier_in_force(lab: Lab) -> None:
    await start(lab, "Free")
    await lab.edit(TENANT, "acme", {"tier": "Regulated", "dedicated": {"poolTemplateRef": "gold"}})
    await lab.until(TENANT, "acme", "Stalled", "True", "AttestationNotAvailable")
    assert (await status(lab))["tier"] == "Free"
    assert await serving(lab) == [where(lab, "Free")]
    await lab.edit(TENANT, "acme", tier(lab, "Smb"))
    await settled(lab, "Smb")
