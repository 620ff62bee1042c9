"""The controllers on a real API server, with the real watches. Replicas answer over HTTP; nobody runs the pods, so
a kubelet of the test's own makes them from the StatefulSets and marks them as running."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tenantry.api import OperatorConfig, names
from tenantry.api.identity import Signer
from tenantry.attestation.trust import Trust
from tenantry.cluster import (
    ADAPTER,
    ADAPTER_POOL,
    NAMESPACE,
    NODE,
    POD,
    STATEFUL_SET,
    TENANT,
    ApiError,
    Client,
    Key,
    Obj,
    Recorder,
    Resource,
    key_of,
    resource_of,
)
from tenantry.controllers import World, controllers
from tenantry.controllers.world import Pool
from tenantry.engines import Replica
from tenantry.promotion.retire import GRACE_SECONDS
from tenantry.runtime.controller import Fence, Setup
from tenantry.runtime.hub import Hub
from tenantry.runtime.resync import Resync
from tenantry.runtime.store import Store
from tenantry.runtime.watching import watch
from tenantry.runtime.workers import Workers

TESTS = Path(__file__).parents[2]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from support.replicas import Engine, Fleet, Gateway  # noqa: E402

if TYPE_CHECKING:
    from tests.conftest import ApiServer


class LabWorld(World):
    """Replicas are reached at the test's own port instead of the pods' addresses."""

    fleet: Fleet

    gates: dict[str, str]

    def peer(self, pool: Pool, replica: str, ip: str) -> Replica:
        return Replica(f"{pool.namespace}/{replica}", self.fleet.url(replica), pool.uid)

    def gateway_url(self, pod: Obj) -> str:
        return f"http://127.0.0.1:{self.fleet.port}/gateways/{pod['metadata']['name']}"

    def gate(self, pool: Pool, replica: str, ip: str) -> str:
        return self.gates.get(replica, "http://127.0.0.1:9")


class Operator:
    """One life of the operator, on a thread and event loop of its own; `stop` is a crash: nothing is handed over."""

    epoch = 0

    def __init__(self, lab: Lab) -> None:
        Operator.epoch += 1
        self._fences = itertools.count(1)
        self._epoch = Operator.epoch
        self.lab = lab
        self.world: LabWorld
        self.hub: Hub
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True)

    async def start(self) -> None:
        self._thread.start()
        assert await asyncio.to_thread(self._ready.wait, 30), "the store was not complete within 30 s"

    async def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        await asyncio.to_thread(self._thread.join, 30)

    async def _live(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        client = await Client.connect(self.lab.kubeconfig, backoff_seconds=0.01)
        hub = Hub(Store())
        signer = Signer(names.OPERATOR_ISSUER, self.lab.identity)
        recorder = Recorder(client)
        config, trust = self.lab.config, self.lab.trust
        setup = Setup(client, hub.store, config, recorder, signer, hub.enqueue, self._fence, trust)
        self.world = LabWorld(setup)
        self.world.gates = self.lab.gates
        self.world.fleet = self.lab.fleet
        self.world.retire_seconds = GRACE_SECONDS
        self.world.gateway_urls = [f"http://127.0.0.1:{self.lab.fleet.port}/gateway"]
        self.hub = hub
        for controller in controllers(self.world):
            hub.register(controller)
        client.on_object, client.on_gone = hub.answered, hub.left

        async def manage() -> None:
            await Resync(client, hub, 3600.0).complete()
            self._ready.set()
            await Workers(hub, setup).run()

        tasks = [asyncio.create_task(part) for part in (manage(), recorder.run(), watch(hub, lambda: None))]
        await self._end.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.world.http.aclose()
        await client.close()

    def _fence(self) -> Fence:
        return Fence(self._epoch, next(self._fences))


async def wait_for(probe: Callable[[], Awaitable[Any]], what: str, seconds: float = 30.0) -> Any:
    """The first truthy answer of the probe; fails with `what` and the last answer."""
    deadline = time.monotonic() + seconds
    while True:
        value = await probe()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.05)


class Lab:
    """Objects with names of this test, replicas, and operators that come and go."""

    def __init__(
        self, kubeconfig: Path, client: Client, fleet: Fleet, config: OperatorConfig, suffix: str
    ) -> None:
        self.kubeconfig = kubeconfig
        self.client = client
        self.fleet = fleet
        self.config = config
        self.suffix = suffix
        self.made: list[tuple[Resource, Key]] = []
        self.unready: set[str] = set()
        self.crashing: set[str] = set()
        self.foreign: set[str] = set()
        self.broken_on: dict[str, dict[str, str]] = {}
        self.operator: Operator | None = None
        self.identity = Ed25519PrivateKey.generate()
        self.trust: Trust | None = None
        self.gates: dict[str, str] = {}
        self.scheduled: dict[str, str] = {}
        """Pod -> the node that a scheduler would choose; a cordon keeps it from coming back."""
        self._revisions: dict[str, str] = {}

    # operator

    async def start(self) -> Operator:
        self.operator = Operator(self)
        await self.operator.start()
        return self.operator

    async def stop(self) -> None:
        if self.operator is not None:
            await self.operator.stop()
            self.operator = None

    # objects

    def name(self, base: str) -> str:
        return f"{base}-{self.suffix}"

    async def make(self, obj: Obj) -> Obj:
        created = await self.client.create(obj)
        self.made.append((resource_of(obj), key_of(obj)))
        return created

    async def pool(self, name: str, **spec: Any) -> Obj:
        wire: Obj = {
            "baseModel": {"name": f"tiny-{self.suffix}", "source": {"image": {"path": "/models/tiny"}}},
            "tiers": ["Free"],
            "lanes": [{"name": "fast", "replicas": {"min": 2}, "slots": 8}],
            "upgrade": {"canarySeconds": 0},
            **spec,
        }
        return await self.make(_root("AdapterPool", self.name(name), wire))

    async def settled_pool(self, name: str, **spec: Any) -> Obj:
        """The same, with every replica ready."""
        pool = await self.pool(name, **spec)
        await self.until(ADAPTER_POOL, name, "Degraded", "False", "AllReady")
        return pool

    async def tenant(self, name: str, **spec: Any) -> Obj:
        wire: Obj = {"tier": "Free", "models": [self.model("chat")], **spec}
        return await self.make(_root("Tenant", self.name(name), wire))

    def model(self, alias: str, adapter: str | None = None) -> Obj:
        model: Obj = {"name": alias, "baseModel": f"tiny-{self.suffix}"}
        if adapter is not None:
            model["adapterRef"] = {"namespace": self.config.release_namespace, "name": adapter}
        return model

    async def adapter(
        self, name: str, tenant: str, versions: dict[str, str], stable: str, **spec: Any
    ) -> Obj:
        obj = _root("Adapter", name, {**adapter_spec(self.name(tenant), versions, stable), **spec})
        obj["metadata"]["namespace"] = self.config.release_namespace
        return await self.make(obj)

    async def gateway(self, name: str, *routes: str) -> Gateway:
        """A gateway's pod; what it answers is the test's."""
        meta = {"name": name, "namespace": self.config.release_namespace, "labels": GATEWAY_LABELS}
        spec = {"containers": [{"name": "gateway", "image": "x"}]}
        pod = await self.make({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        await self.set_pod(pod, ready=True)
        self.fleet.gateways[name] = Gateway(list(routes))
        return self.fleet.gateways[name]

    async def edit(self, resource: Resource, name: str, spec: Obj) -> Obj:
        return await self.client.merge_patch(resource, self.key(resource, name), {"spec": spec})

    def key(self, resource: Resource, name: str) -> Key:
        if resource == ADAPTER:
            return Key(self.config.release_namespace, name)
        return Key("", self.name(name))

    async def get(self, resource: Resource, name: str) -> Obj | None:
        return await self.client.get(resource, self.key(resource, name))

    async def remove(self, resource: Resource, key: Key) -> None:
        live = await self.client.get(resource, key)
        if live is not None:
            await self.client.delete(resource, key, uid=live["metadata"]["uid"])

    async def condition(self, resource: Resource, name: str, kind: str) -> Obj:
        obj = await self.get(resource, name) or {}
        conditions = (obj.get("status") or {}).get("conditions") or []
        return next((entry for entry in conditions if entry["type"] == kind), {})

    async def until(
        self, resource: Resource, name: str, kind: str, status: str, reason: str = "", generation: int = 0
    ) -> Obj:
        """Wait for a condition, that of a spec no older than `generation`."""
        last: Obj = {}

        async def probe() -> Obj | None:
            nonlocal last
            last = await self.condition(resource, name, kind)
            seen = last.get("status") == status and last.get("observedGeneration", 0) >= generation
            return last if seen and reason in ("", last.get("reason")) else None

        try:
            found: Obj = await wait_for(probe, f"{kind}={status} {reason}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {last}") from None
        return found

    async def until_unready(self, pool: str) -> None:
        """Wait until the operator knows that a pool which was ready has no ready replica."""
        await self.until(ADAPTER_POOL, pool, "Ready", "False", "NoReplicaReady")

    async def route(self, tenant: str) -> Obj:
        return ((await self.get(TENANT, tenant) or {}).get("status") or {}).get("route") or {}

    async def served(self, tenant: str) -> dict[str, str]:
        """Alias -> served name."""
        return {
            m["name"]: m["targets"][0]["servedName"] for m in (await self.route(tenant)).get("models", [])
        }

    # what a kubelet and the StatefulSet controller would do

    async def kubelet(self) -> None:
        """Makes pods from StatefulSets and marks them as running, for ever."""
        while True:
            try:
                async for workload in self.client.list(STATEFUL_SET):
                    await self._run(workload)
            except ApiError:
                pass  # somebody else was faster
            await asyncio.sleep(0.1)

    async def _run(self, workload: Obj) -> None:
        meta = workload["metadata"]
        if (
            meta.get("deletionTimestamp")
            or not meta["name"].endswith(("-fast", "-bulk"))
            or self.suffix not in str(workload)
        ):
            return
        template = workload["spec"]["template"]
        revision = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
        replicas = workload["spec"]["replicas"]
        status = workload.get("status") or {}
        if status.get("updateRevision") != revision or status.get("observedGeneration") != meta["generation"]:
            patch = {
                "replicas": replicas,
                "updateRevision": revision,
                "observedGeneration": meta["generation"],
            }
            await self.client.transport.request(
                "PATCH",
                STATEFUL_SET.path(meta["namespace"], meta["name"], "status"),
                body={"status": patch},
                content_type="application/merge-patch+json",
            )
        for ordinal in range(replicas):
            await self._run_pod(workload, f"{meta['name']}-{ordinal}", revision)

    async def _run_pod(self, workload: Obj, name: str, revision: str) -> None:
        namespace = workload["metadata"]["namespace"]
        pod = await self.client.get(POD, Key(namespace, name))
        node = self.scheduled.get(name)
        if node is not None and await self._held_up(pod, node):
            return
        if pod is None:
            template = workload["spec"]["template"]
            owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": workload["metadata"]["name"],
                     "uid": workload["metadata"]["uid"], "controller": True}  # fmt: skip
            labels = {**template["metadata"]["labels"], "controller-revision-hash": revision}
            meta = {"name": name, "namespace": namespace, "labels": labels, "ownerReferences": [owner]}
            spec = {**template["spec"], **({"nodeName": node} if node else {})}
            spec.pop("runtimeClassName", None)  # whose object no test here makes
            pod = await self.client.create(
                {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
            )
            args = template["spec"]["containers"][0]["args"]
            served = args[args.index("--model-name") + 1]
            image = template["spec"]["containers"][0]["image"]
            model = "another" if image in self.foreign else served
            self.fleet.engines[name] = Engine(model=model, broken=dict(self.broken_on.get(name, {})))
        crashes = pod["spec"]["containers"][0]["image"] in self.crashing
        away = crashes or name in self.unready or self.fleet.engines[name].drained
        ready = "False" if away else "True"
        current = [
            c["status"] for c in (pod.get("status") or {}).get("conditions") or [] if c["type"] == "Ready"
        ]
        if current != [ready]:
            await self.set_pod(pod, ready=ready == "True", restarts=3 if crashes else 0)

    async def _held_up(self, pod: Obj | None, node: str) -> bool:
        """Whether the pod has to wait: for its end, which a kubelet confirms, or for a node that is cordoned."""
        if pod is not None and pod["metadata"].get("deletionTimestamp"):
            meta = pod["metadata"]
            path = POD.path(meta["namespace"], meta["name"])
            await self.client.transport.request("DELETE", path, body={"gracePeriodSeconds": 0})
            return True
        live = await self.client.get(NODE, Key("", node))
        return pod is None and bool((live or {}).get("spec", {}).get("unschedulable"))

    async def set_pod(
        self, pod: Obj, *, ready: bool, container: str | None = None, restarts: int = 0
    ) -> None:
        meta = pod["metadata"]
        engine = {
            "name": "engine",
            "image": "x",
            "imageID": "x",
            "ready": ready,
            "restartCount": restarts,
            "containerID": container or f"containerd://{meta['uid']}",
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }
        status = {
            "podIP": "10.244.0.9",
            "podIPs": [{"ip": "10.244.0.9"}],
            "phase": "Running",
            "containerStatuses": [engine],
            "conditions": [{"type": "Ready", "status": str(ready)}],
        }
        await self.client.transport.request(
            "PATCH",
            POD.path(meta["namespace"], meta["name"], "status"),
            body={"status": status},
            content_type="application/merge-patch+json",
        )

    async def clean(self) -> None:
        for resource, key in reversed(self.made):
            await self.remove(resource, key)
            live = await self.client.get(resource, key)
            if live is not None and live["metadata"].get("finalizers"):
                await self.client.merge_patch(resource, key, {"metadata": {"finalizers": None}})
        for resource in (TENANT, ADAPTER_POOL):
            async for obj in self.client.list(resource):
                if self.suffix in obj["metadata"]["name"]:
                    await self.remove(resource, Key("", obj["metadata"]["name"]))


GATEWAY_LABELS = {"app.kubernetes.io/name": "tenantry", "app.kubernetes.io/component": "gateway"}


def _root(kind: str, name: str, spec: Obj) -> Obj:
    return {"apiVersion": "tenantry.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def adapter_spec(tenant: str, versions: dict[str, str], stable: str) -> Obj:
    """`versions` maps versions to the letter of their digest."""
    listed = [
        {"version": v, "digest": digest(letter), "source": f"oci://registry.example/tone:{v}", "rank": 8}
        for v, letter in versions.items()
    ]
    return {"tenantRef": tenant, "versions": listed, "channels": [{"name": "stable", "version": stable}]}


def _config(namespace: str, fleet: Fleet, suffix: str) -> OperatorConfig:
    limits = {
        "requestsPerMinute": 60,
        "tokensPerMinute": 1000,
        "maxInFlight": 4,
        "maxQueued": 8,
        "maxInputTokens": 512,
        "maxOutputTokens": 128,
    }
    policy = {"defaults": limits, "ceilings": {name: 10 * value for name, value in limits.items()}}
    template = {
        "baseModel": {"name": f"tiny-{suffix}", "source": {"image": {"path": "/models/tiny"}}},
        "tiers": ["Enterprise"],
        "lanes": [{"name": "fast"}],
        "lora": {"maxRank": 16},
    }
    return OperatorConfig.model_validate(
        {
            "releaseNamespace": namespace,
            "engineImage": "registry.example/engine:1",
            "gatewayUrl": "http://gateway.example/v1",
            "fetcherUrl": f"http://127.0.0.1:{fleet.port}/fetcher",
            "tiers": {
                "Free": policy,
                "Smb": policy,
                "MidMarket": policy,
                "Enterprise": {**policy, "poolTemplates": ["gold"]},
                "Regulated": {**policy, "poolTemplates": ["gold"]},
            },
            "poolTemplates": {"gold": template},
            "workers": 4,
        }
    )


@pytest.fixture
async def lab(apiserver: ApiServer, crds: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    suffix = uuid.uuid4().hex[:6]
    namespace = f"lab-{suffix}"
    monkeypatch.setitem(os.environ, "KUBECONFIG", str(apiserver.kubeconfig))
    fleet = Fleet()
    server = await fleet.start()
    client = await Client.connect(apiserver.kubeconfig, backoff_seconds=0.01)
    await client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    lab = Lab(apiserver.kubeconfig, client, fleet, _config(namespace, fleet, suffix), suffix)
    kubelet = asyncio.create_task(lab.kubelet())
    await client.create(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": names.IDENTITY_CONFIGMAP, "namespace": namespace},
            "data": {"operator.crt": "certificate"},
        }
    )
    try:
        yield lab
    finally:
        await lab.stop()
        kubelet.cancel()
        await asyncio.gather(kubelet, return_exceptions=True)
        await lab.clean()
        await lab.remove(NAMESPACE, Key("", namespace))
        await client.close()
        await server.cleanup()


@pytest.fixture
def until() -> Callable[..., Awaitable[Any]]:
    """`await until(probe)` waits for a truthy answer, `await until(probe, value)` for that value."""

    async def wait(probe: Callable[[], Awaitable[Any]], *expected: Any, seconds: float = 30.0) -> Any:
        last: Any = None

        async def check() -> Any:
            nonlocal last
            last = await probe()
            return (last == expected[0]) if expected else last

        try:
            await wait_for(check, str(expected), seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {last}") from None
        return last

    return wait
