"""Tenant: a customer, its tier, models, limits, keys and isolation. Owned by account teams, cluster-scoped."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from .common import (
    SHA256_HEX,
    Conditions,
    Digest,
    DnsLabel,
    DnsSubdomain,
    LabelKey,
    LabelValue,
    Model,
    Status,
    Tier,
)
from .pool import LaneName


class AdapterRef(Model):
    """An Adapter of the tenant. Its namespace must be listed in `adapterNamespaces`."""

    namespace: DnsLabel
    name: DnsLabel


class TenantModel(Model):
    """A model as the tenant's clients know it. `name` is the alias that they send."""

    name: DnsLabel
    base_model: DnsLabel
    pool_ref: DnsSubdomain | None = None
    adapter_ref: AdapterRef | None = None
    fallback: DnsLabel | None = None


class Prompt(Model):
    """Stands ahead of everything a client sends. `refusal` and `vocabulary` are prompt text, not output filters."""

    system: Annotated[str, Field(max_length=16_384)] = ""
    refusal: Annotated[str, Field(max_length=4_096)] = ""
    vocabulary: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=256)
    ] = []


class Limits(Model):
    """Absent = the tier's default. Present = must lie inside the tier's ceiling (operator configuration)."""

    requests_per_minute: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    max_in_flight: Annotated[int, Field(ge=1, le=100_000)] | None = None
    max_queued: Annotated[int, Field(ge=0, le=100_000)] | None = None
    max_input_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1_048_576)] | None = None
    monthly_tokens: Annotated[int, Field(ge=1, le=1_000_000_000_000)] | None = None


class LanePreference(StrEnum):
    AUTO = "Auto"
    FAST = "Fast"
    BULK = "Bulk"


class ApiKey(Model):
    """A credential as its hash. `sha256` is the SHA-256 of the whole key string, lower-case hex."""

    name: DnsLabel
    sha256: Annotated[str, Field(min_length=64, max_length=64, pattern=SHA256_HEX)]
    expires_at: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})] | None = None


class Auth(Model):
    api_keys: Annotated[list[ApiKey], Field(max_length=32)] = []


class Dedicated(Model):
    """Enterprise and Regulated: a pool of the tenant's own, from a template that an admin offers."""

    pool_template_ref: DnsLabel
    replicas: Annotated[int, Field(ge=1, le=100)] = 1


class Isolation(Model):
    """Narrowing only: nodes are chosen among those that an admin labelled claimable; egress is a list of CIDRs."""

    region: LabelValue | None = None
    node_selector: Annotated[dict[LabelKey, LabelValue], Field(max_length=16)] = {}
    nodes: Annotated[int, Field(ge=1, le=100)] = 1
    egress: Annotated[list[Annotated[str, Field(min_length=9, max_length=49)]], Field(max_length=32)] = []


class TenantSpec(Model):
    tier: Tier
    models: Annotated[list[TenantModel], Field(min_length=1, max_length=32)]
    prompt: Prompt = Prompt()
    limits: Limits = Limits()
    weight: Annotated[int, Field(ge=1, le=100)] | None = None
    lane: LanePreference = LanePreference.AUTO
    auth: Auth = Auth()
    adapter_namespaces: Annotated[list[DnsLabel], Field(max_length=16)] = []
    dedicated: Dedicated | None = None
    isolation: Isolation = Isolation()
    suspend: bool = False


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
    """A pool that serves the tenant. `uid` is the audience of signed identities."""

    name: DnsSubdomain
    uid: Annotated[str, Field(max_length=64)]
    namespace: DnsLabel
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
    """All that the gateway needs to serve the tenant, beside `spec.auth`, `spec.prompt` and `spec.suspend`."""

    weight: Annotated[int, Field(ge=1)]
    lane: LanePreference
    limits: EffectiveLimits
    pools: Annotated[list[RoutePool], Field(max_length=32)] = []
    models: Annotated[list[RouteModel], Field(max_length=32)] = []


class PlacementStatus(Status):
    pool: DnsSubdomain
    namespace: DnsLabel
    replicas: Annotated[list[PodName], Field(max_length=128)] = []
    reason: Annotated[str, Field(max_length=512)] = ""


class Endpoint(Status):
    url: Annotated[str, Field(max_length=512)]
    models: Annotated[list[DnsLabel], Field(max_length=32)] = []


class GuaranteeState(StrEnum):
    ENFORCED = "Enforced"
    CONFIGURED = "Configured"
    NOT_PROVIDED = "NotProvided"


class Guarantee(Status):
    guarantee: Annotated[str, Field(max_length=64)]
    state: GuaranteeState
    reason: Annotated[str, Field(max_length=256)] = ""
    since: Annotated[str, Field(max_length=32, json_schema_extra={"format": "date-time"})]


class TenantStatus(Status):
    observed_generation: int = -1
    conditions: Conditions = []
    tier: Tier | None = None
    placement: Annotated[list[PlacementStatus], Field(max_length=32)] = []
    endpoint: Endpoint | None = None
    route: Route | None = None
    isolation: Annotated[list[Guarantee], Field(max_length=32)] = []


__all__ = [
    "AdapterRef",
    "ApiKey",
    "Auth",
    "Dedicated",
    "Digest",
    "EffectiveLimits",
    "Endpoint",
    "Guarantee",
    "GuaranteeState",
    "Isolation",
    "LanePreference",
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
