"""Regulated tenants on a real API server: served on nodes that prove what they run, and on nothing else."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from cluster.pki import certify
from cluster.process import free_port
from support.trust import make_authority, write_authority, write_key
from support.verifier import GOOD, ISSUER, POINTER, Verifier
from tenantry.api import names
from tenantry.api.config import AttestationPolicy, GatewayTemplate, VerifierService
from tenantry.attestation.door import Door
from tenantry.attestation.gate import Gate, lease
from tenantry.attestation.trust import Trust
from tenantry.cluster import (
    ADAPTER_POOL,
    CONFIG_MAP,
    DEPLOYMENT,
    NETWORK_POLICY,
    NODE,
    POD,
    STATEFUL_SET,
    TENANT,
    Key,
)
from tenantry.controllers import gates

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver


@dataclass
class Vault:
    """A Regulated tenant `vault` on one node, with the gate of its pod and the verifier."""

    lab: Lab
    verifier: Verifier
    folder: Path
    until: Callable[..., Awaitable[Any]]

    @property
    def where(self) -> str:
        return names.tenant_namespace(self.lab.name("vault"))

    @property
    def pod(self) -> str:
        return f"{self.where}-fast-0"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    async def node(self) -> dict[str, Any]:
        return await self.lab.client.get(NODE, Key("", self.lab.name("n1"))) or {}

    async def ask(self, *, tier: str = "Regulated", **isolation: Any) -> None:
        lab = self.lab
        meta = {"name": lab.name("n1"), "labels": {names.CLAIMABLE_LABEL: "true", "lab": lab.suffix}}
        await lab.make({"apiVersion": "v1", "kind": "Node", "metadata": meta})
        wanted = {
            "nodeSelector": {"lab": lab.suffix},
            "runtimeClassName": "confidential",
            "attestation": {"verifierRef": "v", "policyRef": "p", "maxAgeSeconds": 60},
            **isolation,
        }
        wanted = {field: value for field, value in wanted.items() if value is not None}
        await lab.tenant("vault", tier=tier, dedicated={"poolTemplateRef": "gold"}, isolation=wanted)

    async def start_gate(self) -> uvicorn.Server:
        """What the pod's first container would be, once the pod is there."""
        pool = await self.until(lambda: self.lab.client.get(ADAPTER_POOL, Key("", self.where)))
        boot = self.folder / "boot_id"
        boot.write_text(str(uuid.uuid4()))
        document = self.folder / "policy.json"
        found = await self.until(
            lambda: self.lab.client.get(CONFIG_MAP, Key(self.where, names.GATE_CONFIGMAP))
        )
        document.write_text(found["data"]["policy.json"])
        self.run.mkdir()
        door = Door(
            Gate(self.run, document, boot), self.run, self.folder / "identity", pool["metadata"]["uid"]
        )
        port = free_port()
        server = uvicorn.Server(uvicorn.Config(door.app, port=port, log_level="error", lifespan="off"))
        self.serving = asyncio.create_task(server.serve())
        self.lab.gates[self.pod] = f"http://127.0.0.1:{port}"
        return server

    async def gateway_up(self) -> None:
        """What the Deployment's controller would report."""
        key = Key(self.lab.config.release_namespace, names.own_gateway(self.lab.name("vault")))
        await self.until(lambda: self.lab.client.get(DEPLOYMENT, key))
        counts = {"replicas": 1, "readyReplicas": 1, "availableReplicas": 1, "updatedReplicas": 1}
        await self.lab.client.transport.request(
            "PATCH",
            DEPLOYMENT.path(*key, "status"),
            body={"status": counts},
            content_type="application/merge-patch+json",
        )

    async def opened(self) -> float:
        """The engine starts then, and only then."""

        async def probe() -> float | None:
            return lease(self.run)

        until: float = await self.until(probe)
        self.lab.unready.discard(self.pod)
        return until


