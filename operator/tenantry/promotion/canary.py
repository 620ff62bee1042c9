"""The canary channel: a second version beside the stable one, with a weight set by hand."""

from __future__ import annotations

from dataclasses import replace

from tenantry.api.adapter import AdapterSpec, ChannelName

from .asked import fault_of, wanted
from .facts import Candidate, Fault, Held
from .memory import Memory


def admit(spec: AdapterSpec, memory: Memory, candidate: Candidate) -> Memory:
    """The memory with the canary as it may be served now: only what is proven everywhere begins to be.

    What is served already stays while replicas restart, but not on one that says it cannot serve it.
    """
    release, before = wanted(spec, ChannelName.CANARY), memory.canary
    none = replace(memory, canary=None, canary_weight=0)
    if release is None or memory.active is None or release.same(memory.active):
        return none
    if (
        fault_of(spec, ChannelName.CANARY, memory, candidate.objection) is not None
        or candidate.failed is not None
    ):
        return none
    if not (release.same(before) or candidate.proven):
        return none
    asked = spec.channel(ChannelName.CANARY)
    return replace(memory, canary=release, canary_weight=(asked.weight if asked is not None else None) or 0)


def trouble(spec: AdapterSpec, memory: Memory, candidate: Candidate) -> tuple[Fault, bool] | None:
    """Why the canary is not served as asked, and whether it waits for somebody; None when all is well."""
    asked, release = spec.channel(ChannelName.CANARY), wanted(spec, ChannelName.CANARY)
    served = memory.canary if memory.canary is not None else memory.active
    if asked is None or (release is not None and release.same(served)):
        return None
    fault = (
        fault_of(spec, ChannelName.CANARY, memory, candidate.objection)
        or candidate.artifact.fault
        or candidate.failed
    )
    if fault is not None:
        return Fault(fault.reason, f"canary: {fault.message}"), True
    return loading(asked.version, candidate, "canary "), False


def loading(version: str, candidate: Candidate, what: str = "") -> Fault:
    """How far a version has come on its replicas."""
    ready = candidate.ready
    if not ready:
        return Fault("WaitingForReplicas", "no replica of the tenant is ready yet")
    done = sum(view.held is Held.LOADED for view in ready)
    if done < len(ready):
        return Fault("Loading", f"{what}`{version}` is on {done} of {len(ready)} ready replicas")
    answered = sum(view.answered for view in ready)
    return Fault("Smoke", f"{what}`{version}` has answered on {answered} of {len(ready)} ready replicas")
