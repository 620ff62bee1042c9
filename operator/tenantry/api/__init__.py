"""The API `tenantry.dev/v1alpha1`: the only source of CRDs, chart schema and reference docs. Imports no client."""

from .adapter import AdapterSpec, AdapterStatus
from .common import API_VERSION, GROUP, VERSION, Condition, Tier
from .config import OperatorConfig
from .pool import AdapterPoolSpec, AdapterPoolStatus
from .tenant import Route, TenantSpec, TenantStatus

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "AdapterPoolSpec",
    "AdapterPoolStatus",
    "AdapterSpec",
    "AdapterStatus",
    "Condition",
    "OperatorConfig",
    "Route",
    "TenantSpec",
    "TenantStatus",
    "Tier",
]
