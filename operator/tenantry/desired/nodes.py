"""Which nodes a dedicated tenant holds, and what is written on them: one label, two annotations, two taints, a cordon.

Only nodes that an admin labelled claimable can be taken. `spec.taints` is an atomic list, so changes go as merge
patches that carry every taint, and must be conditional on the resourceVersion that was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tenantry.api import names

from .objects import Obj

UID_ANNOTATION: Final = "tenantry.dev/tenant-uid"
CORDON_ANNOTATION: Final = "tenantry.dev/cordoned"
"""Why the operator cordoned a node. A cordon without it is somebody else's, and stays."""

EFFECTS: Final = ("NoSchedule", "NoExecute")


@dataclass(frozen=True)
class Claim:
    """What a tenant wants."""

    tenant: str
    uid: str
    count: int
    region: str | None
    region_label: str
    selector: Mapping[str, str]


@dataclass(frozen=True)
class NodePlan:
    """`hold` are the tenant's nodes once `take` are written; `release` are given back; `missing` were not found."""

    hold: tuple[str, ...] = ()
    take: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    missing: int = 0
    reason: str = ""


def plan(claim: Claim, nodes: Sequence[Obj], busy: frozenset[str] = frozenset()) -> NodePlan:
    """Keeps what is held, takes the first free matches by name, gives back surplus nodes that are not `busy`.

    `busy` names nodes on which pods of the tenant run: giving one back would leave them beside others.
    """
    mine = held(nodes, claim.tenant, claim.uid)
    incomplete = [
        _name(node) for node in nodes if _name(node) in mine and not fully_claimed(node, claim.tenant)
    ]
    surplus = [name for name in reversed(mine) if name not in busy][: max(0, len(mine) - claim.count)]
    keep = [name for name in mine if name not in surplus]
    wanted = max(0, claim.count - len(keep))
    free = sorted(_name(node) for node in nodes if _free(node) and matches(node, claim))
    take = free[:wanted]
    missing = wanted - len(take)
    return NodePlan(
        hold=tuple(sorted([*keep, *take])),
        take=tuple(sorted([*take, *(name for name in incomplete if name in keep)])),
        release=tuple(sorted(surplus)),
        missing=missing,
        reason=_why(claim, nodes, missing) if missing else "",
    )


def holds(node: Obj, tenant: str, uid: str) -> bool:
    """Whether the node is this very tenant's: the name alone does not prove it after a re-creation."""
    meta = node["metadata"]
    return bool(
        meta.get("labels", {}).get(names.NODE_TENANT_LABEL) == tenant
        and meta.get("annotations", {}).get(UID_ANNOTATION) == uid
    )


def fully_claimed(node: Obj, tenant: str) -> bool:
    """Whether both taints stand beside the label."""
    taints = {
        (taint.get("key"), taint.get("value"), taint.get("effect"))
        for taint in node.get("spec", {}).get("taints") or []
    }
    return all((names.NODE_TAINT, tenant, effect) in taints for effect in EFFECTS)


def matches(node: Obj, claim: Claim) -> bool:
    """Region and selector narrow what the admin offers."""
    labels = node["metadata"].get("labels", {})
    if claim.region is not None and labels.get(claim.region_label) != claim.region:
        return False
    return all(labels.get(key) == value for key, value in claim.selector.items())


def claim_patch(node: Obj, tenant: str, uid: str) -> Obj:
    """Merge patch that takes the node. Both taints go in together with the label: there is no moment between."""
    return _patch(
        node,
        tenant,
        uid,
        [{"key": names.NODE_TAINT, "value": tenant, "effect": effect} for effect in EFFECTS],
    )


def release_patch(node: Obj) -> Obj:
    """Merge patch that gives the node back as it was found."""
    return _patch(node, None, None, [])


def held(nodes: Iterable[Obj], tenant: str, uid: str) -> list[str]:
    """Names of the nodes that the tenant holds, sorted: the fact that reports and probes start from."""
    return sorted(_name(node) for node in nodes if holds(node, tenant, uid))


def cordon_patch(why: str) -> Obj:
    """Merge patch that keeps new pods off the node, and says that the operator did it."""
    return {"metadata": {"annotations": {CORDON_ANNOTATION: why}}, "spec": {"unschedulable": True}}


def uncordon_patch() -> Obj:
    """Merge patch that lifts a cordon of the operator's own; see `cordoned_by_us`."""
    return {"metadata": {"annotations": {CORDON_ANNOTATION: None}}, "spec": {"unschedulable": None}}


def cordoned_by_us(node: Obj) -> str | None:
    """Why the operator cordoned the node; None where it did not, or somebody lifted the cordon."""
    why = node["metadata"].get("annotations", {}).get(CORDON_ANNOTATION)
    return str(why) if why is not None and node.get("spec", {}).get("unschedulable") else None


def _patch(node: Obj, tenant: str | None, uid: str | None, ours: list[Obj]) -> Obj:
    others = [
        taint for taint in node.get("spec", {}).get("taints") or [] if taint.get("key") != names.NODE_TAINT
    ]
    patch: Obj = {
        "metadata": {
            "labels": {names.NODE_TENANT_LABEL: tenant},
            "annotations": {UID_ANNOTATION: uid},
        },
        "spec": {"taints": [*others, *ours] or None},
    }
    if tenant is None and CORDON_ANNOTATION in node["metadata"].get("annotations", {}):
        patch["metadata"]["annotations"][CORDON_ANNOTATION] = None
        if cordoned_by_us(node) is not None:
            patch["spec"]["unschedulable"] = None
    return patch


def _name(node: Obj) -> str:
    return str(node["metadata"]["name"])


def _claimable(node: Obj) -> bool:
    return bool(node["metadata"].get("labels", {}).get(names.CLAIMABLE_LABEL) == "true")


def _held_by_anyone(node: Obj) -> bool:
    labelled = names.NODE_TENANT_LABEL in node["metadata"].get("labels", {})
    taints = node.get("spec", {}).get("taints") or []
    return labelled or any(taint.get("key") == names.NODE_TAINT for taint in taints)


def _free(node: Obj) -> bool:
    deleting = bool(node["metadata"].get("deletionTimestamp"))
    return (
        _claimable(node)
        and not deleting
        and not _held_by_anyone(node)
        and not node.get("spec", {}).get("unschedulable", False)
    )


def _why(claim: Claim, nodes: Sequence[Obj], missing: int) -> str:
    claimable = [node for node in nodes if _claimable(node)]
    matching = [node for node in claimable if matches(node, claim)]
    wish = [f"region `{claim.region}`"] if claim.region is not None else []
    wish += [f"`{key}={value}`" for key, value in sorted(claim.selector.items())]
    suffix = f" with {', '.join(wish)}" if wish else ""
    return (
        f"{missing} of {claim.count} nodes missing: {len(claimable)} claimable, {len(matching)} of them match"
        f"{suffix}, {sum(_held_by_anyone(node) for node in matching)} of those are taken; "
        f"label more nodes `{names.CLAIMABLE_LABEL}=true`"
    )
