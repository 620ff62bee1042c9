"""The engine fleet of a pool: per lane a StatefulSet, its headless Service and its disruption budget.

How many replicas are sent is decided in `scaling`, from which template pods are made in `revision`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tenantry.api import names
from tenantry.api.pool import AdapterPoolSpec, EngineType, Lane, LaneName, Spread

from . import container, gate, vllm
from .namespace import ENGINE_SERVICE_ACCOUNT
from .objects import ENGINE_COMPONENT, Obj, metadata
from .revision import ANNOTATION, Asked, DedicatedTo, History

USER: Final = 65532
MAX_WORKLOAD_NAME: Final = 52
GRACE_SECONDS: Final = 90
DEFAULT_SPREAD: Final = ("kubernetes.io/hostname", "topology.kubernetes.io/zone")


@dataclass(frozen=True)
class PoolFacts:
    """What the rendering of a pool depends on, beside its spec. `replicas` of a lane None: not ours to write."""

    name: str
    uid: str
    namespace: str
    image: str
    pull_policy: str
    region_label: str
    replicas: Mapping[LaneName, int | None]
    dedicated: DedicatedTo | None = None


def render(
    spec: AdapterPoolSpec, facts: PoolFacts, histories: Mapping[LaneName, History] | None = None
) -> list[Obj]:
    """Every object of the pool, lane by lane. Where a lane has a history, its current template is what is sent."""
    objects: list[Obj] = []
    for lane in spec.lanes:
        history = (histories or {}).get(lane.name, History())
        objects += [
            _service(facts, lane),
            _stateful_set(spec, facts, lane, history),
            _budget(spec, facts, lane),
        ]
    return objects


def asked(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane) -> Asked:
    """All that the lane's template depends on."""
    own_image = spec.engine.type is EngineType.TENANTRY and spec.engine.image is not None
    region = facts.dedicated.region if facts.dedicated is not None else None
    return Asked(
        pool=facts.name,
        uid=facts.uid,
        namespace=facts.namespace,
        base_model=spec.base_model,
        engine=spec.engine,
        lora=spec.lora,
        scheduling=spec.scheduling,
        slots=lane.slots,
        image=None if own_image else facts.image,
        pull_policy=facts.pull_policy,
        dedicated=facts.dedicated,
        region_label=facts.region_label if region is not None else None,
        retry_token=spec.upgrade.retry_token,
    )


def template(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane) -> Obj:
    """The pod template that this release makes of the spec."""
    return {
        "metadata": {"labels": {names.MANAGED_BY_LABEL: names.MANAGED_BY, **_labels(facts, lane)}},
        "spec": _pod(spec, facts, lane),
    }


def selector(pool: str, lane: LaneName) -> dict[str, str]:
    """Labels that select the pods of a lane. Immutable in a StatefulSet, so there are no more than these."""
    return {
        names.COMPONENT_LABEL: ENGINE_COMPONENT,
        names.POOL_LABEL: pool,
        names.LANE_LABEL: lane.value,
    }


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


def _stateful_set(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane, history: History) -> Obj:
    workload = names.lane_workload(facts.name, lane.name)
    replicas = facts.replicas[lane.name]
    current = history.current
    meta = metadata(workload, facts.namespace, _labels(facts, lane))
    if current is not None:
        meta["annotations"] = {ANNOTATION: history.annotation()}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": meta,
        "spec": {
            **({"replicas": replicas} if replicas is not None else {}),
            "serviceName": workload,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": selector(facts.name, lane.name)},
            "template": template(spec, facts, lane) if current is None else current.template,
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
        "topologySpreadConstraints": _spread(spec, facts, lane),
        **_engine(spec, facts, lane),
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
        if facts.dedicated.runtime_class is not None:
            pod["runtimeClassName"] = facts.dedicated.runtime_class
        if facts.dedicated.gate_image is not None:
            attested = facts.dedicated.attested
            gate.attach(pod, facts.dedicated.gate_image, facts.pull_policy, facts.uid, attested=attested)
    if tolerations:
        pod["tolerations"] = tolerations
    return pod


def _engine(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane) -> Obj:
    """Containers and volumes."""
    place = container.Place(facts.uid, facts.image, facts.pull_policy)
    if spec.engine.type is EngineType.VLLM:
        return {
            "containers": vllm.containers(spec, place, lane),
            "volumes": vllm.volumes(spec),
        }
    return {"containers": [container.container(spec, place, lane)], "volumes": container.volumes(spec)}


def _spread(spec: AdapterPoolSpec, facts: PoolFacts, lane: Lane) -> list[Obj]:
    """Over nodes and zones where that can be, unless the pool says otherwise."""
    wanted = spec.scheduling.topology_spread
    if wanted is None:
        wanted = [Spread(topology_key=key) for key in DEFAULT_SPREAD]
    return [
        {
            "maxSkew": spread.max_skew,
            "topologyKey": spread.topology_key,
            "whenUnsatisfiable": spread.when_unsatisfiable,
            "labelSelector": {"matchLabels": selector(facts.name, lane.name)},
        }
        for spread in wanted
    ]


def _affinity(region_label: str, dedicated: DedicatedTo) -> Obj:
    """Required, and beside the toleration: a taint keeps others out, only affinity keeps these pods in."""
    terms = [{"key": names.NODE_TENANT_LABEL, "operator": "In", "values": [dedicated.tenant]}]
    if dedicated.region is not None:
        terms.append({"key": region_label, "operator": "In", "values": [dedicated.region]})
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": terms}]}
    }


__all__ = ["DedicatedTo", "PoolFacts", "asked", "render", "selector", "template"]
