"""Every name, label and port that more than one room uses. Deterministic, so that nothing has to be looked up."""

from __future__ import annotations

from typing import Final

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "tenantry"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
POOL_LABEL: Final = "tenantry.dev/pool"
LANE_LABEL: Final = "tenantry.dev/lane"
TENANT_LABEL: Final = "tenantry.dev/tenant"
NAMESPACE_LABEL: Final = "tenantry.dev/tenant-namespace"
FIELD_MANAGER: Final = "tenantry"
FINALIZER: Final = "tenantry.dev/release"

CLAIMABLE_LABEL: Final = "tenantry.dev/claimable"
NODE_TENANT_LABEL: Final = "tenantry.node-restriction.kubernetes.io/tenant"
NODE_TAINT: Final = "tenantry.dev/tenant"

ENGINE_PORT: Final = 8000
ENGINE_ADMIN_PORT: Final = 8001
GATEWAY_PORT: Final = 8080
FETCHER_PORT: Final = 8090
METRICS_PORT: Final = 9090
ENGINE_GATE_PORT: Final = 8002
ENGINE_HEALTH_PORT: Final = 8003

IDENTITY_HEADER: Final = "x-tenantry-identity"
SERVED_HEADER: Final = "x-tenantry-served"
REQUEST_ID_HEADER: Final = "x-request-id"
CONVERSATION_HEADER: Final = "x-tenantry-conversation"

GATEWAY_SERVICE: Final = "tenantry-gateway"
ROLLOUT_METRICS_PATH: Final = "/metrics/rollouts"

GATEWAY_ISSUER: Final = "tenantry-gateway"
OPERATOR_ISSUER: Final = "tenantry-operator"
FETCHER_ISSUER: Final = "tenantry-fetcher"
FETCHER_AUDIENCE: Final = "tenantry-fetcher"

IDENTITY_CONFIGMAP: Final = "tenantry-identity"
CERTIFICATES_CONFIGMAP: Final = "tenantry-certificates"
GATE_CONFIGMAP: Final = "tenantry-gate"
AUTHORITY_FILE: Final = "ca.pem"
"""Name of the authority's certificate in both: not `*.crt`, which would make it an identity."""


def served_name(namespace: str, adapter: str, version: str, digest: str) -> str:
    """The name under which an engine serves a version: new bytes always have a new name."""
    return f"{namespace}.{adapter}--{version}-{digest.removeprefix('sha256:')[:12]}"


def tenant_namespace(tenant: str) -> str:
    """The namespace that a dedicated tenant owns."""
    return f"tenant-{tenant}"


def own_gateway(tenant: str) -> str:
    """Deployment and Service of a gateway that serves one tenant alone, in the release's namespace."""
    return f"tenantry-gateway-{tenant}"


def dedicated_pool(tenant: str) -> str:
    """The name of the pool that the operator derives for a dedicated tenant."""
    return f"tenant-{tenant}"


def tls_name(part: str) -> str:
    """What a certificate says whom it is for: the uid of a pool, or `gateway`, `operator`, `fetcher`."""
    return f"{part}.tenantry.internal"


def lane_workload(pool: str, lane: str) -> str:
    """The StatefulSet and its headless Service of one lane."""
    return f"{pool}-{lane}"


def replica_pod(pool: str, lane: str, ordinal: int) -> str:
    """The pod of one replica; stable over restarts."""
    return f"{lane_workload(pool, lane)}-{ordinal}"
