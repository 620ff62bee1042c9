"""Adapter: immutable LoRA versions by digest and the channels that are served. Owned by ML teams, namespaced."""

from __future__ import annotations

from enum import StrEnum
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


class ChannelName(StrEnum):
    STABLE = "stable"
    CANARY = "canary"


class Channel(Model):
    """What a channel serves. Promotion is a one-line change of the stable channel's `version`."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.name == 'canary' || !has(self.weight)",
            "`weight` must be absent from the channel `stable`, which answers whatever the canary does not; set it on"
            " the channel `canary`",
            field=".weight",
        ),
    )

    name: ChannelName
    """`stable`: what clients get when they send the tenant's model name. `canary`: what they get for `NAME:canary`,
    and for NAME as often as `weight` says."""
    version: Version
    """One of `versions[].version`."""
    weight: Annotated[int, Field(ge=0, le=100)] | None = None
    """Percent of conversations that the canary answers, set by hand; absent is 0. Only of `canary`."""


class Step(Model):
    """A part of the traffic, and how long it is held there."""

    weight: Annotated[int, Field(ge=1, le=100)]
    """Percent of conversations that the new version answers in this step."""
    pause_seconds: Annotated[int, Field(ge=0, le=604_800)] = 0
    """The step lasts at least so long; longer until every `analysis` has passed on data of this step."""


class Metric(StrEnum):
    """What gateways measure of each of two versions that share a model name."""

    ERRORS = "ErrorsPerThousand"
    FIRST_BYTE = "FirstTokenMillisecondsP95"
    DURATION = "DurationMillisecondsP95"


class Analysis(Model):
    """A bound on what gateways measure of the new version."""

    metric: Metric
    """`ErrorsPerThousand`: requests that the version failed to answer (5xx, cut, timed out), not those that clients
    got wrong or left. `FirstTokenMillisecondsP95`, `DurationMillisecondsP95`: the 95th percentile, from arrival to the
    first byte, and to the last."""
    threshold: Annotated[int, Field(ge=0, le=86_400_000)]
    """Above this a measurement has failed."""
    min_samples: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Requests that one measurement takes. Fewer are no data: the rollout waits, and never succeeds on them."""
    failure_limit: Annotated[int, Field(ge=0, le=100)] = 0
    """Measurements that may fail before the rollout has failed."""


class OnFailure(StrEnum):
    ROLLBACK = "Rollback"
    PAUSE = "Pause"


class Rollout(Model):
    """How a new stable version takes over."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.steps) || self.steps.map(s, s.weight).isSorted()",
            "`steps[].weight` must not fall from one step to the next",
            field=".steps",
        ),
        Rule(
            "!has(self.analysis) || size(self.analysis) == 0 || (has(self.steps) && size(self.steps) > 0)",
            "`analysis` must stand beside `steps`: without a step the new version is measured on no traffic",
            field=".analysis",
        ),
    )

    steps: Annotated[list[Step], Field(max_length=16)] = []
    """Taken in order when the stable version changes; after the last the new version answers everything. None: it
    does so as soon as every replica holds it."""
    analysis: Annotated[list[Analysis], Field(max_length=3, json_schema_extra=keyed_by("metric"))] = []
    """All must hold in every step."""
    progress_deadline_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    """Without progress for so long (beyond a step's own pause) the rollout is reported as stalled; where the new
    version has traffic already and a replica lost it, it has failed."""
    on_failure: OnFailure = OnFailure.ROLLBACK
    """`Rollback`: the last promoted version answers everything again. `Pause`: weights stay as they are. Both last
    until the stable version or this block changes."""
    rollback_window_seconds: Annotated[int, Field(ge=0, le=2_592_000)] = 86_400
    """A version that was replaced so recently takes over again without steps."""
    drain_seconds: Annotated[int, Field(ge=0, le=3_600)] = 60
    """Requests on the old version have this long to end."""
    paused: bool = False
    """The rollout stays where it is: replicas load the new version, weights do not move."""
    retry_token: Annotated[str, Field(max_length=63)] = ""
    """Any other text starts a failed rollout anew."""


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
    """What an ML team writes: versions, and the ones that are served."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.channels.exists(c, c.name == 'stable')",
            "`channels` must hold the channel `stable`, which names the version that is served",
            field=".channels",
        ),
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
    channels: Annotated[list[Channel], Field(min_length=1, max_length=2, json_schema_extra=keyed_by("name"))]
    """Which versions are served."""
    rollout: Rollout = Rollout()
    verification: Verification | None = None
    """Whose signature every version must carry. Absent: only digests are checked."""

    def channel(self, name: ChannelName) -> Channel | None:
        """The channel of that name."""
        return next((channel for channel in self.channels if channel.name is name), None)


