"""Tenant: a customer, its tier, models, limits, keys and isolation. Owned by account teams, cluster-scoped."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from .common import (
    NOT_STORED,
    SET,
    SHA256_HEX,
    Conditions,
    Digest,
    DnsLabel,
    DnsSubdomain,
    LabelKey,
    LabelValue,
    Model,
    Rule,
    Status,
    Tier,
    keyed_by,
)
from .pool import LaneName

NAME_RULES = (
    Rule(
        "size(self.metadata.name) <= 40 && !self.metadata.name.contains('.')",
        "`metadata.name` must be a DNS label of at most 40 characters, since keys, namespaces and pods carry it;"
        " choose a shorter name without dots",
    ),
)
DEDICATED = "self.tier in ['Enterprise', 'Regulated']"


class AdapterRef(Model):
    """An Adapter of the tenant."""

    namespace: DnsLabel
    """One of `adapterNamespaces`."""
    name: DnsLabel
    """Name of the Adapter."""


class TenantModel(Model):
    """A model as the tenant's clients know it."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!self.name.contains('--')",
            "`name` must not contain `--`, which is kept for names of adapter versions; use a single `-`",
            field=".name",
            holds=lambda model: "--" not in model.name,
        ),
        Rule(
            "!has(self.pinned) || !self.pinned || has(self.adapterRef)",
            "`pinned` must stand beside `adapterRef`: a base model is never out of memory",
            field=".pinned",
            holds=lambda model: not model.pinned or model.adapter_ref is not None,
        ),
    )

    name: DnsLabel
    """The alias that clients send as `model`."""
    base_model: DnsLabel
    """`baseModel.name` of the pools that may serve it."""
    pool_ref: DnsSubdomain | None = None
    """Only this pool may serve it. Absent: the placer chooses among all that fit."""
    adapter_ref: AdapterRef | None = None
    """The adapter that answers. Absent: the base model answers."""
    pinned: bool = False
    """The adapter's pages stay in memory while nobody uses it, so that it is never waited for. The tier says how many a
    tenant may have."""
    fallback: DnsLabel | None = None
    """Another of the tenant's models, tried when this one has no capacity."""


class Prompt(Model):
    """Stands ahead of everything a client sends. `refusal` and `vocabulary` are prompt text, not output filters."""

    system: Annotated[str, Field(max_length=16_384)] = ""
    """The system prompt."""
    refusal: Annotated[str, Field(max_length=4_096)] = ""
    """What the model is told to say when it must refuse."""
    vocabulary: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)
    ] = []
    """Words that the model is told to prefer."""


class Limits(Model):
    """Absent = the tier's default. Present = must lie inside the tier's ceiling (operator configuration)."""

    requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Requests that may start in a minute."""
    tokens_per_minute: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Input and output tokens in a minute."""
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Sequences that run at once."""
    max_queued: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Requests that wait; 0 refuses at once instead."""
    max_input_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Longest input of one request."""
    max_output_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    """Longest output of one request."""
    monthly_tokens: Annotated[int, Field(ge=1, le=1_000_000_000_000)] | None = None
    """Input and output tokens in a calendar month (UTC)."""


class LanePreference(StrEnum):
    AUTO = "Auto"
    FAST = "Fast"
    BULK = "Bulk"


class ApiKey(Model):
    """A credential as its hash. `sha256` is the SHA-256 of the whole key string, lower-case hex."""

    name: DnsLabel
    """What logs and bills call the key."""
    sha256: Annotated[str, Field(max_length=64, pattern=SHA256_HEX)]
    """SHA-256 of the whole key, as `tenantry keys mint` prints it. Never the key itself."""
    expires_at: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})] | None = None
    """The key is refused from then on. Absent: never."""


class Auth(Model):
    """Who may speak for the tenant."""

    api_keys: Annotated[list[ApiKey], Field(max_length=32, json_schema_extra=keyed_by("name"))] = []
    """Several at once, so that keys can be rotated without a gap."""


class Dedicated(Model):
    """Enterprise and Regulated: a pool of the tenant's own, from a template that an admin offers."""

    pool_template_ref: DnsLabel
    """One of the templates that the operator's configuration offers to the tier."""
    replicas: Annotated[int, Field(ge=1, le=100)] = 1
    """Engine replicas of the tenant's pool."""


