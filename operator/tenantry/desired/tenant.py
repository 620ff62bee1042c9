"""What a Tenant's spec must hold beyond its schema: tier policy, templates, references between its own fields."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

from tenantry.api import names
from tenantry.api.common import Tier
from tenantry.api.config import OperatorConfig
from tenantry.api.pool import AdapterPoolSpec
from tenantry.api.tenant import Isolation, TenantSpec

from . import gate, gateway, nodepool
from .engine import MAX_WORKLOAD_NAME, DedicatedTo
from .limits import limit_problems
from .network import egress_problems
from .objects import Obj, metadata
from .pins import pin_problems
from .problems import Problem, SpecError, join

ADAPTER_TIERS: Final = (Tier.MID_MARKET, Tier.ENTERPRISE, Tier.REGULATED)
_DATE_TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$")
_LONGEST_LANE = len("-fast")


def tenant_problems(
    name: str, spec: TenantSpec, config: OperatorConfig, protected: Iterable[tuple[str, str]]
) -> list[Problem]:
    """Everything that keeps the tenant from being served as its spec stands; empty when nothing does."""
    policy = config.tiers.get(spec.tier)
    if policy is None:
        offered = join(sorted(tier.value for tier in config.tiers))
        return [Problem("tier", f"must be a tier that this release offers ({offered})")]
    problems = limit_problems(spec.limits, spec.weight, policy)
    problems += _model_problems(spec)
    problems += pin_problems(spec, policy)
    problems += _key_problems(spec)
    if spec.tier.dedicated:
        problems += _dedicated_problems(name, spec, config)
        problems += egress_problems(spec.isolation.egress, protected)
        problems += gate.problems(spec, config)
        problems += gateway.problems(spec, config)
        problems += nodepool.problems(spec, config)
    else:
        problems += _shared_problems(spec)
    return problems


def _model_problems(spec: TenantSpec) -> list[Problem]:
    problems = []
    aliases = Counter(model.name for model in spec.models)
    for index, model in enumerate(spec.models):
        field = f"models[{index}]"
        if aliases[model.name] > 1:
            problems.append(
                Problem(f"{field}.name", f"must be unique within the tenant: `{model.name}` appears twice")
            )
        if model.fallback is not None and (model.fallback not in aliases or model.fallback == model.name):
            problems.append(
                Problem(
                    f"{field}.fallback", f"must name another model of this tenant, not `{model.fallback}`"
                )
            )
        if model.adapter_ref is None:
            continue
        if spec.tier not in ADAPTER_TIERS:
            problems.append(
                Problem(f"{field}.adapterRef", f"must be absent in tier {spec.tier.value}: use MidMarket")
            )
        elif model.adapter_ref.namespace not in spec.adapter_namespaces:
            problems.append(
                Problem(
                    f"{field}.adapterRef.namespace",
                    f"must be listed in `adapterNamespaces`: add `{model.adapter_ref.namespace}` there",
                )
            )
    return problems


def _key_problems(spec: TenantSpec) -> list[Problem]:
    problems = []
    key_names = Counter(key.name for key in spec.auth.api_keys)
    hashes = Counter(key.sha256 for key in spec.auth.api_keys)
    for index, key in enumerate(spec.auth.api_keys):
        field = f"auth.apiKeys[{index}]"
        if key_names[key.name] > 1:
            problems.append(Problem(f"{field}.name", f"must be unique within the tenant: `{key.name}`"))
        if hashes[key.sha256] > 1:
            problems.append(Problem(f"{field}.sha256", "must be unique within the tenant: mint another key"))
        if key.expires_at is not None and not _DATE_TIME.match(key.expires_at):
            problems.append(Problem(f"{field}.expiresAt", "must be a time such as 2027-01-31T00:00:00Z"))
    return problems


def _shared_problems(spec: TenantSpec) -> list[Problem]:
    problems = []
    if spec.dedicated is not None:
        problems.append(
            Problem("dedicated", f"must be absent in tier {spec.tier.value}: it belongs to Enterprise")
        )
    isolation = spec.isolation
    if isolation != Isolation():
        problems.append(
            Problem(
                "isolation",
                f"must be absent in tier {spec.tier.value}: pods are shared there, so nothing of it could hold",
            )
        )
    return problems


def _dedicated_problems(name: str, spec: TenantSpec, config: OperatorConfig) -> list[Problem]:
    problems = []
    longest = MAX_WORKLOAD_NAME - _LONGEST_LANE - len(names.dedicated_pool(""))
    if len(name) > longest or "." in name:
        problems.append(
            Problem(
                "tier",
                f"must be a shared one for this name: dedicated names have at most {longest} characters "
                "and no dots; use a shorter name",
            )
        )
    if spec.dedicated is None:
        return [
            *problems,
            Problem("dedicated", f"must be set in tier {spec.tier.value}: name a pool template and replicas"),
        ]
    allowed = config.tiers[spec.tier].pool_templates
    wanted = spec.dedicated.pool_template_ref
    template = config.pool_templates.get(wanted)
    if wanted not in allowed or template is None:
        problems.append(
            Problem(
                "dedicated.poolTemplateRef",
                f"must be a template offered to tier {spec.tier.value} ({join(sorted(allowed)) or 'none is'})",
            )
        )
        return problems
    for index, model in enumerate(spec.models):
        if model.base_model != template.base_model.name:
            problems.append(
                Problem(
                    f"models[{index}].baseModel",
                    f"must be `{template.base_model.name}`, the base model of template `{wanted}`",
                )
            )
        if model.pool_ref is not None and model.pool_ref != names.dedicated_pool(name):
            problems.append(
                Problem(f"models[{index}].poolRef", "must be absent in a dedicated tier: the pool is its own")
            )
    return problems


def dedicated_to(tenant: str, spec: TenantSpec, config: OperatorConfig) -> DedicatedTo:
    """What the rendering of a dedicated tenant's pool must know of the tenant."""
    isolation = spec.isolation
    return DedicatedTo(
        tenant,
        isolation.region,
        isolation.runtime_class_name,
        (config.gate_image or config.engine_image) if gate.is_secured(spec) else None,
        attested=isolation.attestation is not None,
    )