class ChannelStatus(Status):
    """`activeVersion` is served now; `desiredVersion` is on its way while they differ."""

    name: ChannelName
    desired_version: Annotated[str, Field(max_length=63)] = ""
    active_version: Annotated[str, Field(max_length=63)] | None = None
    active_digest: Digest | None = None
    active_source: Annotated[str, Field(max_length=512)] | None = None
    active_secret_ref: Annotated[str, Field(max_length=253)] | None = None
    """The name of the Secret that `activeSource` is read with."""
    active_rank: Annotated[int, Field(ge=1)] | None = None
    weight: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of conversations that the active version answers."""
    replicas_loaded: Annotated[int, Field(ge=0)] = 0
    """Replicas that report the desired digest as verified."""
    replicas: Annotated[int, Field(ge=0)] = 0
    """Replicas that must report it before it is served."""


Moment = Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]


class ReleaseStatus(Status):
    """A version with all that is needed to serve it again, whatever the spec says by now."""

    version: Annotated[str, Field(max_length=63)]
    digest: Digest
    source: Annotated[str, Field(max_length=512)] = ""
    secret_ref: Annotated[str, Field(max_length=253)] | None = None
    rank: Annotated[int, Field(ge=1)] = 1


class PromotedStatus(ReleaseStatus):
    """The version that was promoted last: where a rollback leads."""

    generation: Annotated[int, Field(ge=0)] = 0
    time: Moment


class ReplacedStatus(ReleaseStatus):
    """A version that was served before."""

    replaced_at: Moment


class AnalysisStatus(Status):
    """The last measurement of a metric, and how many failed in this rollout."""

    metric: Metric
    value: Annotated[int, Field(ge=0)] = 0
    samples: Annotated[int, Field(ge=0)] = 0
    failures: Annotated[int, Field(ge=0)] = 0
    passed: bool = False
    """Whether the last measurement of the present step passed."""


class Phase(StrEnum):
    """Where a rollout stands. Stalled: it waits for an edit or a repair, and has no traffic."""

    VERIFY = "Verify"
    LOAD = "Load"
    SHIFT = "Shift"
    PROMOTED = "Promoted"
    ROLLED_BACK = "RolledBack"
    PAUSED = "Paused"
    STALLED = "Stalled"


class RolloutStatus(ReleaseStatus):
    """The rollout that runs, or ended last."""

    revision: Annotated[str, Field(max_length=16)]
    """Hash of what the spec asked for; the same is not tried again after a failure."""
    attempt: Annotated[int, Field(ge=0)] = 0
    """Counts the rollouts of this Adapter."""
    phase: Phase
    step: Annotated[int, Field(ge=0)] = 0
    """Index of the present one of `steps`."""
    weight: Annotated[int, Field(ge=0, le=100)] = 0
    """Percent of conversations that the new version answers."""
    start_weight: Annotated[int, Field(ge=0, le=100)] = 0
    """What it answered as a canary when the rollout began."""
    started_at: Moment
    step_started_at: Moment
    reason: Annotated[str, Field(max_length=128)] = ""
    analysis: Annotated[list[AnalysisStatus], Field(max_length=3)] = []


class FailedRevision(ReleaseStatus):
    """A rollout that failed."""

    revision: Annotated[str, Field(max_length=16)]
    attempt: Annotated[int, Field(ge=0)] = 0
    reason: Annotated[str, Field(max_length=128)]
    message: Annotated[str, Field(max_length=512)] = ""
    time: Moment


class KnownVersion(Status):
    """A version as it was first seen: the same version with other bytes is refused even after a removal."""

    version: Annotated[str, Field(max_length=63)]
    digest: Digest


class AdapterStatus(Status):
    """What the operator saw."""

    observed_generation: int = -1
    """The generation that this status speaks of; -1 until the operator has seen the object."""
    conditions: Conditions = []
    channels: Annotated[list[ChannelStatus], Field(max_length=2)] = []
    """`stable` first."""
    rollout: RolloutStatus | None = None
    last_promoted: PromotedStatus | None = None
    history: Annotated[list[ReplacedStatus], Field(max_length=10)] = []
    """What was served before, the latest first."""
    failed_revisions: Annotated[list[FailedRevision], Field(max_length=10)] = []
    """Rollouts that failed, the latest last."""
    known: Annotated[list[KnownVersion], Field(max_length=128)] = []


__all__ = [
    "AdapterSpec",
    "AdapterStatus",
    "AdapterVersion",
    "Analysis",
    "Channel",
    "ChannelName",
    "ChannelStatus",
    "DnsLabel",
    "KnownVersion",
    "Metric",
    "OnFailure",
    "Phase",
    "Rollout",
    "RolloutStatus",
    "SignerIdentity",
    "Step",
    "Verification",
]