@pytest.fixture
async def vault(lab: Lab, until: Any, tmp_path: Path) -> AsyncIterator[Vault]:
    verifier = Verifier()
    runner = await verifier.start()
    identity = tmp_path / "identity"
    identity.mkdir()
    certify(identity, names.OPERATOR_ISSUER, lab.identity)
    key = write_key(tmp_path / "operator.key", lab.identity)
    lab.trust = Trust.make(write_authority(tmp_path / "authority", make_authority()), key, 600, time.time())
    service = VerifierService(url=verifier.url, keys=[verifier.public], issuer=ISSUER, timeout_seconds=2)
    tiers = dict(lab.config.tiers)
    offered = {"verifiers": ["v"], "attestation_policies": ["p"], "runtime_classes": ["confidential"]}
    for tier in [tier for tier in tiers if tier.dedicated]:
        tiers[tier] = tiers[tier].model_copy(update=offered)
    policy = AttestationPolicy(measurements={POINTER: [GOOD]})
    changes = {"tiers": tiers, "verifiers": {"v": service}, "attestation_policies": {"p": policy}}
    template = GatewayTemplate(image="gateway:1", key_secret="key", salt_secret="salt")
    lab.config = lab.config.model_copy(
        update={**changes, "certificate_seconds": 600, "gateway": template, "gate_image": "operator:1"}
    )
    meta = {"name": names.CERTIFICATES_CONFIGMAP, "namespace": lab.config.release_namespace}
    await lab.client.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta})
    found = Vault(lab, verifier, tmp_path, until)
    lab.scheduled[found.pod] = lab.name("n1")
    lab.unready.add(found.pod)
    await lab.start()
    yield found
    await runner.cleanup()


async def test_served_once_the_node_has_proven_what_it_runs(vault: Vault) -> None:
    lab = vault.lab
    await vault.ask()
    server = await vault.start_gate()
    try:
        until = await vault.opened()
        assert time.time() < until <= time.time() + 61, "`maxAgeSeconds`"
        waiting = await lab.until(TENANT, "vault", "Reconciling", "True", "Provisioning")
        assert f"tenantry-gateway-{lab.name('vault')}` is not available" in waiting["message"]
        assert (await lab.condition(TENANT, "vault", "Ready"))["status"] != "True"
        await vault.gateway_up()
        await lab.until(TENANT, "vault", "Ready", "True", "Serving")
        workload = await lab.client.get(STATEFUL_SET, Key(vault.where, f"{vault.where}-fast")) or {}
        pod = workload["spec"]["template"]["spec"]
        assert pod["runtimeClassName"] == "confidential"
        [gate] = pod["initContainers"]
        assert (gate["restartPolicy"], gate["command"]) == ("Always", ["tenantry-gate"])
        assert "--lease" in pod["containers"][0]["args"]
        assert pod["containers"][0]["readinessProbe"]["httpGet"]["port"] == "health"
        assert await lab.client.get(NETWORK_POLICY, Key(vault.where, "tenantry-egress")) is None
        route = await lab.route("vault")
        assert [pool["tls"] for pool in route["pools"]] == [True]
        assert route["gateway"] == "Dedicated"
        url = (await lab.get(TENANT, "vault") or {})["status"]["endpoint"]["url"]
        release = lab.config.release_namespace
        assert url == f"http://tenantry-gateway-{lab.name('vault')}.{release}.svc:8080/v1"
        ingress = await lab.client.get(NETWORK_POLICY, Key(vault.where, "tenantry-ingress")) or {}
        callers = [
            peer["podSelector"]["matchLabels"] for rule in ingress["spec"]["ingress"] for peer in rule["from"]
        ]
        own = {"app.kubernetes.io/component": "own-gateway", "tenantry.dev/tenant": lab.name("vault")}
        assert own in callers
        assert {"app.kubernetes.io/component": "gateway"} not in callers, "the shared one may not come in"
        assert (vault.run / "tls.crt").exists()
        isolation = (await lab.get(TENANT, "vault") or {})["status"]["isolation"]
        [seen] = [entry for entry in isolation if entry["guarantee"] == "AttestedNodes"]
        assert seen["state"] == "Enforced", seen
        # Renewed at half of what it holds for, by the operator alone.
        proofs = lab.operator.world.proofs  # type: ignore[union-attr]
        [key] = proofs
        object.__setattr__(proofs[key], "due", 0.0)
        await lab.edit(TENANT, "vault", {"prompt": {"system": "x"}})

        async def renewed() -> bool:
            return (lease(vault.run) or 0) > until

        await vault.until(renewed)
    finally:
        server.should_exit = True


