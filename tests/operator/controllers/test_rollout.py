"""Rollouts on a real API server: weights in the route follow what replicas prove and what gateways count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from support.argocd import health
from tenantry.api.names import served_name
from tenantry.cluster import ADAPTER, TENANT
from tenantry.promotion import machine

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver

VERSIONS = {"1.0.0": "a", "2.0.0": "b", "3.0.0": "c"}
STEPS = [{"weight": 20}, {"weight": 60}]
ERRORS = [{"metric": "ErrorsPerThousand", "threshold": 100, "minSamples": 10}]


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def name_of(lab: Lab, version: str) -> str:
    return served_name(lab.config.release_namespace, "tone", version, digest(VERSIONS[version]))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways are asked often."""
    monkeypatch.setattr(machine, "LOOK_SECONDS", 0.1)


@dataclass
class Watch:
    """Every state of the route that was seen, and what was wrong in one of them."""

    lab: Lab
    seen: list[dict[str, int]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    async def follow(self) -> None:
        """What a gateway would meet: each name with traffic is held by each routed replica, and has answered there."""
        while True:
            route = await self.lab.route("maple")
            model = next(model for model in route["models"] if model["name"] == "tone")
            weights = {target["servedName"]: target["weight"] for target in model["targets"]}
            if not self.seen or self.seen[-1] != weights:
                self.seen.append(weights)
            for replica in route["pools"][0]["lanes"][0]["replicas"]:
                engine = self.lab.fleet.engines[replica]
                self.broken += [name for name in weights if name not in engine.adapters]
                self.broken += [f"unproven {name}" for name in weights if name not in engine.smoked]
            await asyncio.sleep(0.02)

    async def now(self, name: str) -> int:
        return self.weights(name)[-1]

    def weights(self, name: str) -> list[int]:
        return [state.get(name, 0) for state in self.seen]


@contextmanager
def watched(lab: Lab) -> Iterator[Watch]:
    watch = Watch(lab)
    task = asyncio.create_task(watch.follow())
    try:
        yield watch
    finally:
        task.cancel()
    assert watch.broken == []


async def count(lab: Lab, name: str, answered: int, failed: int = 0) -> None:
    """A gateway that counts so many more each time, for ever."""
    total = [0, 0]
    while True:
        total = [total[0] + answered, total[1] + failed]
        kind = "tenantry_gateway_rollout_requests"
        lab.fleet.gateway = (
            f"# TYPE {kind} counter\n"
            f'{kind}_total{{served="{name}",outcome="answered"}} {total[0]}.0\n'
            f'{kind}_total{{served="{name}",outcome="failed"}} {total[1]}.0\n'
        )
        await asyncio.sleep(0.05)


@contextmanager
def traffic(lab: Lab, version: str, answered: int = 5, failed: int = 0) -> Iterator[None]:
    task = asyncio.create_task(count(lab, name_of(lab, version), answered, failed))
    try:
        yield
    finally:
        task.cancel()
        lab.fleet.gateway = ""


async def served_one(lab: Lab, **rollout: Any) -> None:
    """1.0.0 is served by two replicas."""
    await lab.start()
    await lab.settled_pool("lora", tiers=["MidMarket"], lora={"maxRank": 16})
    models = [lab.model("tone", "tone")]
    await lab.tenant(
        "maple", tier="MidMarket", models=models, adapterNamespaces=[lab.config.release_namespace]
    )
    await lab.adapter("tone", "maple", VERSIONS, "1.0.0", rollout=rollout)
    await lab.until(TENANT, "maple", "Ready", "True")


async def ask(lab: Lab, stable: str, canary: tuple[str, int] | None = None, **rollout: Any) -> None:
    channels: list[dict[str, Any]] = [{"name": "stable", "version": stable}]
    if canary is not None:
        channels.append({"name": "canary", "version": canary[0], "weight": canary[1]})
    change: dict[str, Any] = {"channels": channels}
    if rollout:
        change["rollout"] = rollout
    await lab.edit(ADAPTER, "tone", change)


async def weights(lab: Lab) -> dict[str, int]:
    [model] = (await lab.route("maple"))["models"]
    return {target["servedName"]: target["weight"] for target in model["targets"]}


async def status(lab: Lab) -> dict[str, Any]:
    found = (await lab.get(ADAPTER, "tone") or {})["status"]
    assert isinstance(found, dict)
    return found


async def argo(lab: Lab) -> str:
    return health(await lab.get(ADAPTER, "tone") or {})[0]


async def test_steps_on_data_up_to_all_of_the_traffic(lab: Lab, until: Any) -> None:
    await served_one(lab, steps=STEPS, analysis=ERRORS)
    assert await argo(lab) == "Healthy"
    with watched(lab) as watch:
        await ask(lab, "2.0.0")
        await until(lambda: weights(lab), {name_of(lab, "1.0.0"): 80, name_of(lab, "2.0.0"): 20})
        assert await argo(lab) == "Progressing"
        told = (await status(lab))["rollout"]
        assert (told["phase"], told["step"], told["weight"], told["attempt"]) == ("Shift", 0, 20, 2)
        await asyncio.sleep(0.5)  # many looks at gateways that count nothing
        assert (await status(lab))["rollout"]["weight"] == 20, "no data never succeeds"
        with traffic(lab, "2.0.0"):
            await until(lambda: weights(lab), {name_of(lab, "2.0.0"): 100})
        await until(lambda: watch.now(name_of(lab, "2.0.0")), 100)
    assert watch.weights(name_of(lab, "2.0.0")) == [0, 20, 60, 100]
    await until(lambda: argo(lab), "Healthy")
    done = await status(lab)
    assert (done["lastPromoted"]["version"], done["rollout"]["phase"]) == ("2.0.0", "Promoted")
    assert done["rollout"]["analysis"][0]["samples"] >= 10
    assert [past["version"] for past in done["history"]] == ["1.0.0"]
    assert (await lab.condition(ADAPTER, "tone", "RolloutHealthy"))["status"] == "True"


async def test_a_failing_version_is_rolled_back_and_not_tried_again_until_git_says_so(
    lab: Lab, until: Any
) -> None:
    await served_one(lab, steps=STEPS, analysis=ERRORS)
    with watched(lab), traffic(lab, "2.0.0", answered=1, failed=4):
        await ask(lab, "2.0.0")
        stalled = await lab.until(ADAPTER, "tone", "Stalled", "True", "AnalysisFailed")
        assert "`ErrorsPerThousand` was 8" in stalled["message"]
        await until(lambda: weights(lab), {name_of(lab, "1.0.0"): 100})
        for kind, value in (("Ready", "True"), ("RolledBack", "True"), ("RolloutHealthy", "False")):
            assert (await lab.condition(ADAPTER, "tone", kind))["status"] == value
        assert await argo(lab) == "Degraded"
        await until(lambda: _undeclared(lab, "2.0.0"))
        await lab.stop()
        await lab.start()
        await lab.until(ADAPTER, "tone", "RolledBack", "True")
        [failed] = (await status(lab))["failedRevisions"]
        assert (failed["version"], failed["reason"]) == ("2.0.0", "AnalysisFailed")
    with watched(lab), traffic(lab, "2.0.0"):
        await ask(lab, "2.0.0", steps=STEPS, analysis=ERRORS, retryToken="again")
        await until(lambda: weights(lab), {name_of(lab, "2.0.0"): 100})
    assert (await status(lab))["rollout"]["attempt"] == 3
    await lab.until(ADAPTER, "tone", "RolledBack", "False")


async def _undeclared(lab: Lab, version: str) -> bool:
    return all(name_of(lab, version) not in engine.adapters for engine in lab.fleet.engines.values())


async def test_a_version_that_cannot_answer_gets_no_traffic_and_heals(lab: Lab, until: Any) -> None:
    await served_one(lab)
    engine = lab.fleet.engines[f"{lab.name('lora')}-fast-1"]
    engine.dumb[digest("b")] = 503  # busy: it is asked again
    with watched(lab):
        await ask(lab, "2.0.0")
        await lab.until(ADAPTER, "tone", "Reconciling", "True", "Smoke")
        engine.dumb[digest("b")] = 422
        stalled = await lab.until(ADAPTER, "tone", "Stalled", "True", "SmokeFailed")
        assert f"replica `{lab.name('lora')}-fast-1`: POST /admin/v1/smoke" in stalled["message"]
        assert await weights(lab) == {name_of(lab, "1.0.0"): 100}
        engine.dumb.clear()
        await lab.stop()  # so that it is asked at once, and not after a while
        await lab.start()
        await until(lambda: weights(lab), {name_of(lab, "2.0.0"): 100})


async def test_a_restarted_operator_goes_on_where_it_was(lab: Lab, until: Any) -> None:
    await served_one(lab, steps=STEPS, analysis=ERRORS)
    with watched(lab) as watch:
        await ask(lab, "2.0.0")
        await until(lambda: weights(lab), {name_of(lab, "1.0.0"): 80, name_of(lab, "2.0.0"): 20})
        before = (await status(lab))["rollout"]
        await lab.stop()
        await lab.start()
        with traffic(lab, "2.0.0"):
            await until(lambda: weights(lab), {name_of(lab, "2.0.0"): 100})
        after = (await status(lab))["rollout"]
        await until(lambda: watch.now(name_of(lab, "2.0.0")), 100)
    assert watch.weights(name_of(lab, "2.0.0")) == [0, 20, 60, 100]
    assert (after["attempt"], after["startedAt"]) == (before["attempt"], before["startedAt"])


async def test_a_gateway_that_does_not_tell_is_no_data(lab: Lab, until: Any) -> None:
    await served_one(lab, steps=STEPS[:1], analysis=ERRORS)
    await ask(lab, "2.0.0")
    await until(lambda: weights(lab), {name_of(lab, "1.0.0"): 80, name_of(lab, "2.0.0"): 20})
    with traffic(lab, "2.0.0"):
        lab.fleet.broken_gateway = True
        await asyncio.sleep(0.5)
        assert (await status(lab))["rollout"]["phase"] == "Shift"
        lab.fleet.broken_gateway = False
        await until(lambda: weights(lab), {name_of(lab, "2.0.0"): 100})


async def test_a_canary_by_hand_its_promotion_and_a_third_version(lab: Lab, until: Any) -> None:
    await served_one(lab, steps=[{"weight": 10}, {"weight": 50, "pauseSeconds": 604_800}])
    with watched(lab) as watch:
        await ask(lab, "1.0.0", ("2.0.0", 30))
        await until(lambda: weights(lab), {name_of(lab, "1.0.0"): 70, name_of(lab, "2.0.0"): 30})
        await until(lambda: argo(lab), "Healthy")
        names = {channel["name"]: channel for channel in (await status(lab))["channels"]}
        assert (names["canary"]["activeVersion"], names["canary"]["weight"]) == ("2.0.0", 30)
        assert names["stable"]["weight"] == 70
        await ask(lab, "3.0.0", ("2.0.0", 30))
        await lab.until(ADAPTER, "tone", "Stalled", "True", "TooManyVersions")
        assert await weights(lab) == {name_of(lab, "1.0.0"): 70, name_of(lab, "2.0.0"): 30}
        await ask(lab, "2.0.0", ("2.0.0", 30))
        await until(lambda: weights(lab), {name_of(lab, "1.0.0"): 50, name_of(lab, "2.0.0"): 50})
        await until(lambda: watch.now(name_of(lab, "2.0.0")), 50)
    assert watch.weights(name_of(lab, "2.0.0")) == [0, 30, 50], "it never falls below the canary's weight"
    assert watch.weights(name_of(lab, "3.0.0")) == [0, 0, 0]


async def test_paused_by_hand_shows_as_suspended(lab: Lab, until: Any) -> None:
    await served_one(lab, steps=STEPS)
    await ask(lab, "2.0.0", steps=STEPS, paused=True)
    await lab.until(ADAPTER, "tone", "Reconciling", "True", "PausedByHand")
    assert await argo(lab) == "Suspended"
    assert await weights(lab) == {name_of(lab, "1.0.0"): 100}
    await ask(lab, "2.0.0", steps=STEPS, paused=False)
    await until(lambda: weights(lab), {name_of(lab, "2.0.0"): 100})
