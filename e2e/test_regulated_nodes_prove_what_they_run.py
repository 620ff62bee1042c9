"""A Regulated tenant is served on a node that proves what it runs, and on nothing else: not on another place, not by
another gateway, not without the operator, not a moment longer than the proof lasts."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from stack import attested, guarantees, promises
from stack.attested import LEASE_SECONDS, Attested
from stack.install import DEDICATED_NODE, Stack
from stack.kube import eventually


@pytest.fixture(scope="module")
def yew(stack: Stack) -> Iterator[Attested]:
    with attested.serving(stack) as found:
        yield found


def test_it_is_served_by_its_own_gateway_and_by_no_other(
    yew: Attested, stack: Stack, seen: list[str]
) -> None:
    assert yew.client.ask("chat", "hello").status == 200
    assert stack.client("yew").ask("chat", "hello").status == 401, "the shared gateway does not know it"
    assert stack.client("birch").ask("chat", "hello").status == 200
    tenant = stack.kube.get("tenant", "yew") or {}
    [pool] = tenant["status"]["route"]["pools"]
    assert (pool["name"], pool["tls"]) == (attested.SPACE, True)

    def state(name: str) -> str:
        line = guarantees.lines(stack, "yew")[name]
        return f"{line['state']}: {line['reason']}"

    for name in ("AttestedNodes", "EncryptionInTransit"):
        eventually(f"{name} was seen", lambda: state(name).startswith("Enforced"), said=lambda: state(name))  # noqa: B023
        seen.append(f"Regulated: {name} {state(name)}")
    seen.append(f"Regulated: KernelIsolation {state('KernelIsolation')}")


def test_other_measurements_cordon_the_node_and_end_the_engine(yew: Attested, stack: Stack) -> None:
    yew.verifier.lie = "other measurements"
    eventually(
        "it is stalled",
        lambda: yew.stalled().get("reason") == "AttestationFailed",
        seconds=LEASE_SECONDS + 30,
    )
    assert "kubectl uncordon" in yew.stalled()["message"]
    eventually("the node is cordoned", lambda: bool(yew.node()["spec"].get("unschedulable")), seconds=30)
    eventually("nobody is served", lambda: yew.client.ask("chat", "hello").status == 503, seconds=60)
    places = {pool["name"] for pool in (stack.kube.get("tenant", "yew") or {})["status"]["route"]["pools"]}
    assert places == {attested.SPACE}, "nowhere else"
    yew.verifier.lie = ""
    stack.kube.run("uncordon", DEDICATED_NODE)
    yew.is_ready()


def test_the_engine_ends_with_its_lease_when_nobody_renews_it(
    yew: Attested, stack: Stack, seen: list[str]
) -> None:
    """Verifier and operator are gone: nothing but the pod itself is left to close it."""

    def ended() -> bool:
        statuses = ((yew.pod() or {}).get("status") or {}).get("containerStatuses") or []
        words = json.dumps([[s.get("state"), s.get("lastState")] for s in statuses if s["name"] == "engine"])
        return '"exitCode": 3' in words

    yew.verifier.lie = "down"
    with promises.operator_down(stack):
        seconds = eventually("the engine has ended", ended, seconds=LEASE_SECONDS + 60)
        assert yew.client.ask("chat", "hello").status == 503
    seen.append(
        f"Regulated: no verifier, no operator: engine ended after {seconds:.0f} s of a {LEASE_SECONDS} s lease"
    )
    yew.verifier.lie = ""
    yew.is_ready()
