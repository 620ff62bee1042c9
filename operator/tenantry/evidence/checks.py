"""From live objects to findings, one function a check. What each demands is what the guarantee means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenantry.desired import nodepool
from tenantry.desired import nodes as claims
from tenantry.desired.objects import Obj
from tenantry.desired.problems import join

from .findings import Finding, blind, idle

PSA_LABEL = "pod-security.kubernetes.io/enforce"
MIRROR = "kubernetes.io/config.mirror"


def taints(tenant: str, uid: str, held: Sequence[Obj], at: float) -> Finding:
    """Every node of the tenant bears its label, its uid and both taints, once anything could run there."""
    held = [node for node in held if not nodepool.is_joining(node)]
    if not held:
        return Finding(None, "the tenant holds no node", at)
    bare = [_name(node) for node in held if not claims.fully_claimed(node, tenant)]
    facts = tuple(f"node {_name(node)}: label and taints stand" for node in held if _name(node) not in bare)
    if bare:
        return Finding(False, f"the taint is missing on node {join(bare)}", at, facts)
    wrong = [_name(node) for node in held if not claims.holds(node, tenant, uid)]
    if wrong:
        return Finding(False, f"node {join(wrong)} is labelled for another tenant", at, facts)
    return Finding(True, "label and taints stand on every node of the tenant", at, facts)


def neighbours(
    namespace: str, held: Sequence[str], pods: Iterable[Obj], allowed: Iterable[str], at: float
) -> Finding:
    """Every pod on the tenant's nodes is the tenant's or in a namespace that an admin allowed, and every pod of the
    tenant is on its nodes. `pods`: of all namespaces, those on the held nodes and those of the tenant."""
    if not held:
        return Finding(None, "the tenant holds no node", at)
    free = frozenset(allowed)
    foreign, astray, own, system = [], [], 0, 0
    for pod in pods:
        meta, node = pod["metadata"], (pod.get("spec") or {}).get("nodeName")
        if not node or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            continue
        where = f"{meta['namespace']}/{meta['name']}"
        if meta["namespace"] == namespace:
            own += 1
            if node not in held:
                astray.append(where)
        elif node not in held:
            continue
        elif meta["namespace"] in free:
            system += 1
        else:
            foreign.append(where)
    facts = (f"{own} pods of the tenant, {system} of allowed namespaces on {', '.join(sorted(held))}",)
    if foreign:
        return Finding(False, f"foreign pods on the tenant's nodes: {join(sorted(foreign))}", at, facts)
    if astray:
        return Finding(False, f"pods of the tenant outside its nodes: {join(sorted(astray))}", at, facts)
    return Finding(True, "no foreign pod runs on the tenant's nodes", at, facts)


def admission(
    wanted: Sequence[str], policies: Mapping[str, tuple[Obj | None, Obj | None]], at: float
) -> Finding:
    """The admission policies that stop others from undoing it are in force. `policies`: policy and binding by name.

    Without them it may still hold, but nothing keeps it so: that is no violation, and no proof.
    """
    if not wanted:
        return Finding(None, "no admission policy keeps it so: set `policies.enabled`", at)
    weak = []
    for name in wanted:
        policy, binding = policies.get(name, (None, None))
        denies = "Deny" in ((binding or {}).get("spec") or {}).get("validationActions", [])
        fails = ((policy or {}).get("spec") or {}).get("failurePolicy") == "Fail"
        if not (denies and fails):
            weak.append(name)
    if weak:
        return Finding(None, f"the admission policy {join(weak)} is not in force", at)
    return Finding(
        True, "the admission policies are in force", at, tuple(f"{name}: Deny, Fail" for name in wanted)
    )


def hardening(namespace: Obj | None, status: int, message: str, at: float) -> Finding:
    """Pod security `restricted` is enforced: the namespace says so, and a privileged pod is refused in a dry run.

    `status` and `message` are the API server's answer to that pod; 0 when none came.
    """
    level = ((namespace or {}).get("metadata") or {}).get("labels", {}).get(PSA_LABEL)
    if namespace is None:
        return Finding(None, "the tenant's namespace is not there", at)
    if level != "restricted":
        return Finding(False, f"the namespace's label `{PSA_LABEL}` is not `restricted`", at)
    if 200 <= status < 300:
        return Finding(False, "a privileged pod would be admitted", at)
    if status != 403 or "PodSecurity" not in message:
        return blind("the API server did not say whether it refuses a privileged pod", at, (message[:200],))
    return Finding(True, "a privileged pod is refused", at, (f"dry run: {message[:200]}",))


def quota(live: Obj | None, hard: Mapping[str, str], at: float) -> Finding:
    """The quota stands as the operator's configuration says, counts every pod, and is not exceeded."""
    if live is None:
        return Finding(False, "the quota is gone", at)
    spec, status = live.get("spec") or {}, live.get("status") or {}
    if spec.get("scopes") or spec.get("scopeSelector"):
        return Finding(False, "the quota is narrowed by a scope", at)
    there = {key: amount(value) for key, value in (spec.get("hard") or {}).items()}
    if there != {key: amount(value) for key, value in hard.items()}:
        return Finding(False, "the quota is not that of the configuration", at)
    used, counted = status.get("used") or {}, status.get("hard") or {}
    if not hard or any(key not in used or key not in counted for key in hard):
        return blind("the quota's use has not been counted yet", at)
    facts = tuple(f"{key}: {used[key]} of {counted[key]}" for key in sorted(hard))
    over = [key for key in sorted(hard) if amount(used[key]) > amount(counted[key])]
    if over:
        return Finding(False, f"the quota is exceeded: {join(over)}", at, facts)
    return Finding(True, "the quota stands and is kept", at, facts)


