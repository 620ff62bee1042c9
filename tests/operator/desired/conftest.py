"""A configuration and specs that the tests of pure code share."""

from __future__ import annotations

from typing import Any

import pytest
from tenantry.api import AdapterPoolSpec, OperatorConfig, TenantSpec


@pytest.fixture
def pool_wire() -> dict[str, Any]:
    return {
        "baseModel": {"name": "tiny", "source": {"image": {"path": "/models/tiny"}}},
        "tiers": ["MidMarket"],
        "engine": {"resources": {"cpu": "500m", "memory": "2Gi"}, "poolBytes": 67108864},
        "lora": {"maxRank": 16, "maxRegistered": 100, "targetModules": ["q_proj", "v_proj"]},
        "lanes": [
            {"name": "fast", "replicas": {"min": 2}, "slots": 8, "maxInputTokens": 512},
            {"name": "bulk", "replicas": {"min": 1}, "slots": 32},
        ],
    }


@pytest.fixture
def pool_spec(pool_wire: dict[str, Any]) -> AdapterPoolSpec:
    return AdapterPoolSpec.model_validate(pool_wire)


@pytest.fixture
def config(pool_wire: dict[str, Any]) -> OperatorConfig:
    limits = {
        "requestsPerMinute": 60,
        "tokensPerMinute": 1000,
        "maxInFlight": 4,
        "maxQueued": 8,
        "maxInputTokens": 512,
        "maxOutputTokens": 128,
    }
    policy = {"defaults": limits, "ceilings": {name: 10 * value for name, value in limits.items()}}
    return OperatorConfig.model_validate(
        {
            "engineImage": "registry.example/engine:1",
            "gatewayUrl": "http://gateway.example",
            "fetcherUrl": "http://fetcher.example",
            "tiers": {
                "Free": policy,
                "MidMarket": policy,
                "Enterprise": {**policy, "poolTemplates": ["gold"]},
                "Regulated": {**policy, "poolTemplates": ["gold"]},
            },
            "poolTemplates": {"gold": pool_wire, "other": pool_wire},
        }
    )


@pytest.fixture
def free() -> TenantSpec:
    return TenantSpec.model_validate({"tier": "Free", "models": [{"name": "chat", "baseModel": "tiny"}]})


@pytest.fixture
def enterprise() -> TenantSpec:
    return TenantSpec.model_validate(
        {
            "tier": "Enterprise",
            "models": [{"name": "chat", "baseModel": "tiny"}],
            "dedicated": {"poolTemplateRef": "gold", "replicas": 3},
            "isolation": {"region": "north", "nodes": 2, "egress": ["203.0.113.0/24"]},
        }
    )
