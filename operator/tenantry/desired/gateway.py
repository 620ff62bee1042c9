"""The gateway of one tenant alone, beside the shared one in the release's namespace, whose keys it needs."""

from __future__ import annotations

from typing import Final

from tenantry.api import TenantSpec, Tier, names
from tenantry.api.config import GatewayTemplate, OperatorConfig
from tenantry.api.tenant import GatewayPlace

from .objects import OWN_GATEWAY_COMPONENT, Obj, metadata
from .problems import Problem

USER: Final = 65532


def is_own(spec: TenantSpec) -> bool:
    """Whether the tenant gets a gateway of its own: as asked, and in tier Regulated always."""
    return spec.tier is Tier.REGULATED or spec.isolation.gateway is GatewayPlace.DEDICATED


def place(spec: TenantSpec) -> GatewayPlace:
    """Which gateway serves the tenant once everything is in place."""
    return GatewayPlace.DEDICATED if is_own(spec) else GatewayPlace.SHARED


def problems(spec: TenantSpec, config: OperatorConfig) -> list[Problem]:
    """What keeps the tenant from a gateway as its tier has it."""
    if spec.tier is Tier.REGULATED and spec.isolation.gateway is GatewayPlace.SHARED:
        return [
            Problem("isolation.gateway", "must be Dedicated in tier Regulated, which shares none: drop it")
        ]
    if spec.isolation.gateway is GatewayPlace.DEDICATED and config.gateway is None:
        return [Problem("isolation.gateway", "must be Shared: this release offers no gateways to one tenant")]
    return []


def url(tenant: str, release_namespace: str) -> str:
    """What the tenant's clients use as base URL inside the cluster."""
    return f"http://{names.own_gateway(tenant)}.{release_namespace}.svc:{names.GATEWAY_PORT}/v1"


def render(tenant: str, release_namespace: str, template: GatewayTemplate) -> list[Obj]:
    """Deployment and Service. One replica: limits and ledger live in its process."""
    labels = {names.COMPONENT_LABEL: OWN_GATEWAY_COMPONENT, names.TENANT_LABEL: tenant}
    name = names.own_gateway(tenant)
    deployment: Obj = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(name, release_namespace, labels),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": {names.MANAGED_BY_LABEL: names.MANAGED_BY, **labels}},
                "spec": _pod(tenant, template),
            },
        },
    }
    service: Obj = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, release_namespace, labels),
        "spec": {
            "selector": labels,
            "ports": [{"name": "http", "port": names.GATEWAY_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }
    return [deployment, service]


def _pod(tenant: str, template: GatewayTemplate) -> Obj:
    mounts: dict[str, tuple[str, Obj]] = {
        "key": ("/etc/tenantry/keys", {"secret": {"secretName": template.key_secret, "defaultMode": 0o440}}),
        "salt": (
            "/etc/tenantry/salt",
            {"secret": {"secretName": template.salt_secret, "defaultMode": 0o440}},
        ),
        "certificates": (
            "/etc/tenantry/certificates",
            {"configMap": {"name": names.CERTIFICATES_CONFIGMAP}},
        ),
        "ledger": ("/var/lib/tenantry", {"emptyDir": {"sizeLimit": "1Gi"}}),
        "tmp": ("/tmp", {"emptyDir": {"sizeLimit": "64Mi"}}),  # noqa: S108  (a mount point of the pod)
    }
    written = ("ledger", "tmp")
    container: Obj = {
        "name": "gateway",
        "image": template.image,
        "imagePullPolicy": template.pull_policy,
        "command": ["tenantry-gateway"],
        "args": [
            f"--tenant={tenant}",
            f"--port={names.GATEWAY_PORT}",
            f"--metrics-port={names.METRICS_PORT}",
            "--identity-key=/etc/tenantry/keys/tls.key",
            "--certificates-dir=/etc/tenantry/certificates",
            "--salt-file=/etc/tenantry/salt/salt",
            "--ledger=sqlite:////var/lib/tenantry/ledger.db",
        ],
        "ports": [
            {"name": "http", "containerPort": names.GATEWAY_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": names.METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": {"requests": dict(template.requests), "limits": dict(template.limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "startupProbe": {**_probe("/healthz"), "periodSeconds": 2, "failureThreshold": 60},
        "livenessProbe": {**_probe("/healthz"), "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 2, "failureThreshold": 2},
        "volumeMounts": [
            {"name": name, "mountPath": path, **({} if name in written else {"readOnly": True})}
            for name, (path, _) in mounts.items()
        ],
    }
    pod: Obj = {
        "serviceAccountName": template.service_account,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 75,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in mounts.items()],
    }
    if template.node_selector:
        pod["nodeSelector"] = dict(sorted(template.node_selector.items()))
    if template.tolerations:
        pod["tolerations"] = [toleration.wire() for toleration in template.tolerations]
    return pod


def _probe(path: str) -> Obj:
    return {"httpGet": {"path": path, "port": "metrics"}, "timeoutSeconds": 5}
