"""A tenant's spec against the operator's configuration: every refusal names its field and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from tenantry.api import OperatorConfig, TenantSpec
from tenantry.desired.limits import effective_limits
from tenantry.desired.network import NEVER, egress_problems, policies
from tenantry.desired.tenant import cluster_ranges, derived_pool, tenant_problems

KEY = {"name": "one", "sha256": "a" * 64}


def problems(spec: TenantSpec, config: OperatorConfig, name: str = "oak", **changes: Any) -> dict[str, str]:
    wire = {**spec.wire(), **changes}
    found = tenant_problems(name, TenantSpec.model_validate(wire), config, [])
    return {problem.field: problem.message for problem in found}


def test_good_specs_have_no_problems(
    free: TenantSpec, enterprise: TenantSpec, config: OperatorConfig
) -> None:
    assert problems(free, config) == {}
    assert problems(enterprise, config) == {}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"limits": {"requestsPerMinute": 601}}, "limits.requestsPerMinute"),
        ({"limits": {"maxInFlight": 41}}, "limits.maxInFlight"),
        ({"weight": 2}, "weight"),
        ({"tier": "Smb"}, "tier"),
        ({"dedicated": {"poolTemplateRef": "gold"}}, "dedicated"),
        ({"isolation": {"egress": ["203.0.113.0/24"]}}, "isolation"),
        ({"auth": {"apiKeys": [KEY, KEY]}}, "auth.apiKeys[0].name"),
        ({"auth": {"apiKeys": [{**KEY, "expiresAt": "tomorrow"}]}}, "auth.apiKeys[0].expiresAt"),
        ({"models": [{"name": "a", "baseModel": "tiny"}] * 2}, "models[0].name"),
        ({"models": [{"name": "a", "baseModel": "tiny", "fallback": "b"}]}, "models[0].fallback"),
        (
            {"models": [{"name": "a", "baseModel": "tiny", "adapterRef": {"namespace": "n", "name": "x"}}]},
            "models[0].adapterRef",
        ),
    ],
)
def test_each_fault_of_a_shared_tenant(
    free: TenantSpec, config: OperatorConfig, changes: dict[str, Any], field: str
) -> None:
    found = problems(free, config, **changes)
    assert field in found
    assert found[field].startswith("must ")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dedicated": {"poolTemplateRef": "other"}}, "dedicated.poolTemplateRef"),
        ({"dedicated": {"poolTemplateRef": "nowhere"}}, "dedicated.poolTemplateRef"),
        ({"models": [{"name": "a", "baseModel": "huge"}]}, "models[0].baseModel"),
        ({"models": [{"name": "a", "baseModel": "tiny", "poolRef": "x"}]}, "models[0].poolRef"),
        ({"isolation": {"egress": ["169.254.169.254/32"]}}, "isolation.egress[0]"),
    ],
)
def test_each_fault_of_a_dedicated_tenant(
    enterprise: TenantSpec, config: OperatorConfig, changes: dict[str, Any], field: str
) -> None:
    assert field in problems(enterprise, config, **changes)


def test_adapters_are_pinned_within_the_tier_s_ceiling(
    enterprise: TenantSpec, config: OperatorConfig
) -> None:
    """Two models may share an adapter: it is pinned once."""
    policy = config.tiers[enterprise.tier].model_copy(update={"pinned_adapters": 1})
    config = config.model_copy(update={"tiers": {**config.tiers, enterprise.tier: policy}})

    def model(name: str, adapter: str) -> dict[str, Any]:
        ref = {"namespace": "ml", "name": adapter}
        return {"name": name, "baseModel": "tiny", "adapterRef": ref, "pinned": True}

    within = [model("a", "tone"), model("b", "tone")]
    assert problems(enterprise, config, models=within, adapterNamespaces=["ml"]) == {}
    beyond = problems(enterprise, config, models=[*within, model("c", "other")], adapterNamespaces=["ml"])
    assert list(beyond) == ["models[2].pinned"]


def test_a_dedicated_name_must_fit_into_pod_labels(enterprise: TenantSpec, config: OperatorConfig) -> None:
    assert problems(enterprise, config, name="a" * 40) == {}
    assert "tier" in problems(enterprise, config, name="a" * 41)


def test_limits_default_to_the_tier_and_keep_what_was_asked(free: TenantSpec, config: OperatorConfig) -> None:
    spec = TenantSpec.model_validate({**free.wire(), "limits": {"maxQueued": 0, "maxInFlight": 9}})
    limits = effective_limits(spec.limits, config.tiers[spec.tier])
    assert (limits.max_queued, limits.max_in_flight, limits.requests_per_minute) == (0, 9, 60)
    assert limits.monthly_tokens is None


@pytest.mark.parametrize("cidr", sorted(cidr for group in NEVER.values() for cidr in group))
def test_egress_never_opens_special_ranges(cidr: str) -> None:
    assert egress_problems([cidr], [])


@pytest.mark.parametrize(
    "cidr", ["0.0.0.0/0", "::/0", "10.244.1.0/24", "10.0.0.0/8", "172.30.0.2/32", "10.96.0.10/32"]
)
def test_egress_never_opens_the_cluster_itself(cidr: str) -> None:
    node = {
        "metadata": {"name": "a"},
        "spec": {"podCIDRs": ["10.244.1.0/24"]},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": "172.30.0.2"},
                {"type": "Hostname", "address": "a"},
            ]
        },
    }
    [problem] = egress_problems([cidr], cluster_ranges([node], ["10.96.0.0/12", "not a network"]))
    assert problem.field == "isolation.egress[0]"
    assert "must not overlap" in problem.message


def test_egress_says_which_entry_is_no_network() -> None:
    [problem] = egress_problems(["203.0.113.0/24", "203.0.113.7/24"], [])
    assert problem.field == "isolation.egress[1]"


def test_policies_deny_all_but_the_release_and_the_listed_networks() -> None:
    deny, inward, outward = policies("tenant-oak", "oak", "tenantry-system", ["203.0.113.0/24"])
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    ports = {
        source["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: [
            port["port"] for port in rule["ports"]
        ]
        for rule in inward["spec"]["ingress"]
        for source in rule["from"]
    }
    assert ports == {"gateway": [8000, 8001], "operator": [8001], "fetcher": [8001]}
    for rule in inward["spec"]["ingress"]:
        for source in rule["from"]:
            labels = source["namespaceSelector"]["matchLabels"]
            assert labels == {"kubernetes.io/metadata.name": "tenantry-system"}
    assert outward["spec"]["egress"] == [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]


def test_without_egress_there_is_no_way_out() -> None:
    objects = policies("tenant-oak", "oak", "tenantry-system", [])
    assert not any("egress" in obj["spec"] for obj in objects)


def test_the_derived_pool_is_the_template_with_the_tenants_replicas(
    enterprise: TenantSpec, config: OperatorConfig
) -> None:
    pool = derived_pool("oak", enterprise, config.pool_templates["gold"])
    assert pool["metadata"]["name"] == "tenant-oak"
    assert pool["spec"]["tiers"] == ["Enterprise"]
    assert [lane["replicas"] for lane in pool["spec"]["lanes"]] == [{"min": 3}, {"min": 3}]
