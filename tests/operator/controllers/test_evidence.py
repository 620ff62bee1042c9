"""Guarantees on a real API server: Enforced only while everything was seen, and every mutant is seen.

Nobody runs pods here: a probe's part is played by this test's kubelet, which lets it see what the test's network says.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tenantry.api import names
from tenantry.api.config import EvidencePolicy, Quota
from tenantry.cluster import (
    ADAPTER_POOL,
    CONFIG_MAP,
    EVENT,
    NAMESPACE,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_QUOTA,
    TENANT,
    ApiError,
    Client,
    Key,
    Obj,
)
from tenantry.controllers import World
from tenantry.evidence import probe
from tenantry.evidence.network import Kind, Target

if TYPE_CHECKING:
    from conftest import Lab

pytestmark = pytest.mark.apiserver

TARGETS = [
    Target(Kind.API, "10.96.0.1", 443),
    Target(Kind.DNS, "10.96.0.10", 53),
    Target(Kind.POD, "10.244.1.7", 8080),
    Target(Kind.SERVICE, "10.96.7.7", 8080),
]
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
GUARDED = ("DedicatedNodes", "NetworkIsolation", "PodHardening", "QuotaEnforced")
SEEN = {*GUARDED, "DedicatedProcess", "PromptSeparation"}


@dataclass
class Network:
    """What is reached: by probes, and by an ordinary pod."""

    inside: set[Kind] = field(default_factory=set)
    outside: set[Kind] = field(default_factory=lambda: set(Kind))
    closed_port: str = "timeout"
    accepted: int = 1
    made: list[Obj] = field(default_factory=list)
    knocked: set[str] = field(default_factory=set)

    def join(self, patch: pytest.MonkeyPatch) -> None:
        """The operator's own part."""

        async def targets(world: World, client: Client) -> list[Target]:
            return TARGETS

        async def control(world: World, wanted: Any) -> dict[str, str]:
            return {t.id: "open" if t.kind in self.outside else "refused" for t in wanted}

        async def knock(world: World, ip: str, ports: tuple[int, int]) -> dict[int, str]:
            self.knocked.add(ip)
            return {ports[0]: "open", ports[1]: self.closed_port}

        for part in (targets, control, knock):
            patch.setattr(World, part.__name__, part)

    async def kubelet(self, lab: Lab) -> None:
        """Runs every probe there is, for ever."""
        label = f"{names.COMPONENT_LABEL}={probe.PROBE_COMPONENT}"
        while True:
            try:
                async for pod in lab.client.list(POD, labels=label):
                    if lab.suffix in pod["metadata"]["namespace"]:
                        await self._run(lab, pod)
            except ApiError:
                pass  # somebody was faster
            await asyncio.sleep(0.05)

    async def _run(self, lab: Lab, pod: Obj) -> None:
        phase = (pod.get("status") or {}).get("phase")
        if phase == "Pending":
            self.made.append(pod)
            ip = f"10.244.{3 + len(self.made) // 250}.{1 + len(self.made) % 250}"
            await set_status(lab, pod, {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]})
        elif phase == "Running" and pod["status"]["podIP"] in self.knocked:
            plan = json.loads(pod["spec"]["containers"][0]["args"][0])
            kinds = {target.id: target.kind for target in TARGETS}
            reached = {
                t["id"]: "open" if kinds[t["id"]] in self.inside else "timeout" for t in plan["targets"]
            }
            words = {"kernel": "6.1.0", "reached": reached, "accepted": {str(probe.PORTS[0]): self.accepted}}
            ended = {"exitCode": 0, "message": json.dumps(words)}
            container = {"name": "probe", "image": "x", "imageID": "x", "ready": False, "restartCount": 0,
                         "state": {"terminated": ended}}  # fmt: skip
            await set_status(lab, pod, {"phase": "Succeeded", "containerStatuses": [container]})


async def set_status(lab: Lab, pod: Obj, status: Obj) -> None:
    meta = pod["metadata"]
    await lab.client.transport.request(
        "PATCH",
        POD.path(meta["namespace"], meta["name"], "status"),
        body={"status": status},
        content_type="application/merge-patch+json",
    )


