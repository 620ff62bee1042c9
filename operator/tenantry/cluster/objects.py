"""Pure helpers on Kubernetes objects: owners, hashes, conditions, versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from tenantry.api.names import MANAGED_BY, MANAGED_BY_LABEL

from .resources import Obj


def uid_of(obj: Obj) -> str:
    return str(obj["metadata"].get("uid", ""))


def version_of(obj: Obj) -> str:
    return str(obj["metadata"].get("resourceVersion", ""))


def spec_version(obj: Obj) -> tuple[str, int]:
    """What tells a spec from all others: the object's uid and its generation."""
    return uid_of(obj), int(obj["metadata"].get("generation", 0))


def is_deleting(obj: Obj) -> bool:
    return bool(obj["metadata"].get("deletionTimestamp"))


def is_older(version: str, than: str) -> bool:
    """Whether a resourceVersion is older than another one; versions that are no numbers never are."""
    return version.isdigit() and than.isdigit() and int(version) < int(than)


def controller_of(obj: Obj) -> dict[str, Any] | None:
    """The controller owner reference, if there is one."""
    for reference in obj["metadata"].get("ownerReferences", []):
        if reference.get("controller"):
            return dict(reference)
    return None


def owned_by(obj: Obj, owner: Obj) -> bool:
    """Whether the controller owner reference names this very owner, by uid."""
    reference = controller_of(obj)
    return reference is not None and reference.get("uid") == uid_of(owner)


def owner_reference(owner: Obj) -> dict[str, Any]:
    """The controller owner reference to `owner`, which must be live (have a uid)."""
    if not uid_of(owner):
        raise ValueError("`owner` must be a live object with metadata.uid")
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": uid_of(owner),
        "controller": True,
        "blockOwnerDeletion": True,
    }


def is_managed(obj: Obj) -> bool:
    return bool(obj["metadata"].get("labels", {}).get(MANAGED_BY_LABEL) == MANAGED_BY)


def digest_of(value: Any) -> str:
    """A stable hash of a JSON value: the same content in any key order gives the same text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_VOLATILE = frozenset({"resourceVersion", "managedFields", "generation", "creationTimestamp", "selfLink"})


def content_digest(obj: Obj) -> str:
    """A hash of all that somebody may have changed by hand: everything but status and bookkeeping."""
    metadata = {name: value for name, value in obj["metadata"].items() if name not in _VOLATILE}
    rest = {name: value for name, value in obj.items() if name not in ("metadata", "status")}
    return digest_of([metadata, rest])


def condition(kind: str, status: bool | None, reason: str, message: str = "") -> dict[str, Any]:
    """A condition without times; `None` is Unknown. `set_status` adds lastTransitionTime and observedGeneration."""
    text = "Unknown" if status is None else str(status)
    return {"type": kind, "status": text, "reason": reason, "message": message}


def find_condition(obj: Obj, kind: str) -> dict[str, Any] | None:
    """The condition of that type in the object's status."""
    conditions: Iterable[dict[str, Any]] = (obj.get("status") or {}).get("conditions") or []
    return next((found for found in conditions if found.get("type") == kind), None)


def has_condition(obj: Obj, kind: str, status: bool = True) -> bool:
    """Whether the object's status has that condition with that status."""
    found = find_condition(obj, kind)
    return found is not None and found.get("status") == str(status)