class GatewayPlace(StrEnum):
    SHARED = "Shared"
    DEDICATED = "Dedicated"


class Attestation(Model):
    """Nodes must prove what they run before an engine starts there, and again before that proof is too old."""

    verifier_ref: DnsLabel
    """One of the verifiers that the operator's configuration offers to the tier."""
    policy_ref: DnsLabel
    """One of the attestation policies that it offers: what must have been measured."""
    max_age_seconds: Annotated[int, Field(ge=10, le=86_400)] = 3600
    """An engine whose last proof is older ends. Shorter where the verifier's token expires earlier."""


class Isolation(Model):
    """Enterprise and Regulated. Narrowing only: nodes are chosen among those that an admin labelled claimable."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.egress) || self.egress.all(e, isCIDR(e) && cidr(e).masked() == cidr(e))",
            "`egress` must be a list of CIDRs such as `203.0.113.0/24` without bits beyond the prefix; add the prefix"
            " length and clear those bits",
            field=".egress",
            holds=lambda isolation: all("/" in cidr for cidr in isolation.egress),
        ),
        Rule(
            "!has(self.egress) || self.egress.all(e, !isCIDR(e) || [cidr('169.254.0.0/16'), cidr('127.0.0.0/8'),"
            " cidr('fe80::/10'), cidr('::1/128')].all(r, r.ip().family() != cidr(e).ip().family() ||"
            " (!r.containsCIDR(cidr(e)) && !cidr(e).containsCIDR(r))))",
            "`egress` must not touch link-local or loopback ranges (169.254.0.0/16, 127.0.0.0/8, fe80::/10, ::1),"
            " where clouds keep node credentials; list the ranges that the tenant needs",
            field=".egress",
            reason="FieldValueForbidden",
        ),
    )

    region: LabelValue | None = None
    """Only nodes of this region."""
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=16)] = {}
    """Only nodes with these labels."""
    nodes: Annotated[int, Field(ge=1, le=100)] = 1
    """How many nodes the tenant holds."""
    egress: Annotated[
        list[Annotated[str, Field(min_length=4, max_length=49)]], Field(max_length=32, json_schema_extra=SET)
    ] = []
    """CIDRs that the tenant's pods may reach. Empty: nothing at all."""
    node_pool_template_ref: DnsLabel | None = None
    """Nodes are made by Karpenter, from a template that the operator's configuration offers to the tier, as the pods
    need them. Absent: `nodes` claimable ones are taken."""
    runtime_class_name: DnsSubdomain | None = None
    """RuntimeClass of the engine pods, among those that the operator's configuration offers to the tier."""
    attestation: Attestation | None = None
    """Required for a Regulated tenant to be served."""
    mutual_tls: bool = False
    """Every hop to the tenant's engines by mutual TLS. Always so in tier Regulated."""
    gateway: GatewayPlace | None = None
    """`Dedicated`: a gateway that serves this tenant alone. Absent: `Dedicated` in tier Regulated, else `Shared`."""