@pytest.fixture
async def network(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    """The lab looks every second, and an admission policy of this test (that matches nothing) keeps all things so."""
    name = f"lab-{lab.suffix}"
    policy = EvidencePolicy.model_construct(
        period_seconds=1, max_age_seconds=20, image="probe:1", outside=None
    )
    changes = {
        "evidence": policy,
        "admission": {guarantee: [name] for guarantee in GUARDED},
        "quota": Quota(hard={"pods": "100000"}),  # nobody gives back here what a pod has used
    }
    lab.config = lab.config.model_copy(update=changes)
    rules = [
        {
            "apiGroups": ["nothing.example"],
            "apiVersions": ["v1"],
            "operations": ["CREATE"],
            "resources": ["x"],
        }
    ]
    api = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    await lab.client.transport.request(
        "POST",
        POLICIES,
        body={
            **api,
            "kind": "ValidatingAdmissionPolicy",
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": rules},
                "validations": [{"expression": "true"}],
            },
        },
    )
    await lab.client.transport.request(
        "POST",
        BINDINGS,
        body={
            **api,
            "kind": "ValidatingAdmissionPolicyBinding",
            "spec": {"policyName": name, "validationActions": ["Deny"]},
        },
    )
    made = Network()
    made.join(monkeypatch)
    kubelet = asyncio.create_task(made.kubelet(lab))
    yield made
    kubelet.cancel()
    await asyncio.gather(kubelet, return_exceptions=True)
    for path in (POLICIES, BINDINGS):
        await lab.client.transport.request("DELETE", f"{path}/{name}")


async def oak(lab: Lab) -> str:
    """An Enterprise tenant on a node of its own, whose quota is counted and whose engine tells whom it served."""
    meta = {"name": lab.name("n1"), "labels": {names.CLAIMABLE_LABEL: "true", "lab": lab.suffix}}
    await lab.make({"apiVersion": "v1", "kind": "Node", "metadata": meta})
    wanted = {"nodeSelector": {"lab": lab.suffix}}
    await lab.tenant("oak", tier="Enterprise", dedicated={"poolTemplateRef": "gold"}, isolation=wanted)
    await lab.until(TENANT, "oak", "Ready", "True")
    where = f"tenant-{lab.name('oak')}"
    uid = (await lab.get(TENANT, "oak") or {})["metadata"]["uid"]
    lab.fleet.engines[f"{where}-fast-0"].separation = told(uid)
    await count(lab, where)
    return where


def told(*tenants: str, crossed: int = 0) -> Obj:
    return {
        "tenants": list(tenants),
        "tenantCount": len(tenants),
        "promptTokens": 100,
        "cachedTokens": 32,
        "crossedTokens": crossed,
    }


async def count(lab: Lab, where: str) -> None:
    """What the quota's controller would do."""
    hard = lab.config.quota.hard
    await lab.client.transport.request(
        "PATCH",
        RESOURCE_QUOTA.path(where, "tenantry", "status"),
        body={"status": {"hard": hard, "used": dict.fromkeys(hard, "1")}},
        content_type="application/merge-patch+json",
    )


async def claims(lab: Lab, tenant: str = "oak") -> dict[str, tuple[str, str]]:
    entries = ((await lab.get(TENANT, tenant) or {}).get("status") or {}).get("isolation") or []
    return {entry["guarantee"]: (entry["state"], entry.get("reason", "")) for entry in entries}


async def stored(lab: Lab, namespace: str, name: str) -> Obj:
    found = await lab.client.get(CONFIG_MAP, Key(namespace, name)) or {"data": {"report.json": "{}"}}
    document: Obj = json.loads(found["data"]["report.json"])
    return document


def enforced(lab: Lab) -> Callable[[], Awaitable[set[str]]]:
    async def probe_() -> set[str]:
        return {name for name, (state, _) in (await claims(lab)).items() if state == "Enforced"}

    return probe_


