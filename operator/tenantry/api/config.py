"""The operator's configuration: what an admin offers to tenants. A YAML file, mounted by the chart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from .common import DnsLabel, LabelKey, Model, Tier
from .pool import AdapterPoolSpec
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


class TierPolicy(Model):
    """Defaults and ceilings of a tier. `poolTemplates` lists what dedicated tenants may ask for."""

    defaults: LimitSet
    ceilings: LimitSet
    weight: Annotated[int, Field(ge=1, le=100)] = 1
    max_weight: Annotated[int, Field(ge=1, le=100)] = 1
    pool_templates: list[DnsLabel] = []


class Quota(Model):
    """ResourceQuota of a dedicated tenant's namespace, as Kubernetes quantities."""

    hard: dict[str, str] = {"pods": "20", "requests.cpu": "64", "requests.memory": "512Gi"}


class OperatorConfig(Model):
    """Everything that a Tenant may only refer to by name.

    `protectedCidrs`: networks that no `egress` list may touch (Services, and Pods where nodes do not name theirs).
    `serviceAccount` and `tenantRole`: the operator's account and the ClusterRole that it binds itself to in the
    namespaces of dedicated tenants.
    """

    release_namespace: DnsLabel = "tenantry-system"
    engine_image: str
    image_pull_policy: str = "IfNotPresent"
    gateway_url: str
    fetcher_url: str
    tiers: dict[Tier, TierPolicy]
    pool_templates: dict[DnsLabel, AdapterPoolSpec] = {}
    quota: Quota = Quota()
    resync_seconds: Annotated[int, Field(ge=5)] = 600
    workers: Annotated[int, Field(ge=1, le=64)] = 8
    protected_namespaces: list[DnsLabel] = ["kube-system"]
    protected_cidrs: list[str] = []
    service_account: DnsLabel = "tenantry-operator"
    tenant_role: DnsLabel = "tenantry-tenant-namespace"
    region_label: LabelKey = "topology.kubernetes.io/region"

    @classmethod
    def load(cls, path: Path) -> OperatorConfig:
        """Read the YAML file. Raises pydantic.ValidationError, which names each field."""
        return cls.model_validate(yaml.safe_load(path.read_text()))
