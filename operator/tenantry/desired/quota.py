"""ResourceQuota and LimitRange of a dedicated tenant's namespace."""

from __future__ import annotations

from tenantry.api import names
from tenantry.api.config import Quota

from .objects import Obj, metadata


def resource_quota(tenant: str, quota: Quota) -> Obj:
    """The tenant's ceiling, from the operator's configuration."""
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": metadata("tenantry", names.tenant_namespace(tenant), {names.TENANT_LABEL: tenant}),
        "spec": {"hard": dict(sorted(quota.hard.items()))},
    }


def limit_range(tenant: str) -> Obj:
    """Requests for containers that name none: a quota refuses pods without them."""
    return {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": metadata("tenantry", names.tenant_namespace(tenant), {names.TENANT_LABEL: tenant}),
        "spec": {
            "limits": [
                {
                    "type": "Container",
                    "default": {"memory": "256Mi"},
                    "defaultRequest": {"cpu": "50m", "memory": "64Mi"},
                }
            ]
        },
    }