async def test_every_claim_of_a_dedicated_tenant_has_a_mutant_that_ends_it(
    lab: Lab, network: Network, until: Any
) -> None:
    await lab.start()
    where = await oak(lab)
    await until(enforced(lab), SEEN, seconds=60.0)
    assert (await lab.condition(TENANT, "oak", "NetworkIsolated"))["status"] == "True"
    assert (await lab.condition(TENANT, "oak", "IsolationVerified"))["status"] == "True"
    before = (await lab.get(TENANT, "oak") or {})["metadata"]["resourceVersion"]
    written = (await stored(lab, where, "tenantry-report"))["writtenAt"]

    async def looked_again() -> bool:
        return bool((await stored(lab, where, "tenantry-report"))["writtenAt"] > written)

    await until(looked_again)
    after = (await lab.get(TENANT, "oak") or {})["metadata"]["resourceVersion"]
    assert after == before, "looking again writes the report, never the Tenant"

    engine = lab.fleet.engines[f"{where}-fast-0"]
    uid = (await lab.get(TENANT, "oak") or {})["metadata"]["uid"]
    node = Key("", lab.name("n1"))
    binding = f"{BINDINGS}/lab-{lab.suffix}"
    intruder = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "intruder", "namespace": lab.config.release_namespace},
        "spec": {
            "nodeName": node.name,
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": "x:1"}],
        },
    }
    opened = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "debug", "namespace": where},
        "spec": {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]},
    }

    async def audit_only(action: str) -> None:
        await lab.client.transport.request(
            "PATCH",
            binding,
            body={"spec": {"validationActions": [action]}},
            content_type="application/merge-patch+json",
        )

    async def set_engine(separation: Obj) -> None:
        engine.separation = separation

    async def enforce(*, on: bool) -> None:
        network.inside = set() if on else {Kind.API, Kind.DNS}
        network.closed_port = "timeout" if on else "open"

    mutants: list[tuple[str, str, Callable[[], Awaitable[Any]], Callable[[], Awaitable[Any]]]] = [
        ("NetworkIsolation", "broken: reached in spite of the policies: API server, DNS",
         lambda: enforce(on=False), lambda: enforce(on=True)),
        ("NetworkIsolation", "broken: NetworkPolicy `debug` is not ours",
         lambda: lab.client.create(opened), lambda: lab.remove(NETWORK_POLICY, Key(where, "debug"))),
        ("DedicatedNodes", "broken: foreign pods on the tenant's nodes",
         lambda: lab.client.create(intruder), lambda: lab.remove(POD, Key(lab.config.release_namespace, "intruder"))),
        ("DedicatedNodes", f"the admission policy `lab-{lab.suffix}` is not in force",
         lambda: audit_only("Audit"), lambda: audit_only("Deny")),
        ("DedicatedProcess", "broken: another tenant is known to",
         lambda: set_engine(told(uid, "somebody")), lambda: set_engine(told(uid))),
        ("PromptSeparation", "broken: tokens cached by another tenant were used",
         lambda: set_engine(told(uid, crossed=16)), lambda: set_engine(told(uid))),
    ]  # fmt: skip
    for guarantee, words, harm, mend in mutants:
        await harm()

        async def shown(name: str = guarantee, text: str = words) -> bool:
            state, reason = (await claims(lab))[name]
            return state != "Enforced" and text in reason

        await until(shown)
        await mend()
        await until(enforced(lab), SEEN)

    # What the operator itself puts right within an event is kept as having been broken.
    async def violated(guarantee: str, words: str) -> None:
        async def seen() -> bool:
            found = (await stored(lab, where, "tenantry-report")).get("violations", [])
            return any(entry["guarantee"] == guarantee and words in entry["reason"] for entry in found)

        await until(seen)

    await lab.remove(RESOURCE_QUOTA, Key(where, "tenantry"))
    await violated("QuotaEnforced", "the quota is gone")
    await until(lambda: lab.client.get(RESOURCE_QUOTA, Key(where, "tenantry")))
    await count(lab, where)
    bare = {"spec": {"taints": None}}
    await lab.client.merge_patch(NODE, node, bare)
    await violated("DedicatedNodes", "the taint is missing on node")
    lax = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}
    await lab.client.merge_patch(NAMESPACE, Key("", where), lax)
    await violated("PodHardening", "is not `restricted`")
    deny = {"spec": {"podSelector": {"matchLabels": {"x": "y"}}}}
    await lab.client.merge_patch(NETWORK_POLICY, Key(where, "tenantry-default-deny"), deny)
    await violated("NetworkIsolation", "`tenantry-default-deny` was changed")
    await until(enforced(lab), SEEN)

    account = {pod["spec"]["serviceAccountName"] for pod in network.made}
    assert account == {probe.PROBE_ACCOUNT}
    await lab.remove(TENANT, lab.key(TENANT, "oak"))

    async def gone() -> bool:
        return await lab.client.get(NAMESPACE, Key("", where)) is None

    await until(gone, seconds=60.0)

    async def recorded() -> bool:
        events = [
            e async for e in lab.client.list(EVENT, namespace="default") if e["regarding"].get("uid") == uid
        ]
        return any(
            "nothing of the tenant is left" in e.get("note", "") for e in events if e["reason"] == "Departed"
        )

    await until(recorded)