_SUFFIXES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0}
_SUFFIXES |= {letter: 1000.0**power for power, letter in enumerate("kMGTPE", 1)}
_SUFFIXES |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", 1)}


def amount(text: Any) -> float:
    """The number of a Kubernetes quantity, as the API server stores it. Raises ValueError or KeyError."""
    word = str(text).strip()
    number = word.rstrip("numkKMGTPEi")
    return float(number) * _SUFFIXES[word[len(number) :]]


def policies(wanted: Sequence[Obj], live: Sequence[Obj], at: float) -> Finding:
    """The namespace's NetworkPolicies are exactly ours: policies add up, so one more opens what the others close."""
    ours = {_name(policy): policy["spec"] for policy in wanted}
    there = {_name(policy): policy.get("spec") or {} for policy in live}
    foreign = sorted(set(there) - set(ours))
    if foreign:
        return Finding(False, f"NetworkPolicy {join(foreign)} is not ours and may open more", at)
    gone = sorted(set(ours) - set(there))
    if gone:
        return Finding(False, f"NetworkPolicy {join(gone)} is gone", at)
    changed = sorted(name for name, spec in ours.items() if not covers(there[name], spec))
    if changed:
        return Finding(False, f"NetworkPolicy {join(changed)} was changed", at)
    return Finding(True, "the NetworkPolicies are as written", at, tuple(sorted(ours)))


def covers(live: Any, wanted: Any) -> bool:
    """Whether the live value is the wanted one, save for what the API server adds as absent or empty."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        keys = {key for key, value in (live | wanted).items() if not _void(live.get(key)) or not _void(value)}
        return all(covers(live.get(key), wanted.get(key)) for key in keys)
    if isinstance(wanted, list) and isinstance(live, list):
        return len(live) == len(wanted) and all(map(covers, live, wanted))
    return bool(live == wanted) or (_void(live) and _void(wanted))


def _void(value: Any) -> bool:
    return value is None or value in ([], {})


@dataclass(frozen=True)
class Separation:
    """What one replica counts since it began.

    `tenants` are uids of those that it served (the first ones, `count` in all). Tokens of prompts; those of them that
    were found in the cache; and those of these that were computed for another tenant.
    """

    tenants: frozenset[str]
    count: int
    prompt_tokens: int
    cached_tokens: int
    crossed_tokens: int


def separation(replicas: Mapping[str, Separation | None], at: float) -> Finding:
    """No replica has ever used a cached token of one tenant for another."""
    silent = sorted(name for name, counts in replicas.items() if counts is None)
    facts = tuple(
        f"{name}: {counts.prompt_tokens} prompt tokens, {counts.cached_tokens} of them cached, "
        f"{counts.crossed_tokens} from another tenant"
        for name, counts in sorted(replicas.items())
        if counts is not None
    )
    crossed = [name for name, counts in replicas.items() if counts is not None and counts.crossed_tokens]
    if crossed:
        return Finding(
            False, f"tokens cached by another tenant were used on {join(sorted(crossed))}", at, facts
        )
    if not replicas:
        return blind("not every replica has told its counts", at)
    if silent:
        return blind("not every replica has told its counts", at, (f"silent: {join(silent)}", *facts))
    return Finding(True, "no replica used a cached token across tenants", at, facts)


Tables = Mapping[str, Mapping[str, str] | None]
"""By replica: the adapters that its page table verified, served name -> digest; None when it did not answer."""


def integrity(wanted: Sequence[tuple[str, str]], tables: Tables, at: float) -> Finding:
    """Every replica holds under each served name the bytes with the digest that the route names."""
    if not wanted:
        return idle("no adapter is in use", at)
    other, lacking = [], []
    for replica, table in sorted(tables.items()):
        for name, digest in wanted:
            held = (table or {}).get(name)
            if held is None:
                lacking.append(replica)
            elif held != digest:
                other.append(f"{name} on {replica}")
    facts = tuple(f"{name}: {digest}" for name, digest in wanted)
    if other:
        return Finding(False, f"engines hold other bytes than the spec names: {join(other)}", at, facts)
    if lacking or not tables:
        return blind("not every replica has reported its digests", at, facts)
    return Finding(True, "every replica reports the digests of the spec", at, facts)


def tables_read(tables: Tables, at: float) -> Finding:
    """The page tables of a shared pool were read; whether a tenant's digests are there is judged tenant by tenant."""
    silent = sorted(name for name, table in tables.items() if table is None)
    if not tables or silent:
        return blind("not every replica has reported its digests", at)
    facts = tuple(f"{replica}: {len(table or {})} adapters" for replica, table in sorted(tables.items()))
    return Finding(True, "every replica reported its page table", at, facts)


