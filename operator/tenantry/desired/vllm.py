"""A pod of engine type VLLM: vLLM on the pod's loopback, and Tenantry's agent, which is all that others reach.

The agent stands in the place of the engine: same ports, same probes, same admin routes, same signed identities.
Adapters lie on a volume that both containers see.
"""

from __future__ import annotations

from typing import Final

from tenantry.api import names
from tenantry.api.pool import AdapterPoolSpec, Lane

from .container import (
    DATA_DIR,
    IDENTITY_DIR,
    Place,
    claim_mount,
    hardened,
    model_path,
    ports,
    probes,
    resources,
)
from .container import volumes as engine_volumes
from .objects import Obj

PORT: Final = 8100
"""Where vLLM listens, on the loopback of its pod alone."""

_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that vLLM can be started with."""

_IN_ONE_BATCH: Final = 8
"""Adapters that vLLM computes together; it reserves memory for each."""

_UNTIL_THE_AGENT_ENDED: Final = f"""
import socket, time
try:
    while True:
        socket.create_connection(("127.0.0.1", {names.ENGINE_ADMIN_PORT}), 1).close()
        time.sleep(0.5)
except OSError:
    pass
"""

_IS_HEALTHY: Final = f"""
import urllib.request
urllib.request.urlopen("http://127.0.0.1:{PORT}/health", timeout=8)
"""

MISSING: Final = (
    "fair shares between tenants inside a replica (only each tenant's cap holds)",
    "proof that an adapter's memory was freed and zeroed when it left",
    "page-exact residency of adapters, and adapters that stay in memory (`pinned`)",
    "checks of an adapter's tensors before vLLM reads them",
    "templates' special tokens kept plain in what clients send: such text is refused",
    "tool calls, for which vLLM must be told how each model writes them",
)
"""What a pod of Tenantry's own engine guarantees and one of vLLM does not."""


def containers(spec: AdapterPoolSpec, place: Place, lane: Lane) -> list[Obj]:
    """The agent, named as the engine that it stands for, and vLLM."""
    shared: list[Obj] = [{"name": "data", "mountPath": DATA_DIR}, *claim_mount(spec)]
    scratch = {"mountPath": "/tmp"}  # noqa: S108  (a mount point of the pod)
    agent: Obj = {
        "name": "engine",
        "image": place.image,
        "imagePullPolicy": place.pull_policy,
        "command": ["python", "-m", "tenantry_engine.agent"],
        "args": agent_arguments(spec, place, lane),
        "ports": ports(),
        "resources": {"requests": {"cpu": "200m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": hardened(),
        **probes(),
        "volumeMounts": [
            *shared,
            {"name": "tmp", **scratch},
            {"name": "identity", "mountPath": IDENTITY_DIR, "readOnly": True},
        ],
    }
    vllm: Obj = {
        "name": "vllm",
        "image": spec.engine.image,
        "imagePullPolicy": place.pull_policy,
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": arguments(spec, lane),
        "env": _environment(spec),
        "resources": resources(spec),
        "securityContext": hardened(),
        "startupProbe": {**_health(), "periodSeconds": 5, "failureThreshold": 240},
        "livenessProbe": {**_health(), "periodSeconds": 10, "failureThreshold": 6},
        # The agent ends what runs, then closes its admin port: SIGTERM must not cut answers off before.
        "lifecycle": {"preStop": {"exec": {"command": ["python3", "-c", _UNTIL_THE_AGENT_ENDED]}}},
        "volumeMounts": [
            *shared,
            {"name": "scratch", **scratch},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  (a mount point of the pod)
        ],
    }
    return [agent, vllm]


def agent_arguments(spec: AdapterPoolSpec, place: Place, lane: Lane) -> list[str]:
    """The agent's command line."""
    args = [
        *("--vllm", f"http://127.0.0.1:{PORT}"),
        *("--model-name", spec.base_model.name),
        *("--audience", place.uid),
        *("--identity-dir", IDENTITY_DIR),
        *("--host", "0.0.0.0"),  # noqa: S104  (the pod's network namespace; policies and identities guard it)
        *("--port", str(names.ENGINE_PORT)),
        *("--admin-port", str(names.ENGINE_ADMIN_PORT)),
        *("--data-dir", DATA_DIR),
        *("--slots", str(lane.slots)),
    ]
    if spec.base_model.source.image is None:
        args += ["--model", model_path(spec)]
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


def arguments(spec: AdapterPoolSpec, lane: Lane) -> list[str]:
    """vLLM's command line."""
    engine = spec.engine
    args = [
        *("--model", model_path(spec)),
        *("--served-model-name", spec.base_model.name),
        *("--host", "127.0.0.1"),
        *("--port", str(PORT)),
        *("--dtype", engine.dtype.value),
        *("--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(lane.slots)),
        *("--tensor-parallel-size", str(engine.tensor_parallel)),
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",  # cached tokens are counted: leaks between tenants can be looked for
        "--enable-tokenizer-info-endpoint",  # the agent refuses special tokens in what clients send
    ]
    if engine.pool_bytes is not None and engine.resources.accelerator is not None:
        args += ["--kv-cache-memory-bytes", str(engine.pool_bytes)]
    if spec.lora is None:
        return args
    return [
        *args,
        "--enable-lora",
        *("--max-lora-rank", str(next(rank for rank in _RANKS if rank >= spec.lora.max_rank))),
        *("--max-loras", str(min(_IN_ONE_BATCH, spec.lora.max_registered))),
        *("--max-cpu-loras", str(spec.lora.max_registered)),
    ]


def volumes(spec: AdapterPoolSpec) -> list[Obj]:
    """The engine's, and folders that vLLM alone writes to."""
    return [
        *engine_volumes(spec),
        {"name": "scratch", "emptyDir": {"sizeLimit": "8Gi"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
    ]


def _health() -> Obj:
    """Asked inside the container: kubelet does not reach the pod's loopback."""
    return {"exec": {"command": ["python3", "-c", _IS_HEALTHY]}, "timeoutSeconds": 10}


def _environment(spec: AdapterPoolSpec) -> list[Obj]:
    values = {
        "HF_HUB_OFFLINE": "1",
        "HOME": "/tmp",  # noqa: S108  (a mount point of the pod)
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if spec.lora is not None:
        values["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if spec.engine.pool_bytes is not None and spec.engine.resources.accelerator is None:
        # vLLM's CPU build takes whole GiB.
        values["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, spec.engine.pool_bytes >> 30))
    return [{"name": name, "value": value} for name, value in sorted(values.items())]