async def test_a_probe_without_its_control_proves_nothing_and_evidence_grows_stale(
    lab: Lab, network: Network, until: Any
) -> None:
    network.outside = {Kind.API}
    operator = await lab.start()
    await oak(lab)

    async def unproven() -> bool:
        state, reason = (await claims(lab)).get("NetworkIsolation", ("", ""))
        return state == "Configured" and "refused too: DNS, foreign pod, foreign Service" in reason

    await until(unproven, seconds=60.0)
    network.outside, network.accepted = set(Kind), 0

    async def dead() -> bool:
        return "it never saw the connection that is allowed" in (await claims(lab))["NetworkIsolation"][1]

    await until(dead)
    network.accepted = 1
    await until(enforced(lab), SEEN)

    network.accepted = 0  # probes see nothing from now on: the last good one counts on, but not for ever
    evidence = operator.world.evidence
    evidence.now = lambda: time.time() + 30
    await until(enforced(lab), SEEN - {"NetworkIsolation"})
    assert (await claims(lab))["NetworkIsolation"][1].startswith("stale: last seen to hold at")
    assert (await lab.condition(TENANT, "oak", "NetworkIsolated"))["status"] == "Unknown"


async def test_a_restart_neither_loses_nor_repeats_a_claim(lab: Lab, network: Network, until: Any) -> None:
    await lab.start()
    where = await oak(lab)
    await until(enforced(lab), SEEN, seconds=60.0)
    before = {e["guarantee"]: e["since"] for e in (await lab.get(TENANT, "oak") or {})["status"]["isolation"]}
    await lab.stop()
    left = [
        pod
        async for pod in lab.client.list(POD, namespace=where)
        if pod["metadata"]["name"].startswith("tenantry-probe")
    ]
    stale = probe.pod(lab.name("oak"), "tenantry-probe-00000000-0", lab.name("n1"), image="i:1", pull_policy="Never",
                      runtime_class=None, targets=TARGETS)  # fmt: skip
    await lab.client.create(stale)
    written = (await stored(lab, where, "tenantry-report"))["writtenAt"]
    await lab.start()

    async def looked_again() -> bool:
        return bool((await stored(lab, where, "tenantry-report"))["writtenAt"] > written)

    await until(looked_again)
    after = {e["guarantee"]: e["since"] for e in (await lab.get(TENANT, "oak") or {})["status"]["isolation"]}
    assert after == before

    async def swept() -> bool:
        there = {pod["metadata"]["name"] async for pod in lab.client.list(POD, namespace=where)}
        return not there & {"tenantry-probe-00000000-0", *(pod["metadata"]["name"] for pod in left)}

    await until(swept)


async def test_a_shared_pool_is_looked_at_once_for_all_on_it(lab: Lab, network: Network, until: Any) -> None:
    await lab.start()
    await lab.settled_pool("shared")
    for ordinal in range(2):
        lab.fleet.engines[f"{lab.name('shared')}-fast-{ordinal}"].separation = told("a", "b")
    for name in ("acme", "birch"):
        await lab.tenant(name)
        await lab.until(TENANT, name, "Ready", "True")

    async def states() -> list[str]:
        return [(await claims(lab, name)).get("PromptSeparation", ("",))[0] for name in ("acme", "birch")]

    await until(states, ["Enforced", "Enforced"], seconds=60.0)
    assert (await claims(lab, "acme"))["DedicatedProcess"][0] == "NotProvided"
    where = lab.config.release_namespace
    reports = [
        m["metadata"]["name"]
        async for m in lab.client.list(CONFIG_MAP, namespace=where)
        if "report" in m["metadata"]["name"]
    ]
    assert reports == [f"tenantry-report-{lab.name('shared')}"]
    before = [
        (await lab.get(TENANT, name) or {})["metadata"]["resourceVersion"] for name in ("acme", "birch")
    ]
    lab.fleet.engines[f"{lab.name('shared')}-fast-0"].down = True
    written = (await stored(lab, where, reports[0]))["writtenAt"]

    async def looked_again() -> bool:
        return bool((await stored(lab, where, reports[0]))["writtenAt"] > written)

    await until(looked_again)
    after = [(await lab.get(TENANT, name) or {})["metadata"]["resourceVersion"] for name in ("acme", "birch")]
    assert after == before, "one replica that does not answer for a moment takes nothing away"
    lab.fleet.engines[f"{lab.name('shared')}-fast-1"].separation = told("a", "b", crossed=16)
    await until(states, ["NotProvided", "NotProvided"])
    await lab.remove(ADAPTER_POOL, lab.key(ADAPTER_POOL, "shared"))
