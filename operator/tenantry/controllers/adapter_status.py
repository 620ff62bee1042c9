"""The status of an Adapter, from what was decided: channels, rollout, conditions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tenantry.api.adapter import AdapterSpec, ChannelName, Phase
from tenantry.cluster import Obj
from tenantry.desired.conditions import Verdict, no, not_ready, progress, settled, stall, unknown, wire, yes
from tenantry.promotion.machine import Artifact, Candidate, Decision, Held, ReplicaView
from tenantry.promotion.memory import written


@dataclass(frozen=True)
class Seen:
    """What a decision rests on, as far as it is told. `placed`: some model of the tenant needs the adapter."""

    stable: Candidate
    canary: Candidate
    active_on: Sequence[ReplicaView]
    placed: bool


def status(adapter: Obj, spec: AdapterSpec, decision: Decision, seen: Seen) -> Obj:
    """The status to write, without times of conditions and observedGeneration."""
    told = written(decision.memory)
    channels = {channel["name"]: channel for channel in told["channels"]}
    for name, candidate in ((ChannelName.STABLE, seen.stable), (ChannelName.CANARY, seen.canary)):
        asked = spec.channel(name)
        if asked is None:
            continue
        channels.setdefault(name.value, {"name": name.value}).update(
            desiredVersion=asked.version, replicasLoaded=candidate.loaded, replicas=len(candidate.on)
        )
    verdicts = [
        *_summary(decision, seen.placed),
        _verified(decision, seen.stable.artifact),
        _loaded(seen.stable),
        _healthy(decision),
        _rolled_back(decision),
        _ready(adapter, decision, seen),
    ]
    ordered = [channels[name.value] for name in ChannelName if name.value in channels]
    return {**told, "channels": ordered, "conditions": wire(verdicts)}


def invalid(adapter: Obj, message: str) -> Obj:
    """The stored status with the verdict: what is active serves on."""
    stored = adapter.get("status") or {}
    verdicts = [
        *stall("InvalidSpec", message),
        not_ready(stored, "InvalidSpec", message, provisioning=False),
    ]
    return {**stored, "conditions": wire(verdicts)}


def _summary(decision: Decision, placed: bool) -> tuple[Verdict, Verdict]:
    if decision.stalled:
        return stall(decision.reason, decision.message)
    if decision.reason == "Promoted":
        return settled()
    if not placed:
        return progress(
            "NotPlaced", "no model of the tenant that this adapter answers is placed on a pool yet"
        )
    return progress(decision.reason, decision.message)


def _verified(decision: Decision, artifact: Artifact) -> Verdict:
    kind = "ArtifactsVerified"
    if artifact.unsigned is not None:
        message = (
            f"the bytes have the digest of the spec, but are not signed as asked: {artifact.unsigned.message}"
        )
        return yes(kind, artifact.unsigned.reason, message)
    if artifact.verified and artifact.signature:
        message = f"the bytes have the digest of the spec, signed by {artifact.signature}"
        return yes(kind, "SignatureVerified", message)
    if artifact.verified:
        return yes(kind, "DigestMatches", "the bytes have the digest of the spec")
    if artifact.fault is not None:
        return no(kind, artifact.fault.reason, artifact.fault.message)
    return unknown(kind, decision.reason if decision.stalled else "Pending", "not fetched yet")


def _loaded(stable: Candidate) -> Verdict:
    message = f"{stable.loaded} of {len(stable.on)} replicas hold the desired version"
    if stable.on and stable.loaded == len(stable.on):
        return yes("Loaded", "OnEveryReplica", message)
    return no("Loaded", "NoReplicas" if not stable.on else "Incomplete", message)


def _healthy(decision: Decision) -> Verdict:
    kind, rollout = "RolloutHealthy", decision.memory.rollout
    if decision.stalled:
        return no(kind, decision.reason, decision.message)
    if rollout is not None and rollout.shifting and any(not tally.passed for tally in rollout.tallies):
        return unknown(kind, "Measuring", decision.message)
    return yes(kind, decision.reason)


def _rolled_back(decision: Decision) -> Verdict:
    if decision.phase is Phase.ROLLED_BACK:
        return yes("RolledBack", decision.reason, decision.message)
    return no("RolledBack", "NotRolledBack")


def _ready(adapter: Obj, decision: Decision, seen: Seen) -> Verdict:
    serving = sum(view.ready and view.held is Held.LOADED for view in seen.active_on)
    stored = adapter.get("status") or {}
    if decision.active is None:
        return not_ready(stored, decision.reason, decision.message, provisioning=not decision.stalled)
    if serving:
        served = " and ".join(
            f"`{release.version}`" + (f" ({weight} %)" if weight < 100 else "")
            for release, weight in decision.memory.targets
        )
        return yes("Ready", "Serving", f"{served} {'is' if ' and ' not in served else 'are'} served")
    reason = "NoReplicaReady" if seen.placed else "NotPlaced"
    return not_ready(
        stored, reason, f"no ready replica holds `{decision.active.version}`", provisioning=False
    )
