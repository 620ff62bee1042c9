"""Pods, replicas and a fetcher that are there and do nothing, so that thousands of tenants need no real engines.

A process of its own: it makes the pods that StatefulSets ask for and marks them ready, as their controller and a
kubelet would; answers the admin port of each replica on a loopback address of its own, as the wire reference describes
it; and answers the fetcher's calls, every adapter verified and pushed at once.

    python bench/hollow.py --kubeconfig FILE --fetcher-port PORT
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web
from tenantry.api import names
from tenantry.cluster import POD, STATEFUL_SET, ApiError, Client, Key, Obj, is_deleting, key_of
from tenantry.cluster.client import MANAGED

MERGE = "application/merge-patch+json"
Wire = dict[str, Any]


@dataclass
class Replica:
    """What a replica was told last. Bytes count as held once the fetcher pushed them."""

    address: str
    model: str
    fence: tuple[int, int] = (0, 0)
    adapters: dict[str, Wire] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)

    def report(self) -> Wire:
        adapters = [
            {**entry, "state": "Registered" if entry["digest"] in self.held else "Missing"}
            for entry in self.adapters.values()
        ]
        return {
            "fence": {"epoch": self.fence[0], "counter": self.fence[1]},
            "ready": True,
            "draining": False,
            "model": {"name": self.model, "digest": ""},
            "capacity": {
                "maxRank": 64,
                "maxRegistered": 10_000,
                "slots": 16,
                "pages": {"total": 4096, "free": 4096},
            },
            "adapters": adapters,
        }

    def load(self) -> Wire:
        registered = [entry["name"] for entry in self.adapters.values() if entry["digest"] in self.held]
        idle = dict.fromkeys(("running", "waiting", "outstandingTokens"), 0)
        return {
            "ready": True,
            "draining": False,
            "slots": 16,
            **idle,
            "registered": registered,
            "resident": [],
        }


class Fleet:
    """All replicas, by pod."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self._by_address: dict[str, Replica] = {}
        self._numbers = itertools.count(1)
        self._runner = web.AppRunner(self._app(), access_log=None)

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/admin/v1/adapters", self._observe)
        app.router.add_put("/admin/v1/adapters", self._declare)
        app.router.add_get("/admin/v1/load", self._load)
        app.router.add_post("/v1/transfers", self._transfer)
        app.router.add_route("*", "/{path:.*}", self._nothing)
        return app

    async def start(self, fetcher_port: int) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", fetcher_port).start()

    async def add(self, pod: str, model: str) -> Replica:
        """A replica on the next free address of 127.77.0.0/16, which serves the model."""
        known = self.replicas.get(pod)
        if known is None:
            number = next(self._numbers)
            known = self.replicas[pod] = Replica(f"127.77.{number // 250}.{number % 250 + 1}", model)
            self._by_address[known.address] = known
            await web.TCPSite(self._runner, known.address, names.ENGINE_ADMIN_PORT).start()
        return known

    def _addressed(self, request: web.Request) -> Replica:
        assert request.transport is not None
        return self._by_address[request.transport.get_extra_info("sockname")[0]]

    async def _observe(self, request: web.Request) -> web.Response:
        return web.json_response(self._addressed(request).report())

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response(self._addressed(request).load())

    async def _declare(self, request: web.Request) -> web.Response:
        replica, body = self._addressed(request), await request.json()
        fence = (body["fence"]["epoch"], body["fence"]["counter"])
        if fence < replica.fence:
            return web.json_response({"error": {"message": "fenced", "code": "fenced"}}, status=409)
        replica.fence = fence
        replica.adapters = {entry["name"]: entry for entry in body["adapters"]}
        return web.json_response(replica.report())

    async def _transfer(self, request: web.Request) -> web.Response:
        body = await request.json()
        pushed = []
        for entry in body["replicas"]:
            replica = self.replicas.get(entry["name"].partition("/")[2])
            if replica is not None:
                replica.held.add(body["digest"])
            pushed.append({"name": entry["name"], "state": "Pushed" if replica is not None else "Waiting"})
        return web.json_response(
            {
                "digest": body["digest"],
                "artifact": {"state": "Verified", "bytes": 1},
                "adapter": {"rank": 8, "baseModel": "bench", "targetModules": ["q_proj"]},
                "replicas": pushed,
            }
        )

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.json_response({})


class Kubelet:
    """Makes pods from StatefulSets and takes away those that no StatefulSet asks for any more."""

    def __init__(self, client: Client, fleet: Fleet) -> None:
        self._client = client
        self._fleet = fleet

    async def run(self) -> None:
        while True:
            with contextlib.suppress(ApiError):  # somebody else was faster, or the server is busy
                await self._turn()
            await asyncio.sleep(0.5)

    async def _turn(self) -> None:
        pods = {key_of(pod): pod async for pod in self._client.list(POD, labels=MANAGED)}
        wanted: set[Key] = set()
        async for workload in self._client.list(STATEFUL_SET, labels=MANAGED):
            if not is_deleting(workload):
                wanted |= await self._run(workload, pods)
        for key, pod in pods.items():
            if key not in wanted:
                await self._client.transport.request("DELETE", POD.path(*key), body={"gracePeriodSeconds": 0})
                self._fleet.replicas.pop(pod["metadata"]["name"], None)

    async def _run(self, workload: Obj, pods: dict[Key, Obj]) -> set[Key]:
        meta = workload["metadata"]
        template = workload["spec"]["template"]
        revision = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
        count = int(workload["spec"].get("replicas", 1))
        status = {
            "replicas": count,
            "readyReplicas": count,
            "updateRevision": revision,
            "observedGeneration": meta["generation"],
        }
        if any((workload.get("status") or {}).get(name) != value for name, value in status.items()):
            await self._status(STATEFUL_SET.path(meta["namespace"], meta["name"], "status"), status)
        keys = [Key(meta["namespace"], f"{meta['name']}-{ordinal}") for ordinal in range(count)]
        for key in keys:
            if key not in pods:
                await self._start(workload, key, revision)
        return set(keys)

    async def _start(self, workload: Obj, key: Key, revision: str) -> None:
        meta, template = workload["metadata"], workload["spec"]["template"]
        owner = {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        labels = {**template["metadata"]["labels"], "controller-revision-hash": revision}
        arguments = template["spec"]["containers"][0]["args"]
        replica = await self._fleet.add(key.name, arguments[arguments.index("--model-name") + 1])
        await self._client.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": key.name,
                    "namespace": key.namespace,
                    "labels": labels,
                    "ownerReferences": [owner],
                },
                "spec": {"containers": [{"name": "engine", "image": "hollow"}]},
            }
        )
        await self._status(POD.path(*key, "status"), _running(replica.address))

    async def _status(self, path: str, status: Obj) -> None:
        await self._client.transport.request("PATCH", path, body={"status": status}, content_type=MERGE)


def _running(address: str) -> Obj:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    engine = {
        "name": "engine",
        "ready": True,
        "restartCount": 0,
        "image": "hollow",
        "imageID": "",
        "containerID": f"hollow://{address}",
        "state": {"running": {"startedAt": now}},
    }
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}],
        "containerStatuses": [engine],
    }


async def serve(kubeconfig: Path, fetcher_port: int) -> None:
    client = await Client.connect(kubeconfig, user_agent="hollow")
    fleet = Fleet()
    await fleet.start(fetcher_port)
    await Kubelet(client, fleet).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--fetcher-port", type=int, required=True)
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options.kubeconfig, options.fetcher_port))


if __name__ == "__main__":
    main()