async def test_whoever_moves_in_is_served_as_before_until_gate_and_gateway_stand(vault: Vault) -> None:
    lab = vault.lab
    lab.unready.discard(vault.pod)
    await vault.ask(runtimeClassName=None, attestation=None, tier="Enterprise")
    await lab.until(TENANT, "vault", "Ready", "True", "Serving")
    attestation = {"verifierRef": "v", "policyRef": "p", "maxAgeSeconds": 60}
    isolation = {"runtimeClassName": "confidential", "attestation": attestation}
    await lab.edit(TENANT, "vault", {"tier": "Regulated", "isolation": isolation})
    server = await vault.start_gate()

    async def callers() -> list[Any]:
        ingress = await lab.client.get(NETWORK_POLICY, Key(vault.where, "tenantry-ingress")) or {}
        return [
            peer["podSelector"]["matchLabels"] for rule in ingress["spec"]["ingress"] for peer in rule["from"]
        ]

    shared = {"app.kubernetes.io/component": "gateway"}
    try:
        await vault.opened()
        found = await lab.until(TENANT, "vault", "Reconciling", "True", "Preparing")
        assert "the place of tier Enterprise serves until then" in found["message"]
        status = (await lab.get(TENANT, "vault") or {})["status"]
        assert (status["tier"], status["route"]["gateway"]) == ("Enterprise", "Shared")
        await lab.until(TENANT, "vault", "Ready", "True")  # its only replica comes back behind the gate
        assert (await lab.get(TENANT, "vault") or {})["status"]["tier"] == "Enterprise"
        assert any(shared.items() <= labels.items() for labels in await callers()), "it still serves"
        await vault.gateway_up()

        async def moved() -> bool:
            told = (await lab.get(TENANT, "vault") or {})["status"]
            return (told.get("tier"), told["route"]["gateway"]) == ("Regulated", "Dedicated")

        await vault.until(moved)

        async def closed() -> bool:
            return not any(
                labels.get("app.kubernetes.io/component") == "gateway" for labels in await callers()
            )

        await vault.until(closed)
    finally:
        server.should_exit = True


async def test_other_measurements_cordon_drain_and_stall_until_somebody_has_looked(vault: Vault) -> None:
    lab = vault.lab
    await vault.ask()
    server = await vault.start_gate()
    try:
        await vault.gateway_up()
        await vault.opened()
        await lab.until(TENANT, "vault", "Ready", "True")
        first = (await lab.client.get(POD, Key(vault.where, vault.pod)) or {})["metadata"]["uid"]
        await lab.settled_pool("shared", tiers=["Free", "MidMarket", "Regulated"])
        vault.verifier.lie = "other measurements"
        [key] = lab.operator.world.proofs  # type: ignore[union-attr]
        object.__setattr__(lab.operator.world.proofs[key], "due", 0.0)  # type: ignore[union-attr]
        await lab.edit(TENANT, "vault", {"prompt": {"system": "x"}})
        stalled = await lab.until(TENANT, "vault", "Stalled", "True", "AttestationFailed")
        assert POINTER in stalled["message"]
        assert f"kubectl uncordon {lab.name('n1')}" in stalled["message"]
        await lab.until(TENANT, "vault", "Ready", "False", "AttestationFailed")
        node = await vault.node()
        assert node["spec"]["unschedulable"] is True
        assert "tenantry.dev/cordoned" in node["metadata"]["annotations"]

        async def gone() -> bool:
            return await lab.client.get(POD, Key(vault.where, vault.pod)) is None

        await vault.until(gone)
        assert [pool["name"] for pool in (await lab.route("vault"))["pools"]] == [vault.where], "nowhere else"
        vault.verifier.lie = ""
        vault.lab.unready.add(vault.pod)
        await lab.client.merge_patch(NODE, Key("", lab.name("n1")), {"spec": {"unschedulable": None}})
        (vault.run / "lease").unlink()
        await vault.opened()
        await lab.until(TENANT, "vault", "Ready", "True")
        again = (await lab.client.get(POD, Key(vault.where, vault.pod)) or {})["metadata"]["uid"]
        assert again != first
        assert "tenantry.dev/cordoned" not in (await vault.node())["metadata"].get("annotations", {})
    finally:
        server.should_exit = True


