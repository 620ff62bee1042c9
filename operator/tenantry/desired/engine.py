"""The engine fleet of a pool: per lane a StatefulSet, its headless Service and its disruption budget.

`replicas`: the operator sends `min`, so a hand that scales below it is corrected. As soon as another field manager
(an autoscaler, `kubectl scale`) holds `spec.replicas`, the operator sends whatever that manager wrote, but never
less than `min`. The field is always sent, since one that server-side apply stops sending falls back to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tenantry.api import names
from tenantry.api.pool import AdapterPoolSpec, Lane, LaneName

from .namespace import ENGINE_SERVICE_ACCOUNT
from .objects import ENGINE_COMPONENT, Obj, metadata

USER: Final = 65532
DATA_DIR: Final = "/data"
IDENTITY_DIR: Final = "/etc/tenantry/identity"
CLAIM_DIR: Final = "/model"
MAX_WORKLOAD_NAME: Final = 52
GRACE_SECONDS: Final = 90


@dataclass(frozen=True)
class DedicatedTo:
    """The tenant whose nodes and namespace the pool runs in."""

    tenant: str
    region: str | None


@dataclass(frozen=True)
class PoolFacts:
    """What the rendering of a pool depends on, beside its spec."""

    name: str
    uid: str
    namespace: str
    image: str
    pull_policy: str
    region_label: str
    replicas: Mapping[LaneName, int]
    dedicated: DedicatedTo | None = None


def render(spec: AdapterPoolSpec, facts: PoolFacts) -> list[Obj]:
    """Every object of the pool, lane by lane."""
    objects: list[Obj] = []
    for lane in spec.lanes:
        objects += [
            _service(facts, lane),
            _stateful_set(spec, facts, lane),
            _budget(spec, facts, lane),
        ]
    return objects


def replicas_to_send(minimum: int, live: Obj | None) -> int:
    """What to write into `spec.replicas` of a lane's StatefulSet (`live` as read, None before it exists)."""
    if live is None:
        return minimum
    current = int(live.get("spec", {}).get("replicas", minimum))
    scaled = any(
        entry.get("manager") != names.FIELD_MANAGER
        and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        for entry in live["metadata"].get("managedFields") or []
    )
    return max(minimum, current) if scaled else minimum


def selector(pool: str, lane: LaneName) -> dict[str, str]:
    """Labels that select the pods of a lane. Immutable in a StatefulSet, so there are no more than these."""
    return {
        names.COMPONENT_LABEL: ENGINE_COMPONENT,
        names.POOL_LABEL: pool,
        names.LANE_LABEL: lane.value,
    }


def arguments(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane) -> list[str]:
    """The engine's command line."""
    engine, source = spec.engine, spec.base_model.source
    path = source.image.path if source.image is not None else f"{CLAIM_DIR}/{_claim_path(spec)}".rstrip("/")
    args = [
        *("--model", path),
        *("--model-name", spec.base_model.name),
        *("--audience", facts.uid),
        *("--identity-dir", IDENTITY_DIR),
        *("--host", "0.0.0.0"),  # noqa: S104  (the pod's network namespace; policies and identities guard it)
        *("--port", str(names.ENGINE_PORT)),
        *("--admin-port", str(names.ENGINE_ADMIN_PORT)),
        *("--data-dir", DATA_DIR),
        *("--dtype", engine.dtype.value),
        *("--max-model-len", str(engine.max_model_len)),
        *("--slots", str(lane.slots)),
    ]
    if engine.pool_bytes is not None:
        args += ["--pool-bytes", str(engine.pool_bytes)]
    if spec.base_model.digest is not None:
        args += ["--model-digest", spec.base_model.digest]
    if spec.lora is None:
        return [*args, "--no-lora"]
    return [
        *args,
        *("--max-rank", str(spec.lora.max_rank)),
        *("--max-registered", str(spec.lora.max_registered)),
        *("--target-modules", ",".join(spec.lora.target_modules)),
    ]


def _claim_path(spec: AdapterPoolSpec) -> str:
    claim = spec.base_model.source.pvc
    return "" if claim is None else claim.path.strip("/")


def _labels(facts: PoolFacts, lane: Lane) -> dict[str, str]:
    labels = selector(facts.name, lane.name)
    if facts.dedicated is not None:
        labels[names.TENANT_LABEL] = facts.dedicated.tenant
    return labels