class TenantSpec(Model):
    """What an account team writes: the tier, and what the tenant gets in it."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.models.all(m, !has(m.adapterRef) ||"
            " (has(self.adapterNamespaces) && m.adapterRef.namespace in self.adapterNamespaces))",
            "`models[].adapterRef.namespace` must be listed in `adapterNamespaces`; add it there",
            field=".models",
        ),
        Rule(
            "!(self.tier in ['Free', 'Smb']) || self.models.all(m, !has(m.adapterRef))",
            "`models[].adapterRef` must be absent in tiers Free and Smb, which serve base models only; drop it or set"
            " `tier` to MidMarket or above",
            field=".models",
            reason="FieldValueForbidden",
        ),
        Rule(
            "self.models.all(m, !has(m.fallback) ||"
            " (m.fallback != m.name && self.models.exists(o, o.name == m.fallback)))",
            "`models[].fallback` must be the `name` of another model of this tenant; list that model or drop it",
            field=".models",
        ),
        Rule(
            f"!({DEDICATED}) || has(self.dedicated)",
            "`dedicated` must be set in tiers Enterprise and Regulated; name a pool template in"
            " `dedicated.poolTemplateRef`",
            field=".dedicated",
            reason="FieldValueRequired",
        ),
        Rule(
            f"{DEDICATED} || !has(self.dedicated)",
            "`dedicated` must be absent in tiers Free, Smb and MidMarket, which run on shared pools; drop it or set"
            " `tier` to Enterprise or Regulated",
            field=".dedicated",
            reason="FieldValueForbidden",
        ),
        Rule(
            f"{DEDICATED} || !has(self.isolation) || (!has(self.isolation.region)"
            " && (!has(self.isolation.nodeSelector) || size(self.isolation.nodeSelector) == 0)"
            " && (!has(self.isolation.nodes) || self.isolation.nodes == 1)"
            " && (!has(self.isolation.egress) || size(self.isolation.egress) == 0)"
            " && !has(self.isolation.runtimeClassName) && !has(self.isolation.attestation)"
            " && !has(self.isolation.gateway) && !has(self.isolation.nodePoolTemplateRef)"
            " && (!has(self.isolation.mutualTls) || !self.isolation.mutualTls))",
            "`isolation` must be absent in tiers Free, Smb and MidMarket, which have no nodes of their own; drop it or"
            " set `tier` to Enterprise or Regulated",
            field=".isolation",
            reason="FieldValueForbidden",
            holds=lambda spec: spec.tier.dedicated or spec.isolation.nodes == 1,
        ),
    )

    tier: Tier
    """The boundary that the tenant gets."""
    models: Annotated[
        list[TenantModel], Field(min_length=1, max_length=32, json_schema_extra=keyed_by("name"))
    ]
    """Models that the tenant's clients may name."""
    prompt: Prompt = Prompt()
    limits: Limits = Limits()
    weight: Annotated[int, Field(ge=1, le=100)] | None = None
    """Fair share against other tenants of the pool. Absent: the tier's."""
    lane: LanePreference = LanePreference.AUTO
    """Which lane serves; `Auto` decides by the size of each request."""
    auth: Auth = Auth()
    adapter_namespaces: Annotated[list[DnsLabel], Field(max_length=16, json_schema_extra=SET)] = []
    """Namespaces whose Adapters may be bound to the tenant."""
    dedicated: Dedicated | None = None
    """Required in tiers Enterprise and Regulated, refused in others."""
    isolation: Annotated[Isolation, Field(json_schema_extra=NOT_STORED)] = Isolation()
    suspend: bool = False
    """The gateway refuses all of the tenant's requests; nothing is taken down."""


class EffectiveLimits(Status):
    """What the gateway enforces: every field present."""

    requests_per_minute: Annotated[int, Field(ge=1)]
    tokens_per_minute: Annotated[int, Field(ge=1)]
    max_in_flight: Annotated[int, Field(ge=1)]
    max_queued: Annotated[int, Field(ge=0)]
    max_input_tokens: Annotated[int, Field(ge=1)]
    max_output_tokens: Annotated[int, Field(ge=1)]
    monthly_tokens: Annotated[int, Field(ge=1)] | None = None


PodName = Annotated[str, Field(max_length=253)]


class RouteLane(Status):
    """Replicas of one lane that serve the tenant. Addresses come from the EndpointSlices of `service`."""

    name: LaneName
    service: Annotated[str, Field(max_length=63)]
    slots: Annotated[int, Field(ge=1)] = 16
    max_input_tokens: Annotated[int, Field(ge=1)] | None = None
    replicas: Annotated[list[PodName], Field(max_length=64)] = []


