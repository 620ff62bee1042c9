"""A pool's pods are replaced under traffic: no request fails, and a revision that cannot run is taken back."""

from __future__ import annotations

import json

from stack.install import Stack
from stack.kube import JsonObject, condition
from stack.traffic import Steady

POOL, PODS = "lora", ("lora-fast-0", "lora-fast-1")
QUICK = {"canarySeconds": 2, "drainSeconds": 30}


def edit(stack: Stack, spec: object) -> None:
    patch = json.dumps({"spec": spec})
    stack.kube.run("patch", "adapterpool", POOL, "--type=merge", "-p", patch)


def until(stack: Stack, kind: str, status: str, reason: str, seconds: float) -> None:
    """A condition of the pool that speaks of its present spec."""

    def holds(found: JsonObject | None) -> bool:
        said = condition(found, kind)
        generation = (found or {}).get("metadata", {}).get("generation")
        return said.get("observedGeneration") == generation and (said.get("status"), said.get("reason")) == (
            status,
            reason,
        )

    what = f"{kind}={status} {reason} of pool {POOL}"
    stack.kube.wait(what, "adapterpool", POOL, until=holds, seconds=seconds)


def pods(stack: Stack) -> dict[str, str]:
    found = [stack.kube.get("pod", name, stack.namespace) or {} for name in PODS]
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}


def test_a_pool_rolls_under_traffic(stack: Stack, seen: list[str]) -> None:
    maple = stack.client("maple")
    before = pods(stack)
    with Steady(lambda: maple.ask("tone", "Where is my parcel?", max_tokens=4)) as traffic:
        edit(stack, {"engine": {"maxModelLen": 2000}, "upgrade": QUICK})
        until(stack, "Reconciling", "False", "Settled", 300)
    after = pods(stack)
    seen.append(f"pool rolled: {dict(traffic.outcomes)}, longest gap {traffic.longest_gap():.1f} s")
    assert traffic.failures == []
    assert all(after[name] != before[name] for name in PODS)


def test_a_revision_that_cannot_run_is_taken_back(stack: Stack, seen: list[str]) -> None:
    maple = stack.client("maple")
    before = pods(stack)
    with Steady(lambda: maple.ask("tone", "Where is my parcel?", max_tokens=4)) as traffic:
        edit(
            stack,
            {"engine": {"image": "localhost/nobody/made-it:1"}, "upgrade": {"progressDeadlineSeconds": 30}},
        )
        until(stack, "Stalled", "True", "UpgradeFailed", 180)
        until(stack, "Reconciling", "False", "Stalled", 180)
    seen.append(f"upgrade taken back: {dict(traffic.outcomes)}, longest gap {traffic.longest_gap():.1f} s")
    assert traffic.failures == []
    after = pods(stack)
    assert sum(after[name] == before[name] for name in PODS) == 1, "the other one served all the time"
    edit(stack, {"engine": {"image": None}, "upgrade": {"progressDeadlineSeconds": 1200}})
    until(stack, "Stalled", "False", "Settled", 60)
