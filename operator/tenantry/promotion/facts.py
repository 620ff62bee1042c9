"""What a promotion is told: releases, and what replicas, the fetcher and gateways say of them. Data alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tenantry.api.adapter import AdapterVersion, ReleaseStatus


@dataclass(frozen=True)
class Release:
    """One immutable version: bytes by digest, and where they come from."""

    version: str
    digest: str
    source: str
    rank: int
    secret_ref: str = ""

    @classmethod
    def of(cls, entry: AdapterVersion | ReleaseStatus) -> Release:
        """What a spec lists, or a status remembers."""
        return cls(entry.version, entry.digest, entry.source, entry.rank, entry.secret_ref or "")

    def same(self, other: Release | None) -> bool:
        """Whether it is the same version of the same bytes, wherever they come from."""
        return other is not None and (self.version, self.digest) == (other.version, other.digest)


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
    """A replica that is to serve the tenant. `ready`: Kubernetes sends it traffic now.

    `answered`: this very process has answered a smoke request for the version.
    """

    name: str
    ready: bool
    held: Held
    fault: Fault | None = None
    answered: bool = False

    @property
    def proven(self) -> bool:
        """Whether requests may be sent here."""
        return self.held is Held.LOADED and self.answered


@dataclass(frozen=True)
class Artifact:
    """What is known of a version's bytes. `verified` None: nothing yet.

    `signature` says who signed, where a signature was asked for and found good; `unsigned` what is wrong with it where
    that is only to be told. `unproven`: a signature is asked for and nobody has looked yet: replicas prove digests.
    """

    verified: bool | None = None
    fault: Fault | None = None
    signature: str = ""
    unsigned: Fault | None = None
    unproven: bool = False


@dataclass(frozen=True)
class Candidate:
    """What is known of one wanted version. `objection` comes from tenant, pool and the adapter's own files."""

    objection: Fault | None = None
    artifact: Artifact = Artifact()
    on: Sequence[ReplicaView] = ()

    @property
    def ready(self) -> list[ReplicaView]:
        """The replicas that count: one without traffic is not waited for."""
        return [view for view in self.on if view.ready]

    @property
    def proven(self) -> bool:
        """Whether every replica that gets traffic may be sent requests for the version."""
        return (
            bool(self.ready)
            and all(view.proven for view in self.ready)
            and not self.artifact.unproven
            and self.artifact.fault is None
        )

    @property
    def loaded(self) -> int:
        return sum(view.held is Held.LOADED for view in self.on)

    @property
    def failed(self) -> Fault | None:
        """The first replica that cannot serve the version, by name."""
        view = next((view for view in self.on if view.held is Held.FAILED), None)
        if view is None:
            return None
        fault = view.fault or Fault("Failed", "the engine gave no reason")
        return Fault(fault.reason, f"replica `{view.name}`: {fault.message}")
