"""Engine pods as the controllers read them, and what the store keeps of pods and nodes."""

from __future__ import annotations

from tenantry.cluster import Obj, is_deleting

_META = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "labels",
    "annotations",
    "ownerReferences",
    "deletionTimestamp",
)


def is_ready(pod: Obj) -> bool:
    """Whether Kubernetes sends it traffic."""
    if is_deleting(pod):
        return False
    conditions = pod.get("status", {}).get("conditions") or []
    return any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in conditions)


def address(pod: Obj) -> str | None:
    return pod.get("status", {}).get("podIP") or None


def incarnation(pod: Obj) -> str | None:
    """Identity of the running engine process: another one has forgotten what it was told. None: none runs."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    engine = next((status for status in statuses if status.get("name") == "engine"), None)
    if engine is None or "running" not in (engine.get("state") or {}):
        return None
    return f"{pod['metadata']['uid']}/{engine.get('containerID', '')}/{engine.get('restartCount', 0)}"


def is_running(pod: Obj) -> bool:
    return incarnation(pod) is not None


def restarts(pod: Obj) -> int:
    """How often its containers ended and were started again, all together."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return sum(int(status.get("restartCount", 0)) for status in statuses)


def waits_for(pod: Obj) -> str:
    """Why its containers do not run, in Kubernetes' words (`ImagePullBackOff`, ...); empty when they do."""
    statuses = pod.get("status", {}).get("containerStatuses") or []
    for status in statuses:
        reason = ((status.get("state") or {}).get("waiting") or {}).get("reason")
        if reason:
            return f"container {status.get('name')}: {reason}"
    if pod.get("status", {}).get("phase") == "Pending" and not statuses:
        return "it has no node yet"
    return ""


def revision(pod: Obj) -> str:
    """The revision of the StatefulSet's template from which the pod was made."""
    return str(pod["metadata"].get("labels", {}).get("controller-revision-hash", ""))


def trim_pod(pod: Obj) -> Obj:
    """Place, address, readiness and the running containers."""
    status = pod.get("status") or {}
    containers = [
        {
            "name": entry.get("name"),
            "containerID": entry.get("containerID", ""),
            "restartCount": entry.get("restartCount", 0),
            "state": {
                name: {"reason": state["reason"]} if name == "waiting" and (state or {}).get("reason") else {}
                for name, state in (entry.get("state") or {}).items()
            },
        }
        for entry in status.get("containerStatuses") or []
    ]
    conditions = [
        {"type": entry["type"], "status": entry["status"]}
        for entry in status.get("conditions") or []
        if entry.get("type") == "Ready"
    ]
    return {
        **_trimmed(pod),
        "spec": {"nodeName": pod.get("spec", {}).get("nodeName")},
        "status": {
            "podIP": status.get("podIP"),
            "phase": status.get("phase"),
            "conditions": conditions,
            "containerStatuses": containers,
        },
    }


def trim_node(node: Obj) -> Obj:
    """Labels, taints and networks; not the heartbeats."""
    spec, status = node.get("spec") or {}, node.get("status") or {}
    kept = {name: spec[name] for name in ("taints", "unschedulable", "podCIDRs") if name in spec}
    return {**_trimmed(node), "spec": kept, "status": {"addresses": status.get("addresses") or []}}


def trim_stateful_set(workload: Obj) -> Obj:
    """With managedFields: they tell who scales it. With annotations: they tell what its pods are made from."""
    return workload


def _trimmed(obj: Obj) -> Obj:
    meta = obj["metadata"]
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "metadata": {name: meta[name] for name in _META if name in meta},
    }
