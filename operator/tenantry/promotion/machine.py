"""The promotion of one adapter: Verify -> Load -> Promoted, or Stalled with the old version serving on.

What is active moves only here, and only when every replica that serves the tenant holds the new bytes by digest. The
state between two steps is the Adapter's status (active version with digest and source), so a restart resumes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tenantry.api.adapter import AdapterSpec, AdapterStatus


class Phase(StrEnum):
    """Where a promotion stands. PROMOTED: desired is active. STALLED: it waits for an edit or a repair."""

    VERIFY = "Verify"
    LOAD = "Load"
    PROMOTED = "Promoted"
    STALLED = "Stalled"


@dataclass(frozen=True)
class Release:
    """One immutable version: bytes by digest, and where they come from."""

    version: str
    digest: str
    source: str
    rank: int
    secret_ref: str = ""


class Held(StrEnum):
    """What one replica says about one served name. LOADED: same name, same digest, verified by the engine."""

    UNKNOWN = "Unknown"
    MISSING = "Missing"
    LOADED = "Loaded"
    FAILED = "Failed"


@dataclass(frozen=True)
class Fault:
    """Why something failed, in the words of whoever saw it."""

    reason: str
    message: str


@dataclass(frozen=True)
class ReplicaView:
    """A replica that is to serve the tenant. `ready`: Kubernetes sends it traffic now."""

    name: str
    ready: bool
    held: Held
    fault: Fault | None = None


@dataclass(frozen=True)
class Artifact:
    """What is known of the desired version's bytes. `verified` None: nothing yet.

    `signature` says who signed, where a signature was asked for and found good; `unsigned` what is wrong with it where
    that is only to be told.
    """

    verified: bool | None = None
    fault: Fault | None = None
    signature: str = ""
    unsigned: Fault | None = None


@dataclass(frozen=True)
class Inputs:
    """Everything that one step depends on.

    `active` and `known` come from the status (see `resume`), `objection` from tenant and pool, `desired_on` is what
    the replicas say of the desired version, `elapsed` the seconds since that version was first asked for.
    """

    spec: AdapterSpec
    active: Release | None
    known: Mapping[str, str]
    objection: Fault | None
    artifact: Artifact
    desired_on: Sequence[ReplicaView]
    elapsed: float


@dataclass(frozen=True)
class Decision:
    """`active` is what routes name. `declare` is what replicas must hold, active first."""

    phase: Phase
    desired: Release | None
    active: Release | None
    declare: tuple[Release, ...]
    known: Mapping[str, str]
    reason: str
    message: str
    loaded: int
    replicas: int


def resume(status: AdapterStatus) -> tuple[Release | None, dict[str, str]]:
    """(active release, known version -> digest), as the status tells them."""
    known = {entry.version: entry.digest for entry in status.known}
    stable = next((channel for channel in status.channels if channel.name == "stable"), None)
    if stable is None or stable.active_version is None or stable.active_digest is None:
        return None, known
    release = Release(
        stable.active_version,
        stable.active_digest,
        stable.active_source or "",
        stable.active_rank or 1,
        stable.active_secret_ref or "",
    )
    return release, known


def desired_release(spec: AdapterSpec) -> Release | None:
    """What `channels[stable]` asks for; None when `versions` does not list it."""
    wanted = spec.channels[0].version
    entry = next((version for version in spec.versions if version.version == wanted), None)
    if entry is None:
        return None
    return Release(entry.version, entry.digest, entry.source, entry.rank, entry.secret_ref or "")


def step(inputs: Inputs) -> Decision:
    """One step. Called again with what has been seen since, until nothing changes."""
    desired = desired_release(inputs.spec)
    fault = _fault(inputs, desired)
    if desired is None or fault is not None:
        return _decide(inputs, desired, Phase.STALLED, fault or _unlisted(inputs.spec))
    ready = [view for view in inputs.desired_on if view.ready]
    waiting = [view for view in ready if view.held is not Held.LOADED]
    if _same(desired, inputs.active) or (ready and not waiting and not _unproven(inputs)):
        # Where only the source was corrected this takes effect at once: the bytes are the same.
        served = Fault("Promoted", f"`{desired.version}` is served")
        return _decide(inputs, desired, Phase.PROMOTED, served, active=desired)
    if inputs.elapsed > inputs.spec.rollout.progress_deadline_seconds:
        return _decide(inputs, desired, Phase.STALLED, _late(inputs, ready, waiting))
    if _unproven(inputs) or (
        inputs.artifact.verified is None and not any(view.held is Held.LOADED for view in inputs.desired_on)
    ):
        why = Fault("Verifying", f"fetching `{desired.version}` and checking its digest")
        return _decide(inputs, desired, Phase.VERIFY, why)
    if not ready:
        why = Fault("WaitingForReplicas", "no replica of the tenant is ready yet")
    else:
        done = len(ready) - len(waiting)
        why = Fault("Loading", f"`{desired.version}` is on {done} of {len(ready)} ready replicas")
    return _decide(inputs, desired, Phase.LOAD, why)


def _decide(
    inputs: Inputs, desired: Release | None, phase: Phase, why: Fault, active: Release | None = None
) -> Decision:
    withdrawn = inputs.objection is not None and inputs.objection.reason in _WITHDRAWN
    active = None if withdrawn else active or inputs.active
    return Decision(
        phase=phase,
        desired=desired,
        active=active,
        declare=declaration(inputs.spec, active, inputs.known, inputs.objection),
        known=_remember(inputs, desired),
        reason=why.reason,
        message=why.message,
        loaded=sum(view.held is Held.LOADED for view in inputs.desired_on),
        replicas=len(inputs.desired_on),
    )


# Such a version never reaches a replica. All other faults may heal, so the version stays declared.
_UNDECLARABLE = frozenset(
    {
        "UnknownVersion",
        "VersionChanged",
        "NotBound",
        "NotAllowed",
        "TenantNotFound",
        "RankTooLarge",
        "RankMismatch",
    }
)
# The tenant does not accept the adapter (any more): nothing of it is served, whatever was active.
_WITHDRAWN = frozenset({"NotBound", "NotAllowed", "TenantNotFound"})


def declaration(
    spec: AdapterSpec, active: Release | None, known: Mapping[str, str], objection: Fault | None
) -> tuple[Release, ...]:
    """What replicas must hold, active first. It depends on spec and status only, so it survives restarts."""
    if objection is not None and objection.reason in _WITHDRAWN:
        return ()
    desired = desired_release(spec)
    fault = _spec_fault(spec, desired, known, objection)
    if desired is None or (fault is not None and fault.reason in _UNDECLARABLE):
        desired = None
    releases = (active, desired if desired is None or not _same(desired, active) else None)
    return tuple(release for release in releases if release is not None)


def _unproven(inputs: Inputs) -> bool:
    """A signature is asked for and nobody has looked yet. Replicas prove digests alone."""
    return inputs.spec.verification is not None and inputs.artifact.verified is None


def _same(one: Release, other: Release | None) -> bool:
    return other is not None and (one.version, one.digest) == (other.version, other.digest)


def _spec_fault(
    spec: AdapterSpec, desired: Release | None, known: Mapping[str, str], objection: Fault | None
) -> Fault | None:
    """What spec and tenant say against the desired version."""
    if desired is None:
        return _unlisted(spec)
    before = known.get(desired.version)
    if before is not None and before != desired.digest:
        return Fault(
            "VersionChanged",
            f"version `{desired.version}` was {before} before and must not change: "
            "publish other bytes under a new version",
        )
    return objection


def _fault(inputs: Inputs, desired: Release | None) -> Fault | None:
    """What stands against the desired version, the gravest first."""
    fault = _spec_fault(inputs.spec, desired, inputs.known, inputs.objection)
    if fault is not None or desired is None:
        return fault
    if inputs.artifact.fault is not None and not _same(desired, inputs.active):
        return inputs.artifact.fault
    failed = next((view for view in inputs.desired_on if view.held is Held.FAILED), None)
    if failed is None:
        return None
    fault = failed.fault or Fault("Failed", "the engine gave no reason")
    return Fault(fault.reason, f"replica `{failed.name}`: {fault.message}")


def _unlisted(spec: AdapterSpec) -> Fault:
    return Fault(
        "UnknownVersion",
        f"`channels[stable].version` must be one of `versions`: `{spec.channels[0].version}` is not listed",
    )


def _remember(inputs: Inputs, desired: Release | None) -> dict[str, str]:
    """Digests of versions still listed or active, as first seen: the schema cannot see a changed one."""
    listed = {version.version: version.digest for version in inputs.spec.versions}
    known = {name: inputs.known.get(name, digest) for name, digest in listed.items()}
    if inputs.active is not None:
        known[inputs.active.version] = inputs.active.digest
    if desired is not None:
        known.setdefault(desired.version, desired.digest)
    return dict(sorted(known.items()))


def _late(inputs: Inputs, ready: Sequence[ReplicaView], waiting: Sequence[ReplicaView]) -> Fault:
    limit = inputs.spec.rollout.progress_deadline_seconds
    if not ready:
        what = "no replica of the tenant is ready"
    else:
        held = ", ".join(f"`{view.name}` {view.held.value}" for view in waiting[:5])
        what = f"{len(waiting)} of {len(ready)} ready replicas do not hold it ({held})"
    return Fault("ProgressDeadlineExceeded", f"not loaded within {limit} s: {what}; it is tried on")
