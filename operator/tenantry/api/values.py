"""The values of the chart `tenantry`, typed: values.schema.json comes from here, so that a typo is refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .common import DnsLabel, DnsSubdomain, LabelKey, LabelValue, Model, Tier
from .config import AttestationPolicy, Quota, TierPolicy, VerifierService
from .pool import AdapterPoolSpec, Toleration

ORIGIN = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?$"
SIZE = r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$"
CIDR = r"^[0-9a-f:.]+/[0-9]{1,3}$"
# By tag or digest; that the tag is not `latest` is a second schema, since RE2 has no look-ahead.
IMAGE = r"^[a-z0-9][A-Za-z0-9._/:@-]*(:[A-Za-z0-9_][A-Za-z0-9._-]*|@sha256:[0-9a-f]{64})$"

Image = Annotated[
    str, Field(max_length=512, pattern=IMAGE, json_schema_extra={"not": {"pattern": ":latest$"}})
]
Origin = Annotated[str, Field(max_length=253, pattern=ORIGIN)]
Size = Annotated[str, Field(pattern=SIZE)]
Cidr = Annotated[str, Field(max_length=49, pattern=CIDR)]
Name = Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$")]
Amounts = dict[str, Annotated[str, Field(min_length=1, max_length=32)] | Annotated[int, Field(ge=0)]]


class Images(Model):
    """Which images run."""

    operator: Image
    gateway: Image
    engine: Image
    pull_policy: Literal["Always", "IfNotPresent", "Never"]
    pull_secrets: list[DnsSubdomain]


class PodResources(Model):
    """Requests and limits of a container."""

    requests: Amounts = {}
    limits: Amounts = {}


class Workload(Model):
    """What every Deployment has."""

    resources: PodResources
    node_selector: dict[LabelKey, LabelValue]
    tolerations: list[Toleration]


class Operator(Workload):
    """The operator; a second replica waits for the Lease."""

    replicas: Annotated[int, Field(ge=1, le=2)]
    traces_endpoint: Annotated[str, Field(max_length=512, pattern=r"^(https?://.+)?$")]


class TrustValues(Model):
    """Whom signatures may be of."""

    keys: dict[DnsLabel, Annotated[str, Field(max_length=16_384, pattern=r"^-----BEGIN PUBLIC KEY-----")]]
    trusted_root: Annotated[str, Field(max_length=262_144)]


class Fetcher(Workload):
    """The fetcher and whom it may ask."""

    replicas: Annotated[int, Field(ge=0, le=8)]
    allow_origins: list[Origin]
    allow_private: bool
    plain_http: list[Origin]
    read_secrets: bool
    trust: TrustValues
    cache_size: Size


class LedgerVolume(Model):
    """Where the usage ledger lies."""

    persistent: bool
    size: Size
    storage_class_name: Name
    existing_claim: Name


class GatewayService(Model):
    """How clients reach the gateway."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    # Helm takes a null value away before it looks at the schema.
    node_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    annotations: dict[str, str]


class Gateway(Workload):
    """The gateway. One replica: limits and ledger live in its process."""

    url: Annotated[str, Field(max_length=512, pattern=r"^(https?://[^\s]+)?$")]
    replicas: Annotated[int, Field(ge=1, le=1)]
    ledger: LedgerVolume
    trusted_proxies: list[Cidr]
    extra_args: list[str]
    service: GatewayService


class Key(Model):
    """A key that was made elsewhere: both fields, or none."""

    existing_secret: Name
    certificate: Annotated[str, Field(max_length=8192)]


class Issuer(Model):
    """A cert-manager Issuer or ClusterIssuer; none where `name` is empty."""

    name: Name
    kind: Literal["Issuer", "ClusterIssuer"]
    group: Annotated[str, Field(min_length=1, max_length=253)]


class CertManager(Model):
    """An authority that cert-manager makes and renews."""

    issuer_ref: Issuer
    duration: Annotated[str, Field(pattern=r"^[1-9][0-9]*h$")]


class Identity(Model):
    """Keys by which our processes know each other."""

    operator: Key
    gateway: Key
    fetcher: Key
    existing_authority_secret: Name
    cert_manager: CertManager
    existing_salt_secret: Name


class NetworkPolicies(Model):
    """Who reaches what in the release's namespace."""

    enabled: bool
    metrics_namespaces: list[DnsLabel]


class Policies(Model):
    """Admission policies."""

    enabled: bool
    privileged_namespaces: Annotated[list[DnsLabel], Field(min_length=1)]
    schedulers: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class PodMonitors(Model):
    """What Prometheus Operator scrapes."""

    enabled: bool
    labels: dict[LabelKey, LabelValue]


class Rules(Model):
    """Alerts and what they are made of. `runbooks`: where docs/runbooks.md can be read."""

    enabled: bool
    labels: dict[LabelKey, LabelValue]
    runbooks: Annotated[str, Field(min_length=1, max_length=512)]


class Dashboards(Model):
    """ConfigMaps that Grafana's sidecar finds by their labels."""

    enabled: bool
    labels: dict[LabelKey, LabelValue]


class Monitoring(Model):
    """Objects for Prometheus Operator and Grafana; the kinds of monitoring.coreos.com must be there."""

    pod_monitors: PodMonitors
    rules: Rules
    dashboards: Dashboards


class Evidence(Model):
    """How guarantees are looked at."""

    period_seconds: Annotated[int, Field(ge=5, le=86_400)]
    max_age_seconds: Annotated[int, Field(ge=10, le=604_800)]
    probes: bool
    outside: Annotated[str, Field(max_length=300, pattern=r"^([0-9a-fA-F.:]+:[0-9]{1,5})?$")]
    access_key_secret: Name


class Values(Model):
    """All values; defaults are those of the chart's values.yaml."""

    images: Images
    operator: Operator
    fetcher: Fetcher
    gateway: Gateway
    identity: Identity
    network_policies: NetworkPolicies
    policies: Policies
    monitoring: Monitoring
    tiers: dict[Tier, TierPolicy]
    pool_templates: dict[DnsLabel, AdapterPoolSpec]
    verifiers: dict[DnsLabel, VerifierService]
    attestation_policies: dict[DnsLabel, AttestationPolicy]
    node_pool_templates: dict[DnsLabel, dict[str, Any]]
    quota: Quota
    evidence: Evidence
    certificate_seconds: Annotated[int, Field(ge=60, le=31_536_000)]
    resync_seconds: Annotated[int, Field(ge=5)]
    workers: Annotated[int, Field(ge=1, le=64)]
    protected_cidrs: list[Cidr]
    protected_namespaces: list[DnsLabel]
    region_label: LabelKey


def values_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the chart's values. `global` is Helm's own."""
    schema = _plain(Values.model_json_schema(by_alias=True))
    schema["properties"]["global"] = {"type": "object"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _plain(node: Any) -> Any:
    """Without titles, which repeat the names, and without what only the API server understands."""
    if isinstance(node, list):
        return [_plain(child) for child in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("properties"), dict):
        node = {**node, "properties": {name: _plain(child) for name, child in node["properties"].items()}}
    return {
        key: child if key in ("properties", "default") else _plain(child)
        for key, child in node.items()
        if not key.startswith("x-") and not (key == "title" and isinstance(child, str))
    }