def _service(facts: PoolFacts, lane: Lane) -> Obj:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(
            names.lane_workload(facts.name, lane.name), facts.namespace, _labels(facts, lane)
        ),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": False,
            "selector": selector(facts.name, lane.name),
            "ports": [
                {"name": "serve", "port": names.ENGINE_PORT, "targetPort": "serve", "protocol": "TCP"},
                {"name": "admin", "port": names.ENGINE_ADMIN_PORT, "targetPort": "admin", "protocol": "TCP"},
            ],
        },
    }


def _budget(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane) -> Obj:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(
            names.lane_workload(facts.name, lane.name), facts.namespace, _labels(facts, lane)
        ),
        "spec": {
            "maxUnavailable": spec.upgrade.max_unavailable,
            "selector": {"matchLabels": selector(facts.name, lane.name)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _stateful_set(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane) -> Obj:
    workload = names.lane_workload(facts.name, lane.name)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(workload, facts.namespace, _labels(facts, lane)),
        "spec": {
            "replicas": facts.replicas[lane.name],
            "serviceName": workload,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": selector(facts.name, lane.name)},
            "template": {
                "metadata": {
                    "labels": {names.MANAGED_BY_LABEL: names.MANAGED_BY, **_labels(facts, lane)},
                },
                "spec": _pod(spec, facts, lane),
            },
        },
    }


def _pod(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane) -> Obj:
    pod: Obj = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": key,
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": selector(facts.name, lane.name)},
            }
            for key in ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
        ],
        "containers": [_container(spec, facts, lane)],
        "volumes": _volumes(spec),
    }
    scheduling = spec.scheduling
    tolerations = [toleration.wire() for toleration in scheduling.tolerations]
    if scheduling.node_selector:
        pod["nodeSelector"] = dict(sorted(scheduling.node_selector.items()))
    if scheduling.priority_class_name is not None:
        pod["priorityClassName"] = scheduling.priority_class_name
    if facts.dedicated is not None:
        pod["serviceAccountName"] = ENGINE_SERVICE_ACCOUNT
        tolerations.append({"key": names.NODE_TAINT, "operator": "Equal", "value": facts.dedicated.tenant})
        pod["affinity"] = {"nodeAffinity": _affinity(facts.region_label, facts.dedicated)}
    if tolerations:
        pod["tolerations"] = tolerations
    return pod


def _affinity(region_label: str, dedicated: DedicatedTo) -> Obj:
    """Required, and beside the toleration: a taint keeps others out, only affinity keeps these pods in."""
    terms = [{"key": names.NODE_TENANT_LABEL, "operator": "In", "values": [dedicated.tenant]}]
    if dedicated.region is not None:
        terms.append({"key": region_label, "operator": "In", "values": [dedicated.region]})
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": terms}]}
    }


def _container(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane) -> Obj:
    resources = spec.engine.resources
    requests = {"cpu": resources.cpu, "memory": resources.memory}
    # No CPU limit: it would throttle an engine on cores that nobody else uses.
    limits = {"memory": resources.memory}
    if resources.accelerator is not None and resources.accelerator_count > 0:
        requests[resources.accelerator] = limits[resources.accelerator] = str(resources.accelerator_count)
    mounts: list[Obj] = [
        {"name": "data", "mountPath": DATA_DIR},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  (a mount point of the pod)
        {"name": "identity", "mountPath": IDENTITY_DIR, "readOnly": True},
    ]
    if spec.base_model.source.pvc is not None:
        mounts.append({"name": "model", "mountPath": CLAIM_DIR, "readOnly": True})
    return {
        "name": "engine",
        "image": spec.engine.image or facts.image,
        "imagePullPolicy": facts.pull_policy,
        "args": arguments(spec, facts, lane),
        "ports": [
            {"name": "serve", "containerPort": names.ENGINE_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": names.ENGINE_ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": {"requests": requests, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # A model takes minutes to load from a cold disk; liveness counts from there on.
        "startupProbe": {**_probe("/healthz"), "periodSeconds": 2, "failureThreshold": 450},
        "livenessProbe": {**_probe("/healthz"), "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 2, "failureThreshold": 2},
        # Endpoints forget the pod first, then the engine gets SIGTERM and ends what runs.
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "volumeMounts": mounts,
    }


def _probe(path: str) -> Obj:
    return {"httpGet": {"path": path, "port": "admin", "scheme": "HTTP"}, "timeoutSeconds": 5}


def _volumes(spec: AdapterPoolSpec) -> list[Obj]:
    volumes: list[Obj] = [
        {"name": "data", "emptyDir": {"sizeLimit": "16Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "identity", "configMap": {"name": names.IDENTITY_CONFIGMAP}},
    ]
    if spec.base_model.source.pvc is not None:
        claim = spec.base_model.source.pvc.claim_name
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    return volumes
