"""The namespace of a dedicated tenant and what stands in it before the first pod."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tenantry.api import names

from .objects import Obj, metadata

ENGINE_SERVICE_ACCOUNT: Final = "tenantry-engine"


def namespace(tenant: str) -> Obj:
    """Pod security `restricted` in every mode. Our label on it is what confines the operator's own rights."""
    labels = {names.NAMESPACE_LABEL: tenant, names.TENANT_LABEL: tenant}
    for mode in ("enforce", "audit", "warn"):
        labels[f"pod-security.kubernetes.io/{mode}"] = "restricted"
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": metadata(names.tenant_namespace(tenant), labels=labels),
    }


def role_binding(tenant: str, account: str, account_namespace: str, role: str) -> Obj:
    """The operator's rights in this namespace: from one ClusterRole, to its own account only."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(
            "tenantry-operator", names.tenant_namespace(tenant), {names.TENANT_LABEL: tenant}
        ),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": account_namespace}],
    }


def service_account(tenant: str) -> Obj:
    """The account of the engine pods: it can do nothing and no pod gets its token."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(
            ENGINE_SERVICE_ACCOUNT, names.tenant_namespace(tenant), {names.TENANT_LABEL: tenant}
        ),
        "automountServiceAccountToken": False,
    }


def identity(tenant: str, certificates: Mapping[str, str]) -> Obj:
    """The certificates (public) by which the tenant's engines know gateway, operator and fetcher."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(
            names.IDENTITY_CONFIGMAP, names.tenant_namespace(tenant), {names.TENANT_LABEL: tenant}
        ),
        "data": dict(sorted(certificates.items())),
    }
