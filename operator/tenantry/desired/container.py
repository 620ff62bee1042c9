"""The container of Tenantry's engine: its command line, and what every engine's container has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tenantry.api import names
from tenantry.api.pool import AdapterPoolSpec, Lane

from .objects import Obj

DATA_DIR: Final = "/data"
IDENTITY_DIR: Final = "/etc/tenantry/identity"
CLAIM_DIR: Final = "/model"


@dataclass(frozen=True)
class Place:
    """What containers take from the release and from the pool's object: its uid, the release's engine image."""

    uid: str
    image: str
    pull_policy: str


def model_path(spec: AdapterPoolSpec) -> str:
    """The model's folder inside the container."""
    source = spec.base_model.source
    if source.image is not None:
        return source.image.path
    mounted = source.pvc or source.image_volume
    path = mounted.path.strip("/") if mounted is not None else ""
    return f"{CLAIM_DIR}/{path}".rstrip("/")


def arguments(spec: AdapterPoolSpec, place: Place, lane: Lane) -> list[str]:
    """The engine's command line."""
    engine = spec.engine
    args = [
        *("--model", model_path(spec)),
        *("--model-name", spec.base_model.name),
        *("--audience", place.uid),
        *("--identity-dir", IDENTITY_DIR),
        *("--host", "0.0.0.0"),  # noqa: S104  (the pod's network namespace; policies and identities guard it)
        *("--port", str(names.ENGINE_PORT)),
        *("--admin-port", str(names.ENGINE_ADMIN_PORT)),
        *("--data-dir", DATA_DIR),
        *("--dtype", engine.dtype.value),
        *("--max-model-len", str(engine.max_model_len)),
        *("--slots", str(lane.slots)),
    ]
    if engine.resources.accelerator is not None:
        args += ["--device", "cuda"]  # torch's name for AMD's accelerators too
    if engine.tensor_parallel > 1:
        args += ["--tensor-parallel-size", str(engine.tensor_parallel)]
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


def container(spec: AdapterPoolSpec, place: Place, lane: Lane) -> Obj:
    mounts: list[Obj] = [
        {"name": "data", "mountPath": DATA_DIR},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  (a mount point of the pod)
        {"name": "identity", "mountPath": IDENTITY_DIR, "readOnly": True},
        *claim_mount(spec),
    ]
    return {
        "name": "engine",
        "image": spec.engine.image or place.image,
        "imagePullPolicy": place.pull_policy,
        "args": arguments(spec, place, lane),
        "ports": ports(),
        "resources": resources(spec),
        "securityContext": hardened(),
        **probes(),
        "volumeMounts": mounts,
    }


def resources(spec: AdapterPoolSpec) -> Obj:
    """Requests and limits of the container that holds the model."""
    wanted = spec.engine.resources
    requests = {"cpu": wanted.cpu, "memory": wanted.memory}
    # No CPU limit: it would throttle an engine on cores that nobody else uses.
    limits = {"memory": wanted.memory}
    if wanted.accelerator is not None and wanted.accelerator_count > 0:
        requests[wanted.accelerator] = limits[wanted.accelerator] = str(wanted.accelerator_count)
    return {"requests": requests, "limits": limits}


def hardened() -> Obj:
    """The security context of every container of a pool."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def ports() -> list[Obj]:
    return [
        {"name": "serve", "containerPort": names.ENGINE_PORT, "protocol": "TCP"},
        {"name": "admin", "containerPort": names.ENGINE_ADMIN_PORT, "protocol": "TCP"},
    ]


def probes() -> Obj:
    """Of the container that listens, and how it ends."""
    return {
        # A model takes minutes to load from a cold disk; liveness counts from there on.
        "startupProbe": {**_probe("/healthz"), "periodSeconds": 2, "failureThreshold": 450},
        "livenessProbe": {**_probe("/healthz"), "periodSeconds": 10, "failureThreshold": 3},
        "readinessProbe": {**_probe("/readyz"), "periodSeconds": 2, "failureThreshold": 2},
        # Endpoints forget the pod first, then the engine gets SIGTERM and ends what runs.
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
    }


def claim_mount(spec: AdapterPoolSpec) -> list[Obj]:
    """Of the volume with the model, where there is one."""
    if spec.base_model.source.image is not None:
        return []
    return [{"name": "model", "mountPath": CLAIM_DIR, "readOnly": True}]


def _probe(path: str) -> Obj:
    return {"httpGet": {"path": path, "port": "admin", "scheme": "HTTP"}, "timeoutSeconds": 5}


def volumes(spec: AdapterPoolSpec) -> list[Obj]:
    volumes: list[Obj] = [
        {"name": "data", "emptyDir": {"sizeLimit": "16Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "identity", "configMap": {"name": names.IDENTITY_CONFIGMAP}},
    ]
    if spec.base_model.source.pvc is not None:
        claim = spec.base_model.source.pvc.claim_name
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    if spec.base_model.source.image_volume is not None:
        reference = spec.base_model.source.image_volume.reference
        volumes.append({"name": "model", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}})
    return volumes