async def test_a_silent_verifier_ends_nothing_before_the_lease_does_and_then_everything(
    vault: Vault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "STALE_RETRY_SECONDS", 3.0)
    lab = vault.lab
    vault.verifier.seconds = 8
    await vault.ask()
    server = await vault.start_gate()
    try:
        await vault.gateway_up()
        until = await vault.opened()
        vault.verifier.lie = "down"
        stalled = await lab.until(TENANT, "vault", "Stalled", "True", "AttestationStale")
        assert time.time() > until, "an outage is waited out as long as the lease lasts"
        assert "HTTP 503" in stalled["message"]
        assert (await vault.node())["spec"]["unschedulable"] is True
        vault.lab.unready.add(vault.pod)
        vault.verifier.lie, vault.verifier.seconds = "", 600
        (vault.run / "lease").unlink()
        await vault.opened()
        await lab.until(TENANT, "vault", "Ready", "True")
        await lab.until(TENANT, "vault", "Stalled", "False")
        assert "unschedulable" not in (await vault.node())["spec"], "what was only stale is tried again"
    finally:
        server.should_exit = True


async def test_a_lie_from_the_start_stalls_and_a_deletion_gives_the_node_back_clean(vault: Vault) -> None:
    lab = vault.lab
    vault.verifier.lie = "bad signature"
    await vault.ask()
    server = await vault.start_gate()
    try:
        await lab.until(TENANT, "vault", "Stalled", "True", "AttestationFailed")
        assert lease(vault.run) is None
        assert not (vault.run / "tls.crt").exists()
        assert await lab.route("vault") == {}
        await lab.remove(TENANT, lab.key(TENANT, "vault"))

        async def gone() -> bool:
            return await lab.get(TENANT, "vault") is None

        await vault.until(gone, seconds=60.0)
        node = await vault.node()
        assert "unschedulable" not in node["spec"]
        assert not [name for name in node["metadata"].get("annotations", {}) if "tenantry" in name]
        assert names.NODE_TENANT_LABEL not in node["metadata"]["labels"]
        assert not [t for t in node["spec"].get("taints", []) if t["key"] == names.NODE_TAINT]
    finally:
        server.should_exit = True


@pytest.mark.parametrize(
    ("isolation", "words"),
    [
        (
            {"runtimeClassName": "runc"},
            "`isolation.runtimeClassName` must be one that tier Regulated is offered",
        ),
        ({"runtimeClassName": None}, "`isolation.runtimeClassName` must be set in tier Regulated"),
        ({"egress": ["203.0.113.0/24"]}, "`isolation.egress` must be empty in tier Regulated"),
        (
            {"attestation": {"verifierRef": "mine", "policyRef": "p"}},
            "`isolation.attestation.verifierRef` must be one that tier Regulated is offered (`v`)",
        ),
        (
            {"attestation": {"verifierRef": "v", "policyRef": "none"}},
            "`isolation.attestation.policyRef` must be one that tier Regulated is offered (`p`)",
        ),
    ],
)
async def test_what_the_tier_is_not_offered_is_refused(
    vault: Vault, isolation: dict[str, Any], words: str
) -> None:
    await vault.ask(**isolation)
    stalled = await vault.lab.until(TENANT, "vault", "Stalled", "True", "InvalidSpec")
    assert words in stalled["message"]
    assert names.NODE_TENANT_LABEL not in (await vault.node())["metadata"]["labels"]