def process(
    uid: str, replicas: Mapping[str, Separation | None], holders: Mapping[str, frozenset[str]], at: float
) -> Finding:
    """The tenant's engines have served nobody else and hold nobody else's adapters. `holders`: by replica."""
    if not replicas:
        return blind("not every replica has told whom it served", at)
    shared = [
        name
        for name, counts in replicas.items()
        if ((counts.tenants if counts is not None else frozenset()) | holders.get(name, frozenset())) - {uid}
        or (counts is not None and counts.count > 1)
    ]
    if shared:
        return Finding(False, f"another tenant is known to {join(sorted(shared))}", at)
    silent = sorted(name for name, counts in replicas.items() if counts is None)
    if silent:
        return blind("not every replica has told whom it served", at, (f"silent: {join(silent)}",))
    return Finding(True, "the tenant's engines know no other tenant", at, tuple(sorted(replicas)))


@dataclass(frozen=True)
class Refusal:
    """What the gateway answered to a request for a model: status and body, which is empty for an answer."""

    name: str
    status: int
    body: str


def door(own: int, foreign: Sequence[Refusal], unknown: Refusal, at: float) -> Finding:
    """A stranger's key is refused others' models just as one that does not exist. `own`: models that the key opens,
    the control: a key that opens nothing proves nothing."""
    if not own:
        return blind("the key that is set aside opens no model of its own", at)
    if unknown.status != 404:
        return blind("a model that does not exist is not refused with 404", at, (f"HTTP {unknown.status}",))
    if not foreign:
        return idle("no adapter is in use", at)
    facts = tuple(f"{answer.name}: HTTP {answer.status}" for answer in foreign)
    busy = [answer for answer in foreign if answer.status == 429 or answer.status >= 500]
    other = [
        answer.name
        for answer in foreign
        if answer not in busy
        and (answer.status, answer.body.replace(answer.name, ""))
        != (404, unknown.body.replace(unknown.name, ""))
    ]
    if other:
        return Finding(
            False,
            f"a stranger's key can tell {join(sorted(other))} from a model that does not exist",
            at,
            facts,
        )
    if busy:
        return blind("the gateway was too busy to say whether it refuses", at, facts)
    return Finding(True, "a stranger's key gets the same 404 as for a model that does not exist", at, facts)


def kernel(node: str, runtime_class: str | None, node_kernel: str, inside: str, at: float) -> Finding:
    """A pod with the tenant's runtime class sees another kernel than its node runs."""
    facts = (f"{node}: node runs {node_kernel}, the pod sees {inside}",)
    if not runtime_class:
        return Finding(False, "the engines have no runtime class of their own", at, facts)
    if not node_kernel or not inside:
        return blind("the kernel could not be read", at, facts)
    if node_kernel == inside:
        return Finding(False, "pods of the tenant see their node's own kernel", at, facts)
    return Finding(
        True, f"runtime class `{runtime_class}` gives pods another kernel than the node's", at, facts
    )


def _name(obj: Obj) -> str:
    return str(obj["metadata"]["name"])
