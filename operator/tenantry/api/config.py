"""The operator's configuration: what an admin offers to tenants. A YAML file, mounted by the chart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from .common import DnsLabel, DnsSubdomain, LabelKey, LabelValue, Model, Tier
from .pool import AdapterPoolSpec, Toleration
from .tenant import EffectiveLimits


class LimitSet(Model):
    """One value for every limit; as a ceiling, `monthlyTokens` absent means unbounded."""

    requests_per_minute: Annotated[int, Field(ge=1)]
    tokens_per_minute: Annotated[int, Field(ge=1)]
    max_in_flight: Annotated[int, Field(ge=1)]
    max_queued: Annotated[int, Field(ge=0)]
    max_input_tokens: Annotated[int, Field(ge=1)]
    max_output_tokens: Annotated[int, Field(ge=1)]
    monthly_tokens: Annotated[int, Field(ge=1)] | None = None

    def effective(self) -> EffectiveLimits:
        return EffectiveLimits.model_validate(self.model_dump())


ClaimPointer = Annotated[str, Field(max_length=512, pattern=r"^(/[^/]+)+$")]
"""A JSON pointer (RFC 6901) into a token's claims, e.g. `/submods/cpu0/ear.status`."""


Allowed = Annotated[list[Annotated[str, Field(max_length=512)]], Field(min_length=1, max_length=64)]
LOCAL_URL = r"^(http://(127\.0\.0\.1|localhost|\[::1\])(:\d+)?)?$"


class VerifierService(Model):
    """A service that appraises evidence and answers with a signed token (a JWT)."""

    url: Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s?#]+$")]
    """Its attestation endpoint, e.g. `https://trustee.example/attestation`. Only the operator calls it."""
    keys: Annotated[list[Annotated[str, Field(max_length=8192)]], Field(min_length=1, max_length=8)]
    """Public keys or certificates (PEM) that may sign. A key fixes its algorithm: EC and Ed25519 keys, and RSA of at
    least 2,048 bits."""
    issuer: Annotated[str, Field(min_length=1, max_length=512)]
    """What the token's `iss` must be."""
    ca: Annotated[str, Field(max_length=65_536)] = ""
    """Certificates (PEM) that may vouch for the endpoint. Empty: the system's."""
    timeout_seconds: Annotated[int, Field(ge=1, le=30)] = 10
    """How long one appraisal may take."""
    tee: Annotated[str, Field(min_length=1, max_length=64)] = "sample"
    """What kind of evidence is sent: `snp`, `tdx`, ..., as the verifier calls it."""
    runtime_data: ClaimPointer = "/customized_claims/runtime_data"
    """Where the token repeats the nonce, boot id and key that the evidence was bound to."""


class AttestationPolicy(Model):
    """What a token must say."""

    measurements: Annotated[dict[ClaimPointer, Allowed], Field(min_length=1, max_length=64)]
    """Pointer to a claim -> values of which it must have one. What is no string is written as in JSON: `true`, `2`."""
    agent_url: Annotated[str, Field(max_length=256, pattern=LOCAL_URL)] = ""
    """The attestation agent inside the pod's own sandbox that makes evidence. Empty: none is sent."""


class TierPolicy(Model):
    """Defaults and ceilings of a tier, and what dedicated tenants may ask for, each by name.

    `pinnedAdapters`: how many adapters of one tenant may stay in memory while nobody uses them.
    """

    defaults: LimitSet
    ceilings: LimitSet
    weight: Annotated[int, Field(ge=1, le=100)] = 1
    max_weight: Annotated[int, Field(ge=1, le=100)] = 1
    pinned_adapters: Annotated[int, Field(ge=0, le=1000)] = 0
    pool_templates: list[DnsLabel] = []
    runtime_classes: list[DnsSubdomain] = []
    verifiers: list[DnsLabel] = []
    attestation_policies: list[DnsLabel] = []
    node_pool_templates: list[DnsLabel] = []


class Quota(Model):
    """ResourceQuota of a dedicated tenant's namespace, as Kubernetes quantities."""

    hard: dict[str, str] = {"pods": "20", "requests.cpu": "64", "requests.memory": "512Gi"}