class RoutePool(Status):
    """A pool that serves the tenant. `uid` is the audience of signed identities; `tls`: reached by mutual TLS."""

    name: DnsSubdomain
    uid: Annotated[str, Field(max_length=64)]
    namespace: DnsLabel
    tls: bool = False
    lanes: Annotated[list[RouteLane], Field(max_length=2)] = []


class RouteTarget(Status):
    """One served name behind an alias. `digest` is empty for the base model. `weight` in percent."""

    served_name: Annotated[str, Field(max_length=253)]
    digest: Annotated[str, Field(max_length=71)] = ""
    weight: Annotated[int, Field(ge=0, le=100)] = 100


class RouteModel(Status):
    """An alias of the tenant and what answers to it; a model that nothing serves yet is not listed."""

    name: DnsLabel
    pool: DnsSubdomain
    targets: Annotated[list[RouteTarget], Field(min_length=1, max_length=2)]
    fallback: DnsLabel | None = None


class Route(Status):
    """All that the gateway needs to serve the tenant, beside `spec.auth`, `spec.prompt` and `spec.suspend`.

    `gateway`: which one serves it; the others do not know the tenant.
    """

    gateway: GatewayPlace = GatewayPlace.SHARED
    weight: Annotated[int, Field(ge=1)]
    lane: LanePreference
    limits: EffectiveLimits
    pools: Annotated[list[RoutePool], Field(max_length=32)] = []
    models: Annotated[list[RouteModel], Field(max_length=32)] = []


class PlacementStatus(Status):
    """Where one of the tenant's models runs, and why there."""

    pool: DnsSubdomain
    namespace: DnsLabel
    replicas: Annotated[list[PodName], Field(max_length=128)] = []
    reason: Annotated[str, Field(max_length=512)] = ""


class Endpoint(Status):
    """What clients of the tenant are told."""

    url: Annotated[str, Field(max_length=512)]
    models: Annotated[list[DnsLabel], Field(max_length=32)] = []


class GuaranteeState(StrEnum):
    ENFORCED = "Enforced"
    CONFIGURED = "Configured"
    NOT_PROVIDED = "NotProvided"


class Guarantee(Status):
    """`Enforced` only after something looked at the running system."""

    guarantee: Annotated[str, Field(max_length=64)]
    state: GuaranteeState
    reason: Annotated[str, Field(max_length=256)] = ""
    since: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]


class LeftPlace(Status):
    """A pool that the tenant has left by a change of its tier, until nothing of it is there."""

    pool: DnsSubdomain
    uid: Annotated[str, Field(max_length=64)] = ""
    namespace: DnsLabel
    replicas: Annotated[list[PodName], Field(max_length=128)] = []
    phase: Literal["Switching", "Draining", "Emptying"]
    since: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]


class TenantStatus(Status):
    """What the operator saw, and the gateway's routing table."""

    observed_generation: int = -1
    """The generation that this status speaks of; -1 until the operator has seen the object."""
    conditions: Conditions = []
    tier: Tier | None = None
    """The tier in force; differs from `spec.tier` while the tenant moves."""
    placement: Annotated[list[PlacementStatus], Field(max_length=32)] = []
    endpoint: Endpoint | None = None
    route: Route | None = None
    isolation: Annotated[list[Guarantee], Field(max_length=32)] = []
    leaving: Annotated[list[LeftPlace], Field(max_length=32)] = []
    """Places of an earlier tier that are not empty yet."""


__all__ = [
    "AdapterRef",
    "ApiKey",
    "Attestation",
    "Auth",
    "Dedicated",
    "Digest",
    "EffectiveLimits",
    "Endpoint",
    "GatewayPlace",
    "Guarantee",
    "GuaranteeState",
    "Isolation",
    "LanePreference",
    "LeftPlace",
    "Limits",
    "PlacementStatus",
    "Prompt",
    "Route",
    "RouteLane",
    "RouteModel",
    "RoutePool",
    "RouteTarget",
    "TenantModel",
    "TenantSpec",
    "TenantStatus",
]