def derived_pool(tenant: str, spec: TenantSpec, template: AdapterPoolSpec) -> Obj:
    """The AdapterPool of a dedicated tenant: the admin's template with the tenant's replicas.

    Raises SpecError without `dedicated`.
    """
    if spec.dedicated is None:
        raise SpecError([Problem("dedicated", "must be set")])
    lanes = []
    for lane in template.lanes:
        wire = lane.wire()
        wire["replicas"] = {"min": spec.dedicated.replicas}
        lanes.append(wire)
    wire = template.wire()
    wire.update(tiers=[spec.tier.value], lanes=lanes)
    return {
        "apiVersion": "tenantry.dev/v1alpha1",
        "kind": "AdapterPool",
        "metadata": metadata(names.dedicated_pool(tenant), labels={names.TENANT_LABEL: tenant}),
        "spec": wire,
    }


def cluster_ranges(nodes: Iterable[Obj], configured: Iterable[str]) -> list[tuple[str, str]]:
    """The cluster's own networks, so that no egress list opens them: pods and addresses of nodes, admin's list."""
    ranges = [(cidr, "a network that the release protects") for cidr in configured]
    for node in nodes:
        what = node["metadata"]["name"]
        ranges += [
            (cidr, f"the pods of node `{what}`") for cidr in node.get("spec", {}).get("podCIDRs") or []
        ]
        ranges += [
            (address["address"], f"node `{what}`")
            for address in node.get("status", {}).get("addresses") or []
            if address.get("type") in ("InternalIP", "ExternalIP")
        ]
    return ranges
