"""Every guarantee on the live cluster, and what ends each: harm done by an admin's hand, and how soon it is told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster import lifecycle

from . import settings
from .install import DEDICATED_NODE, Stack
from .kube import JsonObject, eventually
from .promises import operator_down, probe_pod

TENANT, SPACE = "oak", "tenant-oak"
OFTEN_SECONDS = 10
ALLOW_ALL = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "debug", "namespace": SPACE},
    "spec": {"podSelector": {}, "policyTypes": ["Egress", "Ingress"], "egress": [{}], "ingress": [{}]},
}


@contextmanager
def looking_often(stack: Stack) -> Iterator[None]:
    """The operator looks every `OFTEN_SECONDS` while the block runs, so that it need not be waited for in minutes."""

    def often(config: JsonObject) -> None:
        config["evidence"] |= {"periodSeconds": OFTEN_SECONDS, "maxAgeSeconds": 3 * OFTEN_SECONDS}

    with settings.changed(stack, often):
        yield


def report(stack: Stack, tenant: str, form: str = "json") -> str:
    """What `tenantry report` prints."""
    return stack.tenantry("report", tenant, "-o", form)


def lines(stack: Stack, tenant: str = TENANT) -> dict[str, JsonObject]:
    """By guarantee."""
    found: JsonObject = json.loads(report(stack, tenant))
    return {line["guarantee"]: line for line in found["guarantees"]}


@dataclass(frozen=True)
class Mutant:
    """Harm to one guarantee, with its repair. `words` are in what the report then says; `repaired`: the operator puts
    it right by itself, so that only the report's memory tells of it."""

    guarantee: str
    name: str
    words: str
    harm: Callable[[], None]
    mend: Callable[[], None]
    repaired: bool = False
    tenant: str = TENANT


def show(stack: Stack, mutant: Mutant) -> float:
    """Seconds from the harm until the report tells of it; mended and Enforced again when this returns."""
    start = time.time()
    mutant.harm()
    try:
        return eventually(
            f"the report tells: {mutant.name}", lambda: _tells(stack, mutant, start), seconds=240
        )
    finally:
        mutant.mend()
        eventually(
            f"{mutant.guarantee} of {mutant.tenant} is Enforced again",
            lambda: lines(stack, mutant.tenant)[mutant.guarantee]["state"] == "Enforced",
            seconds=240,
        )


def _tells(stack: Stack, mutant: Mutant, since: float) -> bool:
    line = lines(stack, mutant.tenant)[mutant.guarantee]
    if mutant.repaired:
        when, _, why = (line["lastBroken"] or "").partition("Z: ")
        return mutant.words in why and when >= time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since - 1))
    return line["state"] != "Enforced" and mutant.words in line["reason"]


def mutants(stack: Stack) -> list[Mutant]:
    """All but stale evidence, which takes the operator away (see `stale`)."""
    kube, node = stack.kube, stack.node(DEDICATED_NODE)
    worker = lifecycle.worker(DEDICATED_NODE)

    def binding(action: str) -> None:
        patch = json.dumps({"spec": {"validationActions": [action]}})
        kube.run("patch", "validatingadmissionpolicybinding", "tenantry-nodes", "--type=merge", "-p", patch)

    def place() -> None:
        binding("Audit")
        tolerate = [{"operator": "Exists"}]
        intruder = probe_pod(
            "intruder", "default", nodeSelector={"kubernetes.io/hostname": node}, tolerations=tolerate
        )
        eventually("the policy is lifted", lambda: _applied(stack, intruder), seconds=60)
        binding("Deny")

    def remove() -> None:
        kube.run("delete", "pod", "intruder", "-n", "default", "--ignore-not-found")

    def other_bytes(digest: str) -> None:
        """A version's digest cannot be edited; it can be dropped and added again."""
        spec = (kube.get("adapter", "tone", "maple-ml") or {})["spec"]
        others = [version for version in spec["versions"] if version["version"] != "1.0.0"]
        [changed] = [version for version in spec["versions"] if version["version"] == "1.0.0"]
        away = {"versions": others, "channels": [{**spec["channels"][0], "version": others[0]["version"]}]}
        back = {"versions": [*others, {**changed, "digest": digest}], "channels": spec["channels"]}
        for step in (away, back):
            patch = json.dumps({"spec": step})
            kube.run("patch", "adapter", "tone", "-n", "maple-ml", "--type=merge", "-p", patch)

    adapter = kube.get("adapter", "tone", "maple-ml") or {}
    true_digest = next(v["digest"] for v in adapter["spec"]["versions"] if v["version"] == "1.0.0")
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    return [
        Mutant("NetworkIsolation", "policy enforcer stopped", "reached in spite of the policies",
               lambda: worker.enforce_policies(False), lambda: worker.enforce_policies(True)),
        Mutant("NetworkIsolation", "a policy that opens all", "`debug` is not ours",
               lambda: kube.apply(ALLOW_ALL), lambda: _delete(stack, "networkpolicy", "debug", SPACE)),
        Mutant("DedicatedNodes", "foreign pod placed", "`default/intruder`", place, remove),
        Mutant("DedicatedNodes", "taint removed", "the taint is missing",
               lambda: _run(stack, "taint", "node", node, "tenantry.dev/tenant-"), nothing, repaired=True),
        Mutant("DedicatedNodes", "admission policy only audits", "`tenantry-nodes` is not in force",
               lambda: binding("Audit"), lambda: binding("Deny")),
        Mutant("PodHardening", "pod security label changed", "is not `restricted`",
               lambda: _run(stack, "label", "ns", SPACE, "pod-security.kubernetes.io/enforce=privileged",
                            "--overwrite"), nothing, repaired=True),
        Mutant("QuotaEnforced", "quota deleted", "the quota is gone",
               lambda: _delete(stack, "resourcequota", "tenantry", SPACE), nothing, repaired=True),
        Mutant("AdapterIntegrity", "digest changed", "other bytes",
               lambda: other_bytes("sha256:" + "0" * 64), lambda: other_bytes(true_digest), tenant="maple"),
    ]  # fmt: skip


def stale(stack: Stack) -> float:
    """Seconds from the operator's end until nothing that it claimed is repeated."""
    with operator_down(stack):
        return eventually(
            "every claim is stale",
            lambda: not [line for line in lines(stack).values() if line["state"] == "Enforced"],
            seconds=6 * OFTEN_SECONDS + 60,
        )


def _applied(stack: Stack, obj: JsonObject) -> bool:
    text = json.dumps(obj)
    return stack.kube.call("apply", "--server-side", "-f", "-", text=text).returncode == 0


def _run(stack: Stack, *arguments: str) -> None:
    stack.kube.run(*arguments)


def _delete(stack: Stack, kind: str, name: str, namespace: str) -> None:
    stack.kube.run("delete", kind, name, "-n", namespace, "--ignore-not-found")
