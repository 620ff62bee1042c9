"""What a deletion waits for, in words that help: which object, held by what, and the way out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from tenantry.cluster import Obj
from tenantry.desired.conditions import no, progress, shorten, stall, wire

_SHOWN = 3


def deleting(root: Obj, left: str, *, blocked: bool) -> Obj:
    """The status of a root that is being deleted. `blocked`: for so long that somebody must look."""
    message = f"being deleted: {left}"
    if blocked:
        command = (
            f"kubectl patch {root['kind'].lower()} {root['metadata']['name']} --type=merge "
            """-p '{"metadata":{"finalizers":null}}'"""
        )
        message += f"; it is tried on. To give up on the rest after a look by hand: {command}"
    progressing = stall("DeletionBlocked", message) if blocked else progress("Deleting", message)
    return {"conditions": wire([no("Ready", "Deleting", message), *progressing])}


def remaining(objects: Sequence[Obj], plural: str) -> str:
    """How many there are, which ones, and whose finalizers hold those that are being deleted already."""
    shown = ", ".join(_held(obj) for obj in objects[:_SHOWN])
    more = f" and {len(objects) - _SHOWN} more" if len(objects) > _SHOWN else ""
    return f"{len(objects)} {plural} ({shown}{more})"


def _held(obj: Obj) -> str:
    meta = obj["metadata"]
    holders = meta.get("finalizers") or []
    if not meta.get("deletionTimestamp") or not holders:
        return f"`{meta['name']}`"
    return f"`{meta['name']}`, held by finalizer {', '.join(f'`{name}`' for name in holders[:_SHOWN])}"


def why_it_stays(namespace: Obj) -> str:
    """What the namespace controller says keeps a namespace that is being deleted; empty when it says nothing."""
    conditions = (namespace.get("status") or {}).get("conditions") or []
    said = [
        str(condition.get("message", ""))
        for condition in conditions
        if condition.get("status") == "True" and condition.get("type") != "NamespaceDeletionContentFailure"
    ]
    return shorten("; ".join(text for text in said if text), 512)
