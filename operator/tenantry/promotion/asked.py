"""What a spec asks for, what stands against it, and so what replicas must hold. No observations go in."""

from __future__ import annotations

from typing import Final

from tenantry.api.adapter import AdapterSpec, ChannelName, Phase

from .facts import Fault, Release
from .memory import Memory, revision

UNDECLARABLE: Final = frozenset(
    {
        "UnknownVersion",
        "VersionChanged",
        "NotBound",
        "NotAllowed",
        "TenantNotFound",
        "RankTooLarge",
        "RankMismatch",
        "TooManyVersions",
    }
)
"""Reasons why a version never reaches a replica. All other faults may heal, so the version stays declared."""
WITHDRAWN: Final = frozenset({"NotBound", "NotAllowed", "TenantNotFound"})
"""The tenant does not accept the adapter (any more): nothing of it is served, whatever was active."""


def wanted(spec: AdapterSpec, channel: ChannelName) -> Release | None:
    """What a channel asks for; None when there is no such channel, or `versions` does not list its version."""
    asked = spec.channel(channel)
    if asked is None:
        return None
    return next((Release.of(entry) for entry in spec.versions if entry.version == asked.version), None)


def fault_of(
    spec: AdapterSpec, channel: ChannelName, memory: Memory, objection: Fault | None
) -> Fault | None:
    """What spec, tenant (`objection`) and history say against a channel's version."""
    release = wanted(spec, channel)
    if release is None:
        return _unlisted(spec, channel)
    before = memory.known.get(release.version)
    if before is not None and before != release.digest:
        return Fault(
            "VersionChanged",
            f"version `{release.version}` was {before} before and must not change: "
            "publish other bytes under a new version",
        )
    if objection is None and channel is ChannelName.STABLE:
        return _third(spec, release, memory)
    return objection


def declaration(
    spec: AdapterSpec, memory: Memory, stable: Fault | None, canary: Fault | None
) -> tuple[Release, ...]:
    """What replicas must hold, what is served first.

    `stable` and `canary`: what tenant and pool say against the channels' versions.
    """
    if stable is not None and stable.reason in WITHDRAWN:
        return ()
    releases = [release for release, _ in memory.targets]
    for channel, objection in ((ChannelName.STABLE, stable), (ChannelName.CANARY, canary)):
        release = wanted(spec, channel)
        fault = fault_of(spec, channel, memory, objection)
        if release is None or (fault is not None and fault.reason in UNDECLARABLE):
            continue
        if not _given_up(spec, memory, release):
            releases.append(release)
    kept: list[Release] = []
    for release in releases:
        if not any(release.same(other) for other in kept):
            kept.append(release)
    return tuple(kept)


def _given_up(spec: AdapterSpec, memory: Memory, release: Release) -> bool:
    """Whether the release was rolled back, and the spec has asked for nothing else since."""
    rollout = memory.rollout
    return (
        rollout is not None
        and rollout.phase is Phase.ROLLED_BACK
        and release.same(rollout.release)
        and release.same(wanted(spec, ChannelName.STABLE))
        and rollout.revision == revision(spec, release)
    )


def _third(spec: AdapterSpec, desired: Release, memory: Memory) -> Fault | None:
    """At most two versions of an adapter are live."""
    canary = wanted(spec, ChannelName.CANARY)
    if memory.active is None or canary is None or desired.same(memory.active):
        return None
    if canary.same(desired) or canary.same(memory.active):
        return None
    return Fault(
        "TooManyVersions",
        f"`{memory.active.version}` is served and `{canary.version}` is the canary, so "
        f"`channels[stable].version` must be one of them and not `{desired.version}`: remove the channel "
        "`canary`, or promote its version",
    )


def _unlisted(spec: AdapterSpec, channel: ChannelName) -> Fault:
    asked = spec.channel(channel)
    if asked is None:
        return Fault("UnknownVersion", f"`channels` must hold the channel `{channel.value}`")
    return Fault(
        "UnknownVersion",
        f"`channels[{channel.value}].version` must be one of `versions`: `{asked.version}` is not listed",
    )


def precedence(version: str) -> tuple[object, ...]:
    """Sorts versions as SemVer 2.0.0, section 11, does."""
    core, dash, labels = version.partition("-")
    numbers = tuple(int(part) for part in core.split("."))
    if not dash:
        return (numbers, 1, ())
    parts = tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in labels.split("."))
    return (numbers, 0, parts)
