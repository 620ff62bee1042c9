"""Adapter: immutable LoRA versions by digest and the channel that is served. Owned by ML teams, namespaced."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .common import (
    PATTERN_MESSAGES,
    Conditions,
    Digest,
    DnsLabel,
    DnsSubdomain,
    Model,
    Rule,
    Status,
    keyed_by,
)

SEMVER = r"^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(-[0-9A-Za-z]+(\.[0-9A-Za-z]+)*)?$"
_HOST = r"[a-z0-9.-]+(:[0-9]+)?"
_STEP = r"/[A-Za-z0-9_][A-Za-z0-9_.-]*"
SOURCE = (
    rf"^(oci://{_HOST}/[a-z0-9]+([._/-][a-z0-9]+)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?"
    rf"|s3://{_HOST}/[a-z0-9][a-z0-9.-]*[a-z0-9]({_STEP})*"
    rf"|hf://{_HOST}{_STEP}({_STEP})+@[0-9a-f]{{40}})$"
)
ISSUER = r"^https://[!-~]+$"
PATTERN_MESSAGES[SEMVER] = (
    "must be a semantic version such as `1.2.0` or `1.2.0-rc.1`, without `+` and without `-` inside the pre-release"
)
PATTERN_MESSAGES[SOURCE] = (
    "must be an OCI reference such as `oci://registry.example.com/team/tone:1.0.0`, a folder of a bucket such as"
    " `s3://s3.example.com/bucket/tone/1.0.0`, or a commit of a hub's repository such as"
    " `hf://hub.example.com/team/tone@` and its 40 hex digits"
)
PATTERN_MESSAGES[ISSUER] = (
    "must be the URL of an OIDC issuer, such as `https://token.actions.githubusercontent.com`"
)

Version = Annotated[str, Field(min_length=5, max_length=63, pattern=SEMVER)]
Source = Annotated[str, Field(min_length=8, max_length=512, pattern=SOURCE)]

NAME_RULES = (
    Rule(
        "size(self.metadata.name) <= 63 && !self.metadata.name.contains('.') && !self.metadata.name.contains('--')",
        "`metadata.name` must be a DNS label of at most 63 characters without `--`, since it becomes a part of the"
        " name under which engines serve; use single hyphens and no dots",
    ),
)


class AdapterVersion(Model):
    """Bytes that never change: `digest` covers configuration and weights."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.digest == oldSelf.digest && self.source == oldSelf.source && self.rank == oldSelf.rank",
            "`versions[].digest`, `source` and `rank` must stay as they are while the version is listed; add the new"
            " bytes as a new version",
            reason="FieldValueForbidden",
        ),
    )

    version: Version
    """Semantic version; the key of the list."""
    digest: Digest
    """SHA-256 over both files of the adapter, as `tenantry adapters digest FOLDER` prints it."""
    source: Source
    """Where the fetcher pulls it from, by `oci`, `s3` or `hf`; the host must be one that the release allows."""
    secret_ref: DnsSubdomain | None = None
    """A Secret of the Adapter's namespace with the credentials for that host. Absent: read without any."""
    rank: Annotated[int, Field(ge=1, le=512)]
    """LoRA rank; must be what adapter_config.json says and at most the pool's `lora.maxRank`."""


class Channel(Model):
    """What a channel serves. Promotion is a one-line change of `version`."""

    name: Literal["stable"]
    """`stable`: what clients get when they send the tenant's model name."""
    version: Version
    """One of `versions[].version`."""


class Rollout(Model):
    """How a new version takes over."""

    progress_deadline_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    """Loading may take this long before the rollout is reported as stalled."""
    drain_seconds: Annotated[int, Field(ge=0, le=3_600)] = 60
    """Requests on the old version have this long to end."""


class SignerIdentity(Model):
    """Who signed without a key of his own: what the signing certificate must say."""

    issuer: Annotated[str, Field(min_length=9, max_length=512, pattern=ISSUER)]
    """The OIDC issuer that vouched for the signer."""
    subject: Annotated[str, Field(min_length=1, max_length=512)]
    """The signer as the certificate names it: an e-mail address or the URI of a workflow, compared whole."""


class Verification(Model):
    """Whose signature the bytes must carry, by `keyRef` or by `identities`."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.keyRef) != has(self.identities)",
            "`verification` must have exactly one of `keyRef` and `identities`; keep the one that your signers use",
        ),
    )

    policy: Literal["Required", "Warn"] = "Required"
    """`Required`: nothing unsigned is loaded. `Warn`: it is loaded, and the condition says so."""
    key_ref: DnsLabel | None = None
    """A public key that the release offers by this name."""
    identities: Annotated[list[SignerIdentity], Field(min_length=1, max_length=8)] | None = None
    """Signers, one of whom must have signed, by a certificate of the authorities that the release trusts."""


class AdapterSpec(Model):
    """What an ML team writes: versions, and the one that is served."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.channels.all(c, self.versions.exists(v, v.version == c.version))",
            "`channels[].version` must be one of `versions[].version`; add the version to `versions` first",
            field=".channels",
        ),
        Rule(
            "self.tenantRef == oldSelf.tenantRef",
            "`tenantRef` must stay as it is, since an adapter belongs to one tenant for life; make a new Adapter",
            field=".tenantRef",
            reason="FieldValueForbidden",
        ),
    )

    tenant_ref: DnsSubdomain
    """The Tenant whose adapter this is; it must list this namespace in `adapterNamespaces`."""
    versions: Annotated[
        list[AdapterVersion], Field(min_length=1, max_length=64, json_schema_extra=keyed_by("version"))
    ]
    """Every version that a channel may name."""
    channels: Annotated[list[Channel], Field(min_length=1, max_length=1, json_schema_extra=keyed_by("name"))]
    """Which version is served."""
    rollout: Rollout = Rollout()
    verification: Verification | None = None
    """Whose signature every version must carry. Absent: only digests are checked."""


class ChannelStatus(Status):
    """`activeVersion` is served now; `desiredVersion` is on its way while they differ."""

    name: Literal["stable"]
    desired_version: Annotated[str, Field(max_length=63)]
    active_version: Annotated[str, Field(max_length=63)] | None = None
    active_digest: Digest | None = None
    active_source: Annotated[str, Field(max_length=512)] | None = None
    active_secret_ref: Annotated[str, Field(max_length=253)] | None = None
    """The name of the Secret that `activeSource` is read with."""
    active_rank: Annotated[int, Field(ge=1)] | None = None
    replicas_loaded: Annotated[int, Field(ge=0)] = 0
    """Replicas that report the desired digest as verified."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Replicas that must report it before it is served."""


class KnownVersion(Status):
    """A version as it was first seen: the same version with other bytes is refused even after a removal."""

    version: Annotated[str, Field(max_length=63)]
    digest: Digest


class AdapterStatus(Status):
    """What the operator saw."""

    observed_generation: int = -1
    """The generation that this status speaks of; -1 until the operator has seen the object."""
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
    "SignerIdentity",
    "Verification",
]
