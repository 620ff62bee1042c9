"""Adapter: immutable LoRA versions by digest and the channel that is served. Owned by ML teams, namespaced."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .common import Conditions, Digest, DnsLabel, DnsSubdomain, Model, Status

SEMVER = r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z]+(\.[0-9A-Za-z]+)*)?$"

Version = Annotated[str, Field(min_length=5, max_length=63, pattern=SEMVER)]
OciReference = Annotated[
    str,
    Field(
        min_length=8,
        max_length=512,
        pattern=r"^oci://[a-z0-9.-]+(:[0-9]+)?/[a-z0-9]+([._/-][a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?$",
    ),
]


class AdapterVersion(Model):
    """Bytes that never change: `digest` covers configuration and weights (see `tenantry.api.digest`)."""

    version: Version
    digest: Digest
    source: OciReference
    rank: Annotated[int, Field(ge=1, le=512)]


class Channel(Model):
    """What a channel serves. Promotion is a one-line change of `version`."""

    name: Literal["stable"]
    version: Version


class Rollout(Model):
    """How a new version takes over. Requests on the old one have `drainSeconds` to end."""

    progress_deadline_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    drain_seconds: Annotated[int, Field(ge=0, le=3_600)] = 60


class AdapterSpec(Model):
    tenant_ref: DnsSubdomain
    versions: Annotated[list[AdapterVersion], Field(min_length=1, max_length=64)]
    channels: Annotated[list[Channel], Field(min_length=1, max_length=1)]
    rollout: Rollout = Rollout()


class ChannelStatus(Status):
    """`activeVersion` is served now; `desiredVersion` is on its way while they differ."""

    name: Literal["stable"]
    desired_version: Annotated[str, Field(max_length=63)]
    active_version: Annotated[str, Field(max_length=63)] | None = None
    active_digest: Digest | None = None
    active_source: Annotated[str, Field(max_length=512)] | None = None
    active_rank: Annotated[int, Field(ge=1)] | None = None
    replicas_loaded: Annotated[int, Field(ge=0)] = 0
    replicas: Annotated[int, Field(ge=0)] = 0


class KnownVersion(Status):
    version: Annotated[str, Field(max_length=63)]
    digest: Digest


class AdapterStatus(Status):
    observed_generation: int = -1
    conditions: Conditions = []
    channels: Annotated[list[ChannelStatus], Field(max_length=1)] = []
    known: Annotated[list[KnownVersion], Field(max_length=128)] = []


__all__ = [
    "AdapterSpec",
    "AdapterStatus",
    "AdapterVersion",
    "Channel",
    "ChannelStatus",
    "DnsLabel",
    "KnownVersion",
    "Rollout",
]
