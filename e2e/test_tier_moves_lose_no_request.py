"""A tenant moves between a shared tier and a dedicated one under streamed traffic: no request fails; key, aliases and
limits are the same in both; the place that it left is proven empty, and its status tells of all that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from stack import promises
from stack.install import ADAPTERS, DEDICATED_NODE, Stack
from stack.kube import JsonObject, condition, eventually, is_ready, summary
from stack.traffic import Steady

TENANT, SPACE, OWN = "oak", "tenant-oak", "oak-ml"
LIMITS = {
    "requestsPerMinute": 3000, "tokensPerMinute": 900_000, "maxInFlight": 12, "maxQueued": 48,
    "maxInputTokens": 1024, "maxOutputTokens": 256,
}  # fmt: skip
QUESTION = "Where is my parcel?"


@pytest.fixture(scope="module")
def oak(stack: Stack) -> Iterator[JsonObject]:
    """The example's dedicated tenant with an adapter and limits of its own; as it was afterwards."""
    adapter = yaml.safe_load(stack.adapter_text("tone"))
    adapter["metadata"]["namespace"], adapter["spec"]["tenantRef"] = OWN, TENANT
    found = stack.tenant(TENANT)
    own = {"name": "tone", "baseModel": found["spec"]["models"][0]["baseModel"]}
    own["adapterRef"] = {"namespace": OWN, "name": "tone"}
    spec = {**found["spec"], "limits": LIMITS, "adapterNamespaces": [OWN]}
    spec["models"] = [*spec["models"], own]
    found["spec"] = spec
    stack.kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OWN}})
    stack.kube.apply(found, adapter)
    try:
        client = stack.client(TENANT)
        eventually("its adapter answers", lambda: client.ask("tone", "hi", max_tokens=1).status == 200)
        stack.kube.wait("it is settled", "tenant", TENANT, until=is_settled)
        eventually(
            "shared replicas hold the examples' adapters alone",
            lambda: set(promises.registered(stack, "lora").values()) == {len(ADAPTERS)},
        )
        yield found
    finally:
        stack.kube.apply(stack.tenant(TENANT))
        stack.kube.run("delete", "namespace", OWN, "--wait=true")
        stack.kube.wait("oak is back", "tenant", TENANT, until=is_settled, seconds=300)


def is_settled(found: JsonObject | None) -> bool:
    """Served by what the spec asks for, and nothing is under way or left to be emptied."""
    status = (found or {}).get("status") or {}
    at_rest = condition(found, "Reconciling").get("status") == "False"
    return is_ready(found) and at_rest and not status.get("leaving")


def move(stack: Stack, oak: JsonObject, tier: str) -> tuple[float, dict[tuple[str, str, str], None]]:
    """Edit the tier and wait until the move is over. Seconds, and in their order what the status told meanwhile: the
    tier in force, what is under way, and which place is being left."""
    found, told = oak, dict[tuple[str, str, str], None]()
    if tier != "Enterprise":
        kept = {name: value for name, value in oak["spec"].items() if name not in ("dedicated", "isolation")}
        found = {**oak, "spec": {**kept, "tier": tier}}
    seen: JsonObject | None = None
    stack.kube.apply(found)

    def over() -> bool:
        nonlocal seen
        seen = stack.kube.get("tenant", TENANT)
        status = (seen or {})["status"]
        left = (status.get("leaving") or [{}])[0]
        phase = left.get("phase") or condition(seen, "Reconciling")["reason"]
        told[(status["tier"], phase, left.get("pool", ""))] = None
        return status["tier"] == tier and is_settled(seen)

    seconds = eventually(f"the move to {tier} is over", over, seconds=300, said=lambda: summary(seen))
    return seconds, told


def route(stack: Stack) -> JsonObject:
    found: JsonObject = (stack.kube.get("tenant", TENANT) or {})["status"]["route"]
    return found


def offered(stack: Stack) -> JsonObject:
    """What the tenant's clients may count on, in whatever tier."""
    found = route(stack)
    targets = {model["name"]: model["targets"] for model in found["models"]}
    return {"limits": found["limits"], "targets": targets, "listed": stack.client(TENANT).models()}


def test_a_tenant_moves_to_a_shared_tier_and_back_to_a_dedicated_one(
    oak: JsonObject, stack: Stack, seen: list[str]
) -> None:
    client = stack.client(TENANT)
    before = offered(stack)
    assert before["limits"] == LIMITS
    assert before["listed"] == ["chat", "tone"]
    streams = Steady(lambda: client.ask_streamed("tone", QUESTION, max_tokens=32), workers=1)
    base = Steady(lambda: client.ask_streamed("chat", QUESTION, max_tokens=32), workers=1, pause=1.0)
    with streams, base:
        promises.answered(streams, 4)
        shared, told_of_shared = move(stack, oak, "MidMarket")
        assert {pool["name"] for pool in route(stack)["pools"]} == {"lora"}
        assert offered(stack) == before
        assert left_in_the_namespace(stack) == []
        assert promises.claims(stack, DEDICATED_NODE) == []
        assert set(promises.registered(stack, "lora").values()) == {len(ADAPTERS) + 1}
        promises.answered(streams, 4)
        dedicated, told_of_dedicated = move(stack, oak, "Enterprise")
        assert {pool["name"] for pool in route(stack)["pools"]} == {SPACE}
        assert offered(stack) == before
        assert set(promises.registered(stack, "lora").values()) == {len(ADAPTERS)}, "none of it is left there"
        promises.answered(streams, 4)
    for traffic, name in ((streams, "tone"), (base, "chat")):
        seen.append(
            f"tier moves (to shared {shared:.0f} s, to dedicated {dedicated:.0f} s): streams of `{name}` "
            f"{dict(traffic.outcomes)}, longest gap {traffic.longest_gap():.1f} s"
        )
        assert traffic.failures == []
        assert len(traffic.served) == 1, "one version, whatever the place"
        assert {answer.limit for _, answer in traffic.answers} == {str(LIMITS["requestsPerMinute"])}
        assert len({answer.text for _, answer in traffic.answers}) == 1, "whole, and the same in both places"
    assert ("MidMarket", "Emptying", SPACE) in told_of_shared
    phases = [
        ("MidMarket", "Preparing", ""),
        *[("Enterprise", name, "lora") for name in ("Draining", "Emptying")],
    ]
    assert [entry for entry in told_of_dedicated if entry in phases] == phases, list(told_of_dedicated)


def left_in_the_namespace(stack: Stack) -> list[str]:
    """What is still there of the tenant's own place: namespace, pool, pods, or pods of anybody on its node."""
    left = [f"{kind} {SPACE}" for kind in ("namespace", "adapterpool") if stack.kube.get(kind, SPACE)]
    for where in (("-n", SPACE), ("-A", "--field-selector", f"spec.nodeName={DEDICATED_NODE}")):
        left += [f"pod {pod['metadata']['name']}" for pod in stack.kube.find("pods", *where)]
    return left
