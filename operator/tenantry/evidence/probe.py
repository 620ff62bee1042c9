"""The probe's pod: the least that can be run. It has no token, no volume, no egress of its own and a short life."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from tenantry.api import names
from tenantry.desired.engine import USER
from tenantry.desired.objects import Obj, metadata

from .network import Target

PROBE_COMPONENT: Final = "probe"
PROBE_ACCOUNT: Final = "tenantry-probe"
NODE_ANNOTATION: Final = "tenantry.dev/probed-node"
CLOSED_PORT: Final = names.ENGINE_ADMIN_PORT + 1
PORTS: Final = (names.ENGINE_ADMIN_PORT, CLOSED_PORT)
"""The first one is open to the operator by the tenant's policies, the second one to nobody."""

DEADLINE_SECONDS: Final = 60
SETTLE_SECONDS: Final = 10
"""Policies take a moment to reach a new pod; what is open after so long is open."""


def service_account(tenant: str) -> Obj:
    """An account that can do nothing, whose token no pod gets."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(PROBE_ACCOUNT, names.tenant_namespace(tenant), {names.TENANT_LABEL: tenant}),
        "automountServiceAccountToken": False,
    }


def name(round_id: str, index: int) -> str:
    return f"tenantry-probe-{round_id}-{index}"


def pod(
    tenant: str,
    pod_name: str,
    node: str,
    *,
    image: str,
    pull_policy: str,
    runtime_class: str | None,
    targets: Sequence[Target],
) -> Obj:
    """A pod on that very node, placed by the scheduler, that tries the targets and tells what it saw as it ends."""
    plan = {
        "targets": [target.wire() for target in targets],
        "allowed": PORTS[0],
        "closed": PORTS[1],
        "settle": SETTLE_SECONDS,
        "deadline": DEADLINE_SECONDS - 10,
    }
    spec: Obj = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": DEADLINE_SECONDS,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "serviceAccountName": PROBE_ACCOUNT,
        # No names are looked up but by the DNS probe itself.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [{"key": names.NODE_TAINT, "operator": "Equal", "value": tenant}],
        "affinity": {"nodeAffinity": _on(tenant, node)},
        "containers": [
            {
                "name": "probe",
                "image": image,
                "imagePullPolicy": pull_policy,
                "command": ["python", "-m", "tenantry.probes"],
                "args": [json.dumps(plan, sort_keys=True, separators=(",", ":"))],
                "resources": {
                    "requests": {"cpu": "10m", "memory": "32Mi"},
                    "limits": {"cpu": "500m", "memory": "64Mi"},
                },
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
            }
        ],
    }
    if runtime_class is not None:
        spec["runtimeClassName"] = runtime_class
    labels = {names.TENANT_LABEL: tenant, names.COMPONENT_LABEL: PROBE_COMPONENT}
    meta = metadata(pod_name, names.tenant_namespace(tenant), labels)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**meta, "annotations": {NODE_ANNOTATION: node}},
        "spec": spec,
    }


def privileged(tenant: str) -> Obj:
    """What pod security must refuse; sent as a dry run only."""
    container: Obj = {"name": "c", "image": "x:1", "securityContext": {"privileged": True}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(
            "tenantry-dry-run", names.tenant_namespace(tenant), {names.TENANT_LABEL: tenant}
        ),
        "spec": {
            "serviceAccountName": PROBE_ACCOUNT,
            "automountServiceAccountToken": False,
            "hostNetwork": True,
            "containers": [container],
        },
    }


def _on(tenant: str, node: str) -> Obj:
    term = {
        "matchExpressions": [{"key": names.NODE_TENANT_LABEL, "operator": "In", "values": [tenant]}],
        "matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}],
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
