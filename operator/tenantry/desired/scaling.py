"""Who writes the number of a lane's replicas: the operator, or the autoscaler that the pool hands it to.

A lane with `replicas.max` belongs to an autoscaler from its first moment: the operator makes the StatefulSet with `min`
replicas, gives up the ownership of the field, which changes no value, and never sends it again. (A field that
server-side apply owns and stops sending falls back to 1.) A lane without `max` has exactly `min` replicas: what
somebody writes by hand goes back. Where somebody writes again and again, the operator says so and leaves the field
alone until the pool's spec changes, instead of adding and removing pods for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tenantry.api import names
from tenantry.api.pool import Replicas

from .objects import Obj

MOST_TAKEN_BACK: Final = 3
"""How often the operator takes the number back from others, for one spec, before it lets them have it."""


@dataclass(frozen=True)
class Scale:
    """What to do about `spec.replicas`. `send` None: the field is left out.

    `give_up`: the operator's ownership goes first. `taken_back`: somebody else's number is overwritten. `target` is how
    many there are to be in the end: fewer than `send` while the tenants of the last ones still have to move.
    """

    send: int | None
    target: int
    give_up: bool = False
    taken_back: bool = False


def holders(live: Obj) -> list[tuple[str, str]]:
    """(manager, subresource) of everybody who holds `spec.replicas`, in the order of the object."""
    return [
        (str(entry.get("manager", "")), str(entry.get("subresource", "")))
        for entry in live["metadata"].get("managedFields") or []
        if "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
    ]


def decide(wanted: Replicas, live: Obj | None, *, taken_back: int = 0, emptied: bool = False) -> Scale:
    """What to write now.

    live: the lane's StatefulSet, None before it exists. taken_back: how often others' numbers were overwritten for this
    spec. emptied: the replicas beyond `min` serve nobody any more.
    """
    if live is None:
        return Scale(wanted.min, wanted.min)
    current = int((live.get("spec") or {}).get("replicas", 1))
    owners = holders(live)
    ours = any(manager == names.FIELD_MANAGER for manager, _ in owners)
    others = any(manager != names.FIELD_MANAGER for manager, _ in owners)
    if wanted.max is not None:
        return Scale(None, current, give_up=ours)
    if others and taken_back >= MOST_TAKEN_BACK:
        return Scale(None, current, give_up=ours)
    foreign = others and current != wanted.min
    if current > wanted.min and not emptied:
        return Scale(current, wanted.min)
    return Scale(wanted.min, wanted.min, taken_back=foreign)


def remark(wanted: Replicas, live: Obj, *, taken_back: int) -> str:
    """What is wrong with the number of replicas, in a sentence; empty when nothing is."""
    current = int((live.get("spec") or {}).get("replicas", 1))
    others = [manager for manager, _ in holders(live) if manager != names.FIELD_MANAGER]
    who = f"`{others[-1]}`" if others else "nobody"
    if wanted.max is None:
        if current != wanted.min and others and taken_back >= MOST_TAKEN_BACK:
            return (
                f"{who} set {current} replicas again and again where `replicas.min` says {wanted.min}: "
                "set `replicas.max` to hand the number over, or remove the autoscaler and change the spec"
            )
        return ""
    if wanted.min <= current <= wanted.max:
        return ""
    return (
        f"{who} set {current} replicas, which must lie between `replicas.min` {wanted.min} and `replicas.max` "
        f"{wanted.max}: give the autoscaler the same bounds"
    )