class EvidencePolicy(Model):
    """How guarantees are looked at.

    `periodSeconds`: from one look to the next. `maxAgeSeconds`: how long a look counts. `image`: of the probes' pods,
    the operator's own; absent: nothing is probed. `outside`: HOST:PORT beyond the cluster that an ordinary pod reaches
    and a tenant's must not; absent: none is tried. `accessKeyFile`: a key of a Tenant made for this, with which others'
    models are asked for; absent: nobody asks.
    """

    period_seconds: Annotated[int, Field(ge=5, le=86_400)] = 300
    max_age_seconds: Annotated[int, Field(ge=10, le=604_800)] = 900
    image: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    outside: Annotated[str, Field(max_length=300, pattern=r"^[0-9a-fA-F.:]+:[0-9]{1,5}$")] | None = None

    access_key_file: Annotated[str, Field(min_length=1, max_length=512)] | None = None

    @model_validator(mode="after")
    def _outlive(self) -> EvidencePolicy:
        if self.max_age_seconds < 2 * self.period_seconds:
            raise ValueError("`maxAgeSeconds` must be at least twice `periodSeconds`: one look may fail")
        return self


class GatewayTemplate(Model):
    """What gateways of one tenant are made of: the same image, key and salt as the shared one."""

    image: str
    pull_policy: str = "IfNotPresent"
    key_secret: DnsSubdomain
    salt_secret: DnsSubdomain
    service_account: DnsSubdomain = "tenantry-gateway"
    requests: dict[str, str] = {"cpu": "100m", "memory": "192Mi"}
    limits: dict[str, str] = {"memory": "512Mi"}
    node_selector: dict[LabelKey, LabelValue] = {}
    tolerations: list[Toleration] = []


class OperatorConfig(Model):
    """Everything that a Tenant may only refer to by name.

    `nodePoolTemplates`: the `spec` of a Karpenter NodePool, by name.
    `protectedCidrs`: networks that no `egress` list may touch (Services, and Pods where nodes do not name theirs).
    `certificateSeconds`: how long a certificate of ours is valid; a new one is there at half of that.
    `gateImage`: of the container that guards engines of tenants with mutual TLS or attestation (the operator's own).
    `serviceAccount` and `tenantRole`: the operator's account and the ClusterRole that it binds itself to in the
    namespaces of dedicated tenants. `privilegedNamespaces`: whose pods may run on tenants' nodes. `admission`: the
    ValidatingAdmissionPolicies (each with a binding of its name) that keep each guarantee as it is.
    """

    release_namespace: DnsLabel = "tenantry-system"
    engine_image: str
    image_pull_policy: str = "IfNotPresent"
    gateway_url: str
    fetcher_url: str
    tiers: dict[Tier, TierPolicy]
    pool_templates: dict[DnsLabel, AdapterPoolSpec] = {}
    verifiers: dict[DnsLabel, VerifierService] = {}
    attestation_policies: dict[DnsLabel, AttestationPolicy] = {}
    node_pool_templates: dict[DnsLabel, dict[str, Any]] = {}
    gate_image: str = ""
    gateway: GatewayTemplate | None = None
    certificate_seconds: Annotated[int, Field(ge=60, le=31_536_000)] = 86_400
    quota: Quota = Quota()
    resync_seconds: Annotated[int, Field(ge=5)] = 600
    workers: Annotated[int, Field(ge=1, le=64)] = 8
    protected_namespaces: list[DnsLabel] = ["kube-system"]
    protected_cidrs: list[str] = []
    service_account: DnsLabel = "tenantry-operator"
    tenant_role: DnsLabel = "tenantry-tenant-namespace"
    region_label: LabelKey = "topology.kubernetes.io/region"
    privileged_namespaces: list[DnsLabel] = ["kube-system"]
    admission: dict[str, list[DnsSubdomain]] = {}
    evidence: EvidencePolicy = EvidencePolicy()

    @classmethod
    def load(cls, path: Path) -> OperatorConfig:
        """Read the YAML file. Raises pydantic.ValidationError, which names each field."""
        return cls.model_validate(yaml.safe_load(path.read_text()))
