"""A Regulated tenant on the dedicated node, a verifier that can lie, and the operator told of both."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.paths import HOST_ADDRESS, REPOSITORY

from . import settings
from .install import DEDICATED_NODE, NAMESPACE, Stack
from .kube import JsonObject, condition, eventually, is_ready
from .traffic import Client

sys.path.insert(0, str(REPOSITORY / "tests"))

from support.verifier import (  # type: ignore[import-not-found, unused-ignore]
    GOOD,
    ISSUER,
    POINTER,
    Verifier,
)

TENANT, SPACE, POD, GATEWAY = "yew", "tenant-yew", "tenant-yew-fast-0", "tenantry-gateway-yew"
LEASE_SECONDS = 60
RUNTIME_CLASS: JsonObject = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "attested"},
    "handler": "runc",
}


@dataclass
class Attested:
    """The tenant `yew` as its clients and its admin meet it."""

    stack: Stack
    verifier: Verifier

    @property
    def client(self) -> Client:
        """By the tenant's own gateway."""
        url = f"http://{self.stack.service_address(GATEWAY, NAMESPACE)}:8080"
        return Client(url, self.stack.keys[TENANT])

    def is_ready(self) -> None:
        self.stack.kube.wait(f"{TENANT} is ready", "tenant", TENANT, until=is_ready, seconds=300)
        eventually(
            "its own gateway answers", lambda: self.client.ask("chat", "hi", max_tokens=1).status == 200
        )

    def stalled(self) -> JsonObject:
        return condition(self.stack.kube.get("tenant", TENANT), "Stalled")

    def node(self) -> JsonObject:
        return self.stack.kube.get("node", DEDICATED_NODE) or {}

    def pod(self) -> JsonObject | None:
        return self.stack.kube.get("pod", POD, SPACE)


@contextmanager
def serving(stack: Stack) -> Iterator[Attested]:
    """`yew` served on the node that `oak` gives up for it; both as before afterwards."""
    verifier = Verifier(host=HOST_ADDRESS)

    def offer(config: JsonObject) -> None:
        service = {"url": verifier.url, "issuer": ISSUER, "keys": [verifier.public], "timeoutSeconds": 5}
        config["verifiers"] = {"tests": service}
        config["attestationPolicies"] = {"good": {"measurements": {POINTER: [GOOD]}}}
        offered = {"runtimeClasses": ["attested"], "verifiers": ["tests"], "attestationPolicies": ["good"]}
        config["tiers"]["Regulated"] |= offered

    with _running(verifier), settings.changed(stack, offer):
        stack.kube.apply(RUNTIME_CLASS)
        stack.kube.run("delete", "tenant", "oak", "--wait=true", "--timeout=240s", seconds=260)
        proof = {"verifierRef": "tests", "policyRef": "good", "maxAgeSeconds": LEASE_SECONDS}
        patch = {"spec": {"isolation": {"runtimeClassName": "attested", "attestation": proof}}}
        stack.kube.run("patch", "tenant", TENANT, "--type=merge", "-p", json.dumps(patch))
        try:
            found = Attested(stack, verifier)
            found.is_ready()
            yield found
        finally:
            verifier.lie = ""
            stack.kube.run("uncordon", DEDICATED_NODE, check=False)
            stack.kube.run("delete", "tenant", TENANT, "--wait=true", "--timeout=240s", seconds=260)
            stack.kube.apply(stack.tenant(TENANT), stack.tenant("oak"))
            stack.kube.wait("oak is back", "tenant", "oak", until=is_ready, seconds=300)


@contextmanager
def _running(verifier: Verifier) -> Iterator[None]:
    """On a thread and an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(verifier.start(), loop).result(30)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
